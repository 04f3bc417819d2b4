"""One forward pass of training: the part that runs inside the data-parallel engine. The target stays outside.

Shapes: B batch, S tokens, A anchors, K drafted slots, F features, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dominotree.draft.model import DraftModel, Embed

from .objective import LossVocabulary, Objective, domino_objective
from .targets import BlockTargets


@dataclass(frozen=True)
class StepInput:
    """One micro-batch, ready for the drafter."""

    anchor_ids: Tensor  # [B, A]
    anchors: Tensor  # [B, A]
    keep: Tensor  # [B, A]
    features: Tensor  # [B, S, F]
    targets: BlockTargets


class TrainStep(nn.Module):
    """Draft, objective and nothing else, so that only the draft's weights are wrapped, sharded and saved."""

    def __init__(
        self, draft: DraftModel, embed: Embed, lm_weight: Tensor, vocabulary: LossVocabulary, *, self_generated: bool
    ) -> None:
        super().__init__()
        self.draft = draft
        self._vocabulary = vocabulary
        self._self_generated = self_generated
        # In a tuple, so that the target's weights do not become this module's.
        self._target_parts = (embed, lm_weight)

    def forward(self, inputs: StepInput, lambda_base: float) -> Objective:
        embed, lm_weight = self._target_parts
        hidden = self.draft.train_hidden(inputs.anchor_ids, inputs.anchors, inputs.keep, inputs.features, embed)
        hidden = hidden[:, :, hidden.shape[2] - self.draft.config.draft_length :]
        targets = inputs.targets
        if self._self_generated:
            prefix_ids = self_generated_prefixes(self.draft, hidden, targets.prefix_ids, embed, lm_weight)
            targets = BlockTargets(prefix_ids, targets.labels, targets.weights)
        return domino_objective(self.draft, hidden, targets, embed, self._vocabulary, lambda_base)


@torch.no_grad()
def self_generated_prefixes(
    draft: DraftModel,
    hidden: Tensor,  # [B, A, K, H]
    prefix_ids: Tensor,  # [B, A, K] of which only the anchor is kept
    embed: Embed,
    lm_weight: Tensor,  # [V, H]
) -> Tensor:  # [B, A, K]
    """Prefixes as decoding makes them, each token the drafter's own choice: the training-time test."""
    if draft.head is None:
        return prefix_ids
    tokens = [prefix_ids[..., 0]]
    state = draft.head.initial_state(1).expand(*prefix_ids.shape[:2], -1)
    for slot in range(hidden.shape[2] - 1):
        state = draft.head.advance(embed(tokens[-1]).to(hidden.dtype), state)
        logits = nn.functional.linear(hidden[:, :, slot].to(lm_weight.dtype), lm_weight)
        if slot >= draft.config.uncorrected_length:
            logits = logits + draft.head.correction(hidden[:, :, slot], state)
        tokens.append(logits.argmax(dim=-1))
    return torch.stack(tokens, dim=-1)
