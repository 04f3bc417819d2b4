"""Scoring the children of tree nodes: what separates the marginal, static-corrected and conditional trees.

Shapes: K drafted slots, H hidden, G GRU state, R low rank, V vocabulary, M candidates, k children.
Scores are log-probabilities, see Scale; equal scores put the lowest token id first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..draft.head import DominoHead
from ..draft.model import Embed
from .topk import SORTED_BELOW, best_ids, ordered_topk

State = TypeVar("State")
Children = tuple[list[int], list[float]]  # token ids and what each adds to the score of its parent, best first


class ChildScorer(Protocol[State]):
    """What a best-first builder asks: a state for each node it selects, and that node's children."""

    def root_state(self) -> State: ...

    def advance(self, state: State, token_id: int) -> State:
        """The state of the child of a node that has `state`, reached by `token_id`."""
        ...

    def children(self, state: State, slot: int) -> Children:
        """Children of a node with `state` at depth `slot`; they are drafted by that slot of the block."""
        ...


@dataclass(frozen=True)
class Scale:
    """How draft logits become scores. A node's score is its path log-probability plus `depth_term` times its depth.

    A positive `temperature` divides the logits. A `depth_term` of 0 or less keeps scores from rising along a path, on
    which best-first search rests.
    """

    temperature: float = 1.0
    depth_term: float = 0.0

    def best(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:  # [..., V] -> float64 and ids, each [..., k]
        """The k best children and what each adds to the score of its parent.

        They are chosen by logits: log-probabilities are rounded, which would make ties where there are none.
        """
        logits = logits.float()
        if self.temperature != 1:
            logits = logits / self.temperature
        log_probs, ids = _best_log_probs(logits, k)
        return log_probs.double() if self.depth_term == 0 else log_probs.double() + self.depth_term, ids


PLAIN = Scale()


@dataclass(frozen=True)
class Proposal:
    """One drafted block of one sequence: all that a builder may look at."""

    root_id: Tensor  # [] the last committed token
    hidden: Tensor  # [K, H] of the slots that predict
    base_logits: Tensor  # [K, V]
    head: DominoHead | None
    uncorrected_length: int  # leading slots that keep their base logits
    embed: Embed
    context_length: int = 0  # committed tokens before the root
    temperature: float = 0.0  # the target's choices are drawn at

    def embed_for_head(self, token_ids: Tensor) -> Tensor:  # [...] -> [..., H], in the head's dtype
        return self.embed(token_ids).to(self.hidden.dtype)


class DepthScorer:
    """Children that depend on the depth alone, whatever the path: no state is carried."""

    def __init__(self, children: list[Children]) -> None:  # one entry a slot
        self._children = children

    def root_state(self) -> None:
        return None

    def advance(self, state: None, token_id: int) -> None:
        return None

    def children(self, state: None, slot: int) -> Children:
        return self._children[slot]


class MarginalScorer(DepthScorer):
    """From the base logits over the full vocabulary (DDTree, section 4)."""

    def __init__(self, base_logits: Tensor, node_topk: int, scale: Scale = PLAIN) -> None:  # [K, V]
        super().__init__(_best_children(base_logits, node_topk, scale))


class CorrectedLogits:
    """Logits of the drafted slots, corrected for a prefix, over the top-M candidates of each slot.

    Slots before `uncorrected_length` keep their base logits and the full vocabulary. A `candidate_width` of 0 takes
    the full vocabulary everywhere. Normalisers run over the candidates only (DominoTree, section 3).
    """

    def __init__(self, proposal: Proposal, candidate_width: int) -> None:
        if proposal.head is None:
            raise ValueError("a corrected tree needs a drafter with a Domino head, this one has none")
        self.head = proposal.head
        self.proposal = proposal
        self._candidates: Tensor | None = None
        if candidate_width:
            base = proposal.base_logits
            # In order of token id, so that ties among candidates fall to the lowest id as everywhere.
            self._candidates = best_ids(base, candidate_width)  # [K, M]
            self._base = base.gather(-1, self._candidates).float()
            self._rows = self.head.output_rows[self._candidates].float()  # [K, M, R]

    def at(self, slot: int, state: Tensor) -> tuple[Tensor, Tensor | None]:  # state [G]
        """Logits [M] or [V] of one slot after a prefix, and the token ids they belong to (None: all, in order)."""
        if slot < self.proposal.uncorrected_length:
            return self.proposal.base_logits[slot].float(), None
        return self.corrected(slot, state)

    def corrected(self, slot: int | Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:  # state [G]
        """The same for a slot that is corrected; a slot on the device, [1], is not waited for."""
        hidden = _entry(self.proposal.hidden, slot)
        if self._candidates is None:
            return _entry(self.proposal.base_logits, slot).float() + self.head.correction(hidden, state).float(), None
        correction = self.head.correction(hidden, state, _entry(self._rows, slot))
        return _entry(self._base, slot) + correction, _entry(self._candidates, slot)

    def root_state(self) -> Tensor:  # [G]
        return self.advance(self.head.initial_state(1)[0], self.proposal.root_id)

    def advance(self, state: Tensor, token_id: Tensor) -> Tensor:  # [G], [] -> [G]
        return self.head.advance(self.proposal.embed_for_head(token_id), state)


class StaticCorrectedScorer(DepthScorer):
    """The correction once a depth, along the greedy chain, shared by all nodes of that depth: the control that tells
    having a correction from conditioning it on the path."""

    def __init__(self, proposal: Proposal, candidate_width: int, node_topk: int, scale: Scale = PLAIN) -> None:
        logits = CorrectedLogits(proposal, candidate_width)
        state = logits.root_state()
        children: list[Children] = []
        for slot in range(len(proposal.hidden)):
            if slot:
                state = logits.advance(state, _token(children[-1][0][0], state))
            children.append(named_children(*logits.at(slot, state), node_topk, scale))
        super().__init__(children)


class ConditionalScorer:
    """Every node scored by the correction along its own path, its prefix state carried from the root (DominoTree)."""

    def __init__(self, proposal: Proposal, candidate_width: int, node_topk: int, scale: Scale = PLAIN) -> None:
        self._logits = CorrectedLogits(proposal, candidate_width)
        self._node_topk = node_topk
        self._scale = scale
        free = min(proposal.uncorrected_length, len(proposal.hidden))
        self._uncorrected = _best_children(proposal.base_logits[:free], node_topk, scale)

    def root_state(self) -> Tensor:  # [G]
        return self._logits.root_state()

    def advance(self, state: Tensor, token_id: int) -> Tensor:  # [G] -> [G]
        return self._logits.advance(state, _token(token_id, state))

    def children(self, state: Tensor, slot: int) -> Children:
        if slot < len(self._uncorrected):
            return self._uncorrected[slot]
        return named_children(*self._logits.at(slot, state), self._node_topk, self._scale)


def named_children(logits: Tensor, token_ids: Tensor | None, node_topk: int, scale: Scale) -> Children:  # [M], [M]
    scores, ids = best_named(logits, token_ids, node_topk, scale)
    return ids.tolist(), scores.tolist()


def best_named(
    logits: Tensor,  # [M]
    token_ids: Tensor | None,  # [M] tokens that the logits belong to; None: all, in order
    node_topk: int,
    scale: Scale,
) -> tuple[Tensor, Tensor]:  # [k] scores and token ids
    scores, chosen = scale.best(logits, node_topk)
    return scores, chosen if token_ids is None else token_ids[chosen]


def _best_children(logits: Tensor, node_topk: int, scale: Scale) -> list[Children]:  # [K, V]
    scores, ids = scale.best(logits, node_topk)
    return list(zip(ids.tolist(), scores.tolist(), strict=True))


def _best_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:  # [..., V] float32 -> values and ids [..., k]
    if logits.shape[-1] < SORTED_BELOW:
        best, ids = logits.sort(dim=-1, descending=True, stable=True)
        return best.log_softmax(dim=-1)[..., :k], ids[..., :k]
    best, ids = ordered_topk(logits, k)
    highest = best[..., :1]
    return best - highest - (logits - highest).exp().sum(dim=-1, keepdim=True).log(), ids


def _entry(table: Tensor, index: int | Tensor) -> Tensor:  # [K, ...] -> [...]
    return table[index] if isinstance(index, int) else table.index_select(0, index)[0]


def _token(token_id: int, like: Tensor) -> Tensor:
    return torch.tensor(token_id, device=like.device)
