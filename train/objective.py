"""The training objective, formed chunk by chunk: the logits of a batch never exist as a whole.

Shapes: B batch, A anchors, K drafted slots, n rows that count, c rows of a chunk, H hidden, R low rank, V vocabulary
(or the subset of it that the loss runs over).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dominotree.draft.model import DraftModel, Embed

from .cross_entropy import CrossEntropy, TorchCrossEntropy
from .profiling import IDLE, Timeline
from .targets import BlockTargets, sampled_blocks

LOGITS_BYTES = 128 << 20  # where the caller asks for no size in particular
TORCH = TorchCrossEntropy()


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
        return output_rows if self.token_ids is None else output_rows.index_select(0, self.token_ids)

    def labels(self, labels: Tensor) -> Tensor:  # [...] -> [...], -1 outside the subset
        return labels if self._index is None else self._index[labels]

    def restrict(self, targets: BlockTargets) -> BlockTargets:
        """The same targets with no weight on labels outside the subset."""
        return replace(targets, weights=targets.weights * (self.labels(targets.labels) >= 0))


@dataclass(frozen=True)
class Objective:
    """Sums over the slots that were measured; dividing by the total weight of an update is the caller's, who knows it.

    A loss that λ or a frozen backbone leaves without a gradient is not formed, only measured on a sample of the blocks.
    """

    loss: Tensor  # [] differentiable: (1 - lambda) * final + lambda * base, without a loss that has no gradient
    final_loss: Tensor  # [] weighted sum over `final_measured`
    base_loss: Tensor  # [] weighted sum over `base_measured`
    final_right: Tensor  # [B, A, K] bool, measured and no token's final logit exceeds the label's
    base_right: Tensor  # [B, A, K] bool
    final_measured: Tensor  # [B, A, K] bool
    base_measured: Tensor  # [B, A, K] bool


def domino_objective(
    draft: DraftModel,
    hidden: Tensor,  # [B, A, K, H] of the slots that predict
    targets: BlockTargets,
    embed: Embed,
    vocabulary: LossVocabulary,  # with the target's LM head, frozen
    lambda_base: float,
    logits_bytes: int = LOGITS_BYTES,  # that the logits of a chunk and their gradients may take together
    cross_entropy: CrossEntropy = TORCH,
    timeline: Timeline = IDLE,
) -> Objective:
    """The base-anchored loss over all blocks with the true tokens as prefix (Domino, section 4).

    Without a head, final and base logits are the same. Every trainable weight gets a gradient, be it zero, whatever
    counts, so that data-parallel ranks with nothing to learn, or with lambda at 1, stay in step.
    """
    timeline.switch("head")
    counts = targets.weights > 0
    sample = counts & sampled_blocks(counts)[..., None]
    index = torch.cat([places.flatten().nonzero()[:, 0] for places in (sample, counts & ~sample)])
    low_rank, rows = _low_rank(draft, hidden, targets.prefix_ids, embed)
    timeline.switch("lm_head")
    dtype = vocabulary.lm_weight.dtype
    # Autocast does not reach into a function with a backward of its own: the dtype is one here, the target's.
    with torch.autocast(hidden.device.type, enabled=False):
        sums = one_pass(
            hidden.flatten(0, 2).index_select(0, index).to(dtype),
            low_rank.flatten(0, 2).index_select(0, index).to(dtype),
            vocabulary.lm_weight,
            vocabulary.rows(rows),
            vocabulary.labels(targets.labels).flatten()[index],
            targets.weights.flatten()[index],
            lambda_base,
            sampled=int(sample.sum()),
            logits_bytes=logits_bytes,
            cross_entropy=cross_entropy,
        )
    timeline.switch("head")  # whose backward pass is next, and then the backbone's

    def at_home(values: Tensor) -> Tensor:  # [n] bool -> [B, A, K]
        return torch.zeros_like(counts).flatten().index_copy_(0, index, values).view_as(counts)

    return Objective(
        loss=sums.loss,
        final_loss=sums.final_loss,
        base_loss=sums.base_loss,
        final_right=at_home(sums.final_right),
        base_right=at_home(sums.base_right),
        final_measured=counts if sums.final_whole else sample,
        base_measured=counts if sums.base_whole else sample,
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


class Sums(NamedTuple):
    """What one pass over n rows gives."""

    loss: Tensor  # [] differentiable, as in Objective
    final_loss: Tensor  # []
    base_loss: Tensor  # []
    final_right: Tensor  # [n] bool
    base_right: Tensor  # [n] bool
    final_whole: bool  # measured on all rows, not on the sample alone
    base_whole: bool


def one_pass(
    hidden: Tensor,  # [n, H]
    low_rank: Tensor,  # [n, R], zero where a row keeps its base logits
    lm_weight: Tensor,  # [V, H] frozen
    rows: Tensor,  # [V, R], R 0 without a head
    labels: Tensor,  # [n]
    weights: Tensor,  # [n]
    lambda_base: float,
    *,
    sampled: int,  # leading rows that are a sample of all
    logits_bytes: int,
    cross_entropy: CrossEntropy = TORCH,
) -> Sums:
    """Weighted cross-entropies of final logits `[h; z] [W_lm | W2]^T` and of their base part `h W_lm^T`.

    One pass: each chunk's logits give its losses and, at once, its gradients. Both losses share the LM-head product,
    and so do their gradients to the hidden states: `((1 - lambda) dFinal + lambda dBase) W_lm`.
    """
    if rows.shape[1] == 0:
        loss, _, base_loss, _, base_right = _OnePass.apply(
            hidden, low_rank, lm_weight, rows, labels, weights, 1.0, 0, len(labels), logits_bytes, cross_entropy
        )
        return Sums(loss, base_loss, base_loss, base_right, base_right, True, True)
    # Where nothing is trained, both are only measured, and then on all rows.
    final, base = lambda_base < 1, lambda_base > 0 and (hidden.requires_grad or not torch.is_grad_enabled())
    measured = [len(labels) if whole else sampled for whole in (final, base)]
    loss, final_loss, base_loss, final_right, base_right = _OnePass.apply(
        hidden, low_rank, lm_weight, rows, labels, weights, lambda_base, *measured, logits_bytes, cross_entropy
    )
    return Sums(loss, final_loss, base_loss, final_right, base_right, final, base)


class _OnePass(torch.autograd.Function):
    """See `one_pass`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [n, H]
        low_rank: Tensor,  # [n, R]
        lm_weight: Tensor,  # [V, H]
        rows: Tensor,  # [V, R]
        labels: Tensor,  # [n]
        weights: Tensor,  # [n]
        lambda_base: float,
        final_rows: int,  # leading rows of which final logits are formed
        base_rows: int,
        logits_bytes: int,
        cross_entropy: CrossEntropy,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        wants_hidden, wants_low_rank, _, wants_rows = ctx.needs_input_grad[:4]
        final_trains = lambda_base < 1 and any(ctx.needs_input_grad)
        base_trains = lambda_base > 0 and wants_hidden
        narrow_rows = rows.to(lm_weight.dtype)
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_low_rank = torch.zeros_like(low_rank) if wants_low_rank else None
        grad_rows = torch.zeros_like(rows) if wants_rows else None
        final_sum, base_sum = weights.new_zeros(()), weights.new_zeros(())
        final_right, base_right = torch.zeros_like(labels, dtype=torch.bool), torch.zeros_like(labels, dtype=torch.bool)

        def measure(logits: Tensor, first: int, scratch: Tensor | None, right: Tensor) -> Tensor:  # [c, V] -> []
            own = slice(first, first + len(logits))
            scratch = None if scratch is None else scratch[: len(logits)]
            losses, right[own] = cross_entropy.into_gradient(logits, labels[own], scratch)
            return (weights[own] * losses).sum()

        for part, final, base, scratch in _chunks(final_rows, base_rows, lm_weight, logits_bytes, cross_entropy):
            scale = weights[part, None].to(hidden.dtype)
            shared = base if len(base) >= len(final) else final
            torch.mm(hidden[part], lm_weight.T, out=shared)
            if shared is final:
                base.copy_(final[: len(base)])
            if len(final):
                corrected = slice(part.start, part.start + len(final))
                torch.addmm(shared[: len(final)], low_rank[corrected], narrow_rows.T, out=final)
                final_sum += measure(final, part.start, scratch, final_right)
            if len(base):
                base_sum += measure(base, part.start, scratch, base_right)
            if final_trains:
                if grad_low_rank is not None:
                    grad_low_rank[part] = (final @ narrow_rows) * ((1 - lambda_base) * scale)
                if grad_rows is not None:
                    _accumulate(grad_rows, final.T, low_rank[part] * ((1 - lambda_base) * scale))
            if grad_hidden is not None:
                mixed = _mixture(final if final_trains else None, base if base_trains else None, lambda_base)
                grad_hidden[part] = (mixed @ lm_weight) * scale
        ctx.gradients = (grad_hidden, grad_low_rank, grad_rows)
        ctx.mark_non_differentiable(final_sum, base_sum, final_right, base_right)
        loss = (1 - lambda_base) * final_trains * final_sum + lambda_base * base_trains * base_sum
        return loss, final_sum, base_sum, final_right, base_right

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place, which a second backward pass would find done already.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this objective are gone: they can be asked for once")
        hidden, low_rank, rows = (None if part is None else part.mul_(grad_outputs[0]) for part in gradients)
        return hidden, low_rank, None, rows, None, None, None, None, None, None, None


def rows_in(logits_bytes: int, lm_weight: Tensor, tensors: int, cross_entropy: CrossEntropy = TORCH) -> int:  # [V, H]
    """How many rows of `tensors` logits fit, with what the cross-entropy needs beside one of them."""
    entry = tensors * lm_weight.element_size() + cross_entropy.scratch_bytes(lm_weight.dtype)
    return max(1, logits_bytes // (len(lm_weight) * entry))


def _spans(
    final_rows: int, base_rows: int, lm_weight: Tensor, logits_bytes: int, cross_entropy: CrossEntropy
) -> Iterator[tuple[int, int, int]]:
    """Where each chunk begins, and how many of its rows have final and base logits: the first `final_rows` rows of all
    have the ones, the first `base_rows` the others."""
    start, end = 0, max(final_rows, base_rows)
    while start < end:
        with_both = max(0, min(final_rows, base_rows) - start)
        count = rows_in(logits_bytes, lm_weight, 2, cross_entropy)
        if count > with_both:  # the rows after these take less room
            left = logits_bytes - with_both * len(lm_weight) * lm_weight.element_size()
            count = max(with_both, rows_in(left, lm_weight, 1, cross_entropy))
        count = min(count, end - start)
        yield start, max(0, min(final_rows - start, count)), max(0, min(base_rows - start, count))
        start += count


def _chunks(
    final_rows: int, base_rows: int, lm_weight: Tensor, logits_bytes: int, cross_entropy: CrossEntropy
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:  # final [f, V], base [b, V], scratch [max(f, b), V]
    """Chunks of the rows, with room for the logits that are formed of them. All chunks use the same memory."""
    vocab_size, dtype = len(lm_weight), lm_weight.dtype
    scratch_bytes = cross_entropy.scratch_bytes(dtype)
    spans = list(_spans(final_rows, base_rows, lm_weight, logits_bytes, cross_entropy))
    most = max(((f + b) * dtype.itemsize + max(f, b) * scratch_bytes for _, f, b in spans), default=0)
    memory = torch.empty(most * vocab_size, dtype=torch.uint8, device=lm_weight.device)
    for start, finals, bases in spans:
        count = max(finals, bases)
        taken = 0
        room = []
        # float32 first, so that all parts begin where their numbers may
        for height, kind in ((count * (scratch_bytes > 0), torch.float32), (finals, dtype), (bases, dtype)):
            size = height * vocab_size * kind.itemsize
            room.append(memory[taken : taken + size].view(kind).view(height, vocab_size))
            taken += size
        scratch, final, base = room
        yield slice(start, start + count), final, base, scratch if scratch_bytes else None


def _mixture(final: Tensor | None, base: Tensor | None, lambda_base: float) -> Tensor:  # [c, V] each, None: idle
    """`(1 - lambda) final + lambda base`, in place."""
    if final is None or base is None:
        only = base if final is None else final
        assert only is not None
        return only  # lambda is 0 or 1
    return final.lerp_(base, lambda_base)


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:  # [V, R] += [V, c] @ [c, R]
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
