"""Scoring many nodes of one depth at once, with everything that nodes share computed once a round.

Shapes: B batch, L lanes (nodes of one depth), K drafted slots, H hidden, G GRU state, R low rank, V vocabulary,
M candidates, k children.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import few_rows
from ..draft.head import DominoHead
from ..draft.model import Embed
from .children import PLAIN, Proposal, Scale
from .topk import best_ids, ordered_argmax

TABLE_CHUNK = 4096  # tokens projected at once


class LaneScorer(Protocol):
    """What the depth-synchronous builder asks: states of lanes, and the children of all of them."""

    def root_states(self) -> Tensor:  # [B, 1, G]
        ...

    def advance(self, states: Tensor, token_ids: Tensor) -> Tensor:  # [B, L, G], [B, L] -> [B, L, G]
        ...

    def children(self, slot: int, states: Tensor) -> tuple[Tensor, Tensor]:  # [B, L, G] -> two of [B, L, k]
        """Token ids of each lane's children, best first, -1 for none, and what each adds to the score (float64)."""
        ...


@dataclass(frozen=True)
class DraftBlocks:
    """One drafted block of each of B sequences."""

    root_ids: Tensor  # [B] the last committed tokens
    hidden: Tensor  # [B, K, H] of the slots that predict
    base_logits: Tensor  # [B, K, V]
    uncorrected_length: int  # leading slots that keep their base logits

    @classmethod
    def of(cls, proposal: Proposal) -> DraftBlocks:
        return cls(
            proposal.root_id[None], proposal.hidden[None], proposal.base_logits[None], proposal.uncorrected_length
        )


class PreparedHead:
    """A Domino head with its embeddings, and what is made from them once; anew when the weights change.

    `input_table`: hold `W_ih E` for the whole vocabulary, [V, 3G], so that a step gathers a row of it instead of
    multiplying by `W_ih`.
    """

    def __init__(self, head: DominoHead, embed: Embed, vocab_size: int, *, input_table: bool) -> None:
        self.head = head
        self._embed = embed
        self._table = self._make_table(vocab_size) if input_table else None

    def root_states(self, root_ids: Tensor) -> Tensor:  # [B] -> [B, 1, G]
        return self.head.first_step(self._gates(root_ids[:, None]))

    def advance(self, states: Tensor, token_ids: Tensor) -> Tensor:  # [B, L, G], [B, L] -> [B, L, G]
        return self.head.step(self._gates(token_ids), states, few_rows.linear)

    def _gates(self, token_ids: Tensor) -> Tensor:  # [...] -> [..., 3G]
        return self._input_gates(token_ids) if self._table is None else self._table[token_ids]

    def _input_gates(self, token_ids: Tensor) -> Tensor:  # [...] -> [..., 3G]
        return self.head.input_gates(self._embed(token_ids).to(self.head.input_weight.dtype), few_rows.linear)

    def _make_table(self, vocab_size: int) -> Tensor:  # [V, 3G]
        table = self.head.input_weight.new_empty(vocab_size, len(self.head.input_weight))
        for ids in torch.arange(vocab_size, device=table.device).split(TABLE_CHUNK):
            table[ids[0] : ids[-1] + 1] = self._input_gates(ids)
        return table


class ConditionalLanes:
    """Every lane scored by the correction along its own path (DominoTree, section 3), as `ConditionalScorer` does
    for one node: over the top-M candidates of a slot, or over the vocabulary for a `candidate_width` of 0."""

    def __init__(
        self,
        prepared: PreparedHead,
        blocks: DraftBlocks,
        candidate_width: int,
        node_topk: int,
        scale: Scale = PLAIN,
    ) -> None:
        self._prepared, self._blocks = prepared, blocks
        self._node_topk, self._scale = node_topk, scale
        self._free = min(blocks.uncorrected_length, blocks.hidden.shape[1])
        self._uncorrected = scale.best(blocks.base_logits[:, : self._free], node_topk)
        self._positions = prepared.head.position_part(blocks.hidden)  # [B, K, R]
        self._candidates: Tensor | None = None
        base = blocks.base_logits[:, self._free :]
        if candidate_width:
            # In order of token id, so that ties among candidates fall to the lowest id as everywhere.
            self._candidates = best_ids(base, candidate_width)  # [B, K, M]
            self._base = base.gather(-1, self._candidates).float()
            rows = prepared.head.output_rows.index_select(0, self._candidates.flatten())
            self._rows = rows.view(*self._candidates.shape, rows.shape[-1]).float()  # [B, K, M, R]

    def root_states(self) -> Tensor:  # [B, 1, G]
        return self._prepared.root_states(self._blocks.root_ids)

    def advance(self, states: Tensor, token_ids: Tensor) -> Tensor:  # [B, L, G], [B, L] -> [B, L, G]
        return self._prepared.advance(states, token_ids)

    def children(self, slot: int, states: Tensor) -> tuple[Tensor, Tensor]:  # [B, L, G] -> two of [B, L, k]
        lanes = states.shape[1]
        if slot < self._free:
            scores, ids = (part[:, slot, None].expand(-1, lanes, -1) for part in self._uncorrected)
            return ids, scores
        scores, chosen = self._scale.best(self.logits(slot, states), self._node_topk)
        if self._candidates is None:
            return chosen, scores
        candidates = self._candidates[:, slot - self._free, None].expand(-1, lanes, -1)
        return candidates.gather(-1, chosen), scores

    def logits(self, slot: int, states: Tensor) -> Tensor:  # [B, L, G] -> [B, L, M] or [B, L, V], float32
        """Logits of a slot after each lane's path, over the candidates in order of id, or the vocabulary."""
        if slot < self._free:
            return self._blocks.base_logits[:, slot, None].float().expand(-1, states.shape[1], -1)
        index = slot - self._free
        low_rank = self._prepared.head.low_rank_after(self._positions[:, slot, None], states)
        if self._candidates is None:
            base = self._blocks.base_logits[:, slot, None].float()
            return base + F.linear(low_rank, self._prepared.head.output_rows).float()
        return torch.baddbmm(self._base[:, index, None], low_rank.float(), self._rows[:, index].transpose(1, 2))


def greedy_rollout(lanes: ConditionalLanes, length: int) -> Tensor:  # [B, length]
    """The Domino chain (Domino, section 3): each slot's best token given the ones before it, over the vocabulary.

    `lanes` must have a candidate width of 0. Token ids stay on the device; the host is not waited for.
    """
    states = lanes.root_states()
    tokens: list[Tensor] = []
    for slot in range(length):
        if slot:
            states = lanes.advance(states, tokens[-1])
        tokens.append(ordered_argmax(lanes.logits(slot, states)))
    return torch.cat(tokens, dim=1)


def input_table_bytes(head: DominoHead, vocab_size: int) -> int:
    """Memory of `W_ih E`."""
    return vocab_size * head.input_weight.shape[0] * head.input_weight.element_size()
