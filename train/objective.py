"""The training objective, formed chunk by chunk: the logits of a batch never exist as a whole.

Shapes: B batch, A anchors, K drafted slots, n rows that count, H hidden, R low rank, V vocabulary (or the subset of it
that the loss runs over).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dominotree.draft.model import DraftModel, Embed

from .targets import BlockTargets

CHUNK_ROWS = 256


class LossVocabulary:
    """The tokens that the loss runs over: all of them, or the most frequent ones of the data (FR-Spec's observation
    that few tokens make up most text, applied to training). `restrict` takes the weight off labels outside it."""

    def __init__(self, lm_weight: Tensor, token_ids: Tensor | None = None) -> None:  # [V, H], [v]
        self.token_ids = token_ids
        self.lm_weight = lm_weight if token_ids is None else lm_weight[token_ids]
        self._index = None
        if token_ids is not None:
            self._index = torch.full((len(lm_weight),), -1, dtype=torch.int64, device=lm_weight.device)
            self._index[token_ids] = torch.arange(len(token_ids), device=lm_weight.device)

    def rows(self, output_rows: Tensor) -> Tensor:  # [V, R] -> [v, R]
        return output_rows if self.token_ids is None else output_rows[self.token_ids]

    def labels(self, labels: Tensor) -> Tensor:  # [...] -> [...], -1 outside the subset
        return labels if self._index is None else self._index[labels]

    def restrict(self, targets: BlockTargets) -> BlockTargets:
        """The same targets with no weight on labels outside the subset."""
        return replace(targets, weights=targets.weights * (self.labels(targets.labels) >= 0))


@dataclass(frozen=True)
class Objective:
    """Sums over the rows that count; dividing by the total weight of an update is the caller's, who knows it."""

    loss: Tensor  # [] differentiable: (1 - lambda) * final + lambda * base, weighted sum
    final_loss: Tensor  # [] weighted sum
    base_loss: Tensor  # []
    final_right: Tensor  # [B, A, K] bool, the final logits' argmax is the label
    base_right: Tensor  # [B, A, K] bool


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropies of final logits `[h; z] [W_lm | W2]^T` and of their base part `h W_lm^T`.

    One pass: each chunk's logits give its losses and, at once, its gradients; both losses share the LM-head product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [n, H]
        low_rank: Tensor,  # [n, R], zero where a row keeps its base logits
        lm_weight: Tensor,  # [V, H] frozen
        rows: Tensor,  # [V, R]
        labels: Tensor,  # [n]
        weights: Tensor,  # [n]
        lambda_base: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        wants_hidden, wants_low_rank, wants_rows = (ctx.needs_input_grad[i] for i in (0, 1, 3))
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_low_rank = torch.zeros_like(low_rank) if wants_low_rank else None
        grad_rows = torch.zeros_like(rows, dtype=torch.float32) if wants_rows else None
        final_sum, base_sum = weights.new_zeros(()), weights.new_zeros(())
        final_right, base_right = torch.zeros_like(labels, dtype=torch.bool), torch.zeros_like(labels, dtype=torch.bool)
        for start in range(0, len(labels), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            base = F.linear(hidden[part], lm_weight).float()
            final = base + F.linear(low_rank[part], rows).float()
            for logits, right in ((base, base_right), (final, final_right)):
                right[part] = logits.argmax(dim=-1) == labels[part]
            final_losses, d_final = _losses_and_gradient(final, labels[part], (1 - lambda_base) * weights[part])
            base_losses, d_base = _losses_and_gradient(base, labels[part], lambda_base * weights[part])
            final_sum += (weights[part] * final_losses).sum()
            base_sum += (weights[part] * base_losses).sum()
            narrow = d_final.to(rows.dtype)
            if grad_low_rank is not None:
                grad_low_rank[part] = narrow @ rows
            if grad_rows is not None:
                grad_rows += narrow.T @ low_rank[part]
            if grad_hidden is not None:
                grad_hidden[part] = (d_final + d_base).to(lm_weight.dtype) @ lm_weight
        ctx.gradients = (grad_hidden, grad_low_rank, grad_rows)
        ctx.mark_non_differentiable(final_sum, base_sum, final_right, base_right)
        loss = (1 - lambda_base) * final_sum + lambda_base * base_sum
        return loss, final_sum, base_sum, final_right, base_right

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_low_rank, grad_rows = (
            None if gradient is None else gradient * grad_outputs[0] for gradient in ctx.gradients
        )
        return grad_hidden, grad_low_rank, None, grad_rows, None, None, None


def domino_objective(
    draft: DraftModel,
    hidden: Tensor,  # [B, A, K, H] of the slots that predict
    targets: BlockTargets,
    embed: Embed,
    vocabulary: LossVocabulary,  # with the target's LM head, frozen
    lambda_base: float,
) -> Objective:
    """The base-anchored loss over all blocks with the true tokens as prefix (Domino, section 4).

    Without a head, final and base logits are the same. Touches every parameter of the draft, whatever counts, so that
    data-parallel ranks with nothing to learn, or with lambda at 1, stay in step.
    """
    counts = targets.weights > 0
    low_rank, rows = _low_rank(draft, hidden, targets.prefix_ids, embed)
    dtype = vocabulary.lm_weight.dtype
    # Autocast does not reach into a function with a backward of its own: the dtype is one here, the target's.
    with torch.autocast(hidden.device.type, enabled=False):
        loss, final_loss, base_loss, final_right, base_right = _ChunkedCrossEntropy.apply(
            hidden[counts].to(dtype),
            low_rank[counts].to(dtype),
            vocabulary.lm_weight,
            vocabulary.rows(rows).to(dtype),
            vocabulary.labels(targets.labels)[counts],
            targets.weights[counts],
            lambda_base,
        )
    untouched = sum(parameter.sum() for parameter in draft.parameters() if parameter.requires_grad)
    return Objective(
        loss=loss + 0.0 * untouched,
        final_loss=final_loss,
        base_loss=base_loss,
        final_right=torch.zeros_like(counts).masked_scatter(counts, final_right),
        base_right=torch.zeros_like(counts).masked_scatter(counts, base_right),
    )


def _low_rank(
    draft: DraftModel, hidden: Tensor, prefix_ids: Tensor, embed: Embed
) -> tuple[Tensor, Tensor]:  # [B, A, K, R], [V, R]
    """The vocabulary-sized correction in its factors; zero where the head leaves a slot alone."""
    if draft.head is None:
        return hidden.new_zeros(*hidden.shape[:-1], 0), hidden.new_zeros(draft.config.vocab_size, 0)
    embeds = embed(prefix_ids.flatten(0, 1)).to(hidden.dtype)  # [B*A, K, H]
    states = draft.head.prefix_states(embeds).unflatten(0, prefix_ids.shape[:2])
    low_rank = draft.head.low_rank(hidden, states)
    corrected = torch.arange(hidden.shape[2], device=hidden.device) >= draft.config.uncorrected_length
    return low_rank * corrected[:, None], draft.head.output_rows


def _losses_and_gradient(
    logits: Tensor,  # [n, V] float32
    labels: Tensor,  # [n]
    scale: Tensor,  # [n]
) -> tuple[Tensor, Tensor]:  # [n], [n, V]
    """Cross-entropies, and the gradient of their `scale`-weighted sum."""
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    losses = (normaliser - logits.gather(1, labels[:, None]))[:, 0]
    gradient = (logits - normaliser).exp_() * scale[:, None]
    gradient.scatter_add_(1, labels[:, None], -scale[:, None])
    return losses, gradient
