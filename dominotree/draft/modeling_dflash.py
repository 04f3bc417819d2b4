"""What `AutoModel.from_pretrained(draft_directory, trust_remote_code=True)` opens.

A thin PreTrainedModel around `DraftModel` whose weights carry the published, flat names. The library itself reads
checkpoints through `dominotree.draft.checkpoint`, which is strict; this file travels inside saved draft directories.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from .backbone import FixedContext
from .layout import parse_config
from .model import DraftModel, Embed


class DFlashDraftModel(PreTrainedModel):
    """A DFlash or Domino drafter; it needs the target's embeddings and LM head to draft tokens.

    `forward` gives the hidden states of one block; `head` holds the Domino head's step and correction.
    """

    config_class = Qwen3Config
    draft: DraftModel

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        draft = DraftModel(parse_config(config.to_dict()))
        # The same modules under their published names; `draft` itself is kept out of the module tree, or every
        # weight would have two names.
        for name, module in [*draft.backbone.named_children(), *_named_head(draft)]:
            self.add_module(name, module)
        object.__setattr__(self, "draft", draft)
        self.post_init()

    @property
    def head(self) -> torch.nn.Module | None:
        return self.draft.head

    @torch.no_grad()
    def forward(
        self,
        anchor_ids: Tensor,  # [B]
        target_features: Tensor,  # [B, S, F] of every position before the anchor
        embed: Embed,
    ) -> Tensor:  # [B, K, H]
        """Hidden states of the slots that predict, for the block that follows S context positions."""
        length = target_features.shape[1]
        positions = torch.arange(length, device=target_features.device)[None]
        context = FixedContext(self.draft.backbone.project_context(target_features, positions))
        return self.draft.draft_hidden(anchor_ids, torch.full_like(anchor_ids, length), embed, context, length)


def _named_head(draft: DraftModel) -> list[tuple[str, torch.nn.Module]]:
    return [] if draft.head is None else list(draft.head.named_children())
