"""One forward pass of training: the part that runs inside the data-parallel engine. The target stays outside.

Shapes: B rows, S tokens, A anchors, K drafted slots, F features, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dominotree.draft.head import DominoHead
from dominotree.draft.model import DraftModel, Embed

from .cross_entropy import CrossEntropy
from .objective import LOGITS_BYTES, TORCH, LossVocabulary, Objective, domino_objective, rows_in
from .profiling import IDLE, Timeline
from .targets import BlockTargets


@dataclass(frozen=True)
class StepInput:
    """One micro-batch, ready for the drafter."""

    anchor_ids: Tensor  # [B, A]
    anchors: Tensor  # [B, A]
    keep: Tensor  # [B, A]
    features: Tensor  # [B, S, F]
    targets: BlockTargets
    starts: Tensor | None = None  # [B, S] where in its row each token's sample begins; None where no two share a row


class TrainStep(nn.Module):
    """Draft, objective and nothing else, so that only the draft's weights are wrapped, sharded and saved."""

    def __init__(
        self,
        draft: DraftModel,
        embed: Embed,
        lm_weight: Tensor,
        vocabulary: LossVocabulary,
        *,
        self_generated: bool,
        logits_bytes: int = LOGITS_BYTES,
        cross_entropy: CrossEntropy = TORCH,
        timeline: Timeline = IDLE,
    ) -> None:
        super().__init__()
        self.draft = draft
        self._logits_bytes = logits_bytes
        self._cross_entropy = cross_entropy
        self._timeline = timeline
        self._vocabulary = vocabulary
        self._self_generated = self_generated
        # In a tuple, so that the target's weights do not become this module's.
        self._target_parts = (embed, lm_weight)

    def forward(self, inputs: StepInput, lambda_base: float) -> Objective:
        embed, lm_weight = self._target_parts
        self._timeline.switch("backbone")
        hidden = self.draft.train_hidden(
            inputs.anchor_ids, inputs.anchors, inputs.keep, inputs.features, embed, inputs.starts
        )
        hidden = hidden[:, :, hidden.shape[2] - self.draft.config.draft_length :]
        self._timeline.switch("head")
        self._timeline.switch_when_gradient_arrives(hidden, "backbone")
        targets = inputs.targets
        if self._self_generated:
            prefix_ids = self_generated_prefixes(
                self.draft, hidden, targets.prefix_ids, embed, lm_weight, self._logits_bytes
            )
            targets = BlockTargets(prefix_ids, targets.labels, targets.weights)
        return domino_objective(
            self.draft,
            hidden,
            targets,
            embed,
            self._vocabulary,
            lambda_base,
            logits_bytes=self._logits_bytes,
            cross_entropy=self._cross_entropy,
            timeline=self._timeline,
        )


@torch.no_grad()
def self_generated_prefixes(
    draft: DraftModel,
    hidden: Tensor,  # [B, A, K, H]
    prefix_ids: Tensor,  # [B, A, K] of which only the anchor is kept
    embed: Embed,
    lm_weight: Tensor,  # [V, H]
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:  # [B, A, K]
    """Prefixes as decoding makes them, each token the drafter's own choice: the training-time test."""
    if draft.head is None:
        return prefix_ids
    tokens = [prefix_ids[..., 0].flatten()]
    state = draft.head.initial_state(len(tokens[0]))
    for slot, rows in enumerate(hidden.flatten(0, 1).unbind(dim=1)[:-1]):
        state = draft.head.advance(embed(tokens[-1]).to(hidden.dtype), state)
        head = draft.head if slot >= draft.config.uncorrected_length else None
        tokens.append(_best_tokens(rows, state, head, lm_weight, logits_bytes))
    return torch.stack(tokens, dim=-1).view_as(prefix_ids)


def _best_tokens(
    hidden: Tensor,  # [n, H]
    state: Tensor,  # [n, G]
    head: DominoHead | None,  # None: of the base logits
    lm_weight: Tensor,  # [V, H]
    logits_bytes: int,
) -> Tensor:  # [n]
    """The most likely token of every row, chunk by chunk."""
    size = rows_in(logits_bytes, lm_weight, tensors=3)
    best = []
    for rows, states in zip(hidden.split(size), state.split(size), strict=True):
        logits = nn.functional.linear(rows.to(lm_weight.dtype), lm_weight)
        if head is not None:
            logits = logits + head.correction(rows, states)
        best.append(logits.argmax(dim=-1))
    return torch.cat(best)
