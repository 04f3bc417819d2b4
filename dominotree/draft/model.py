"""The draft model: DFlash backbone and, in a Domino checkpoint, the head on top of it.

Shapes: B batch, S context positions, A anchors, K drafted slots, H hidden, F target features, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from .backbone import ContextKV, DFlashBackbone, FixedContext
from .config import DraftConfig
from .head import DominoHead
from .masks import ATTENTIONS, FLEX_HEAD_DIM, AnchorBlocks, Attend, anchor_block_rule, attend_by_mask

Embed = Callable[[Tensor], Tensor]  # token ids [...] -> embeddings [..., H], the target's


class DraftModel(nn.Module):
    """Drafts a block in one pass. It owns neither embeddings nor LM head: the target's are used."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.directory: Path | None = None  # where it was loaded from
        self.attention: str | None = None  # of ATTENTIONS, for training; None: by device
        self.backbone = DFlashBackbone(config)
        self.head: DominoHead | None = None
        if config.head is not None:
            self.head = DominoHead(
                config.hidden_size, config.head.gru_hidden_dim, config.head.emb_dim, config.vocab_size
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.backbone.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.backbone.fc.weight.device

    def draft_hidden(
        self,
        anchor_ids: Tensor,  # [B] the last committed token of each sequence
        anchor_positions: Tensor,  # [B]
        embed: Embed,
        context: ContextKV,
        context_length: int,
    ) -> Tensor:  # [B, K, H] hidden states of the slots that predict, in order of the tokens they predict
        """One decoding block `[anchor, mask, ...]` behind the context held by `context`."""
        size = self.config.block_size
        block = anchor_ids.new_full((len(anchor_ids), size), self.config.mask_token_id)
        block[:, 0] = anchor_ids
        positions = anchor_positions[:, None] + torch.arange(size, device=anchor_ids.device)
        anchors = anchor_positions[:, None]
        keep = torch.ones_like(anchors, dtype=torch.bool)
        blocks = AnchorBlocks(anchors, torch.zeros_like(anchors), keep, context_length, size)
        everything: dict[tuple[int | None, bool], Attend] = {(None, False): attend_by_mask(None)}
        attends = self._attends("dense", blocks, everything)
        hidden = self.backbone(embed(block), positions, context, attends)
        return hidden[:, size - self.config.draft_length :]

    def train_hidden(
        self,
        anchor_ids: Tensor,  # [B, A] the token at each anchor
        anchors: Tensor,  # [B, A] positions
        keep: Tensor,  # [B, A] bool, False for padding
        features: Tensor,  # [B, S, F]
        embed: Embed,
        starts: Tensor | None = None,  # [B, S] where in its row each token's sample begins; None: at 0, one a row
    ) -> Tensor:  # [B, A, block, H] hidden states of every slot of every block
        """All anchor blocks of a batch at once, each seeing only the context of its own sample before its anchor."""
        size = self.config.block_size
        block = anchor_ids[..., None].expand(-1, -1, size).clone()
        block[..., 1:] = self.config.mask_token_id
        context_positions = torch.arange(features.shape[1], device=features.device)[None]
        block_starts = torch.zeros_like(anchors)
        if starts is not None:
            context_positions = context_positions - starts
            block_starts = starts.gather(1, anchors)
        positions = (anchors - block_starts)[..., None] + torch.arange(size, device=anchors.device)
        context = FixedContext(self.backbone.project_context(features, context_positions))
        blocks = AnchorBlocks(anchors, block_starts, keep, features.shape[1], size)
        attends = self._attends(self.training_attention, blocks, {})
        hidden = self.backbone(embed(block.flatten(1)), positions.flatten(1), context, attends)
        return hidden.unflatten(1, (-1, size))

    def teacher_forced_logits(
        self,
        hidden: Tensor,  # [B, K, H] of the slots that predict
        base_logits: Tensor,  # [B, K, V]
        prefix_ids: Tensor,  # [B, K] anchor and the first K-1 true tokens: what is known before each prediction
        embed: Embed,
    ) -> Tensor:  # [B, K, V]
        """Final logits of a whole block with the true tokens as prefix (Domino, section 3): `L = L_base + dL`."""
        if self.head is None:
            return base_logits
        first = self.config.uncorrected_length
        states = self.head.prefix_states(embed(prefix_ids).to(self.dtype))
        corrected = base_logits[:, first:] + self.head.correction(hidden[:, first:], states[:, first:])
        return torch.cat([base_logits[:, :first], corrected], dim=1)

    @property
    def training_attention(self) -> str:
        if self.attention is not None:
            return self.attention
        flex = self.device.type == "cuda" and self.config.head_dim >= FLEX_HEAD_DIM
        return "flex" if flex else "grouped"

    def _attends(
        self,
        attention: str,
        blocks: AnchorBlocks,
        known: Mapping[tuple[int | None, bool], Attend],  # by window and causality
    ) -> list[Attend]:
        """Attention of the layers, one made for each kind that is not known."""
        kinds = [(self.config.window(layer), self.config.causal(layer)) for layer in range(len(self.backbone.layers))]
        made = dict(known)
        for window, causal in set(kinds) - made.keys():
            rule = anchor_block_rule(blocks, window=window, causal=causal)
            made[window, causal] = ATTENTIONS[attention](rule, blocks)
        return [made[kind] for kind in kinds]


@torch.no_grad()
def initialize(draft: DraftModel, generator: torch.Generator) -> None:
    """Published initialisation: linear layers N(0, initializer_range), norms one, GRU U(±1/sqrt(G))."""
    for module in draft.modules():
        if isinstance(module, nn.GRU):
            bound = 1 / math.sqrt(module.hidden_size)
            for weight in module.parameters():
                weight.uniform_(-bound, bound, generator=generator)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0.0, draft.config.initializer_range, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
