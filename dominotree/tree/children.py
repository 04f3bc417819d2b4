"""Scoring the children of tree nodes: what separates the marginal, static-corrected and conditional trees.

Shapes: K drafted slots, H hidden, G GRU state, R low rank, V vocabulary, M candidates, k children.
All scores are float32 log-probabilities; equal scores put the lowest token id first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..draft.head import DominoHead
from ..draft.model import Embed

State = TypeVar("State")
Children = tuple[list[int], list[float]]  # token ids and log-probabilities, best first


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
class Proposal:
    """One drafted block of one sequence: all that a builder may look at."""

    root_id: Tensor  # [] the last committed token
    hidden: Tensor  # [K, H] of the slots that predict
    base_logits: Tensor  # [K, V]
    head: DominoHead | None
    uncorrected_length: int  # leading slots that keep their base logits
    embed: Embed

    def embed_for_head(self, token_ids: Tensor) -> Tensor:  # [...] -> [..., H], in the head's dtype
        return self.embed(token_ids).to(self.hidden.dtype)


def ordered_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:  # [..., V] -> values and ids, each [..., k]
    """The k best, descending, ties by the lowest id: torch.topk leaves the order, and the choice, of ties open.

    Scores are float32. Each is turned into an integer of the same order, with the id in the lower half.
    """
    size = scores.shape[-1]
    bits = (scores.float() + 0.0).contiguous().view(torch.int32).long()  # + 0.0: -0.0 and 0.0 become one
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(size - 1, -1, -1, device=scores.device)
    keys = torch.topk(ordered * size + ids, min(k, size)).values
    chosen = size - 1 - keys.remainder(size)
    return scores.gather(-1, chosen), chosen


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

    def __init__(self, base_logits: Tensor, node_topk: int) -> None:  # [K, V]
        super().__init__(_best_children(base_logits.float(), node_topk))


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
            base = proposal.base_logits.float()
            # In order of token id, so that ties among candidates fall to the lowest id as everywhere.
            self._candidates = ordered_topk(base, candidate_width)[1].sort(dim=-1).values  # [K, M]
            self._base = base.gather(-1, self._candidates)
            self._rows = self.head.output_rows[self._candidates].float()  # [K, M, R]

    def at(self, slot: int, state: Tensor) -> tuple[Tensor, Tensor | None]:  # state [G]
        """Logits [M] or [V] of one slot after a prefix, and the token ids they belong to (None: all, in order)."""
        if slot < self.proposal.uncorrected_length:
            return self.proposal.base_logits[slot].float(), None
        hidden = self.proposal.hidden[slot]
        if self._candidates is None:
            return self.proposal.base_logits[slot].float() + self.head.correction(hidden, state).float(), None
        return self._base[slot] + self.head.correction(hidden, state, self._rows[slot]), self._candidates[slot]

    def root_state(self) -> Tensor:  # [G]
        return self.advance(self.head.initial_state(1)[0], self.proposal.root_id)

    def advance(self, state: Tensor, token_id: Tensor) -> Tensor:  # [G], [] -> [G]
        return self.head.advance(self.proposal.embed_for_head(token_id), state)


class StaticCorrectedScorer(DepthScorer):
    """The correction once a depth, along the greedy chain, shared by all nodes of that depth: the control that tells
    having a correction from conditioning it on the path."""

    def __init__(self, proposal: Proposal, candidate_width: int, node_topk: int) -> None:
        logits = CorrectedLogits(proposal, candidate_width)
        state = logits.root_state()
        children: list[Children] = []
        for slot in range(len(proposal.hidden)):
            if slot:
                state = logits.advance(state, _token(children[-1][0][0], state))
            children.append(_named_children(*logits.at(slot, state), node_topk))
        super().__init__(children)


class ConditionalScorer:
    """Every node scored by the correction along its own path, its prefix state carried from the root (DominoTree)."""

    def __init__(self, proposal: Proposal, candidate_width: int, node_topk: int) -> None:
        self._logits = CorrectedLogits(proposal, candidate_width)
        self._node_topk = node_topk
        free = min(proposal.uncorrected_length, len(proposal.hidden))
        self._uncorrected = _best_children(proposal.base_logits[:free].float(), node_topk)

    def root_state(self) -> Tensor:  # [G]
        return self._logits.root_state()

    def advance(self, state: Tensor, token_id: int) -> Tensor:  # [G] -> [G]
        return self._logits.advance(state, _token(token_id, state))

    def children(self, state: Tensor, slot: int) -> Children:
        if slot < len(self._uncorrected):
            return self._uncorrected[slot]
        return _named_children(*self._logits.at(slot, state), self._node_topk)


def greedy_rollout(proposal: Proposal) -> Tensor:  # [K]
    """The Domino chain (Domino, section 3): each slot's best token given the ones before it, over the vocabulary.

    Token ids stay on the device; the host is not waited for.
    """
    logits = CorrectedLogits(proposal, candidate_width=0)
    state = logits.root_state()
    tokens: list[Tensor] = []
    for slot in range(len(proposal.hidden)):
        if slot:
            state = logits.advance(state, tokens[-1])
        tokens.append(logits.at(slot, state)[0].argmax())
    return torch.stack(tokens)


def _best_children(logits: Tensor, node_topk: int) -> list[Children]:  # [K, V]
    log_probs, ids = _best_log_probs(logits, node_topk)
    return list(zip(ids.tolist(), log_probs.tolist(), strict=True))


def _named_children(logits: Tensor, token_ids: Tensor | None, node_topk: int) -> Children:  # [M], [M]
    log_probs, chosen = _best_log_probs(logits, node_topk)
    return (chosen if token_ids is None else token_ids[chosen]).tolist(), log_probs.tolist()


def _best_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:  # [..., V] -> [..., k] and ids
    """Chosen by logits: their log-probabilities are rounded, which would make ties where there are none."""
    best, ids = ordered_topk(logits, k)
    return best - logits.logsumexp(dim=-1, keepdim=True), ids


def _token(token_id: int, like: Tensor) -> Tensor:
    return torch.tensor(token_id, device=like.device)
