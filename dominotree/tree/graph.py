"""The GPU-native heap: best-first search on the host, its every computation a CUDA graph over static buffers.

The bodies do what `ConditionalScorer` does, operation for operation, so that the tree is the reference's bit for bit.
Shapes: N node budget, K drafted slots, H hidden, G GRU state, V vocabulary, k children.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .captured import Captured, StaticBlocks
from .children import Children, CorrectedLogits, Proposal, Scale, best_named
from .heap import best_first_tree
from .lanes import DraftBlocks
from .nodes import DraftTree


class GraphHeap:
    """One shape of block. A node's state is a row of a buffer; the host waits once a node, for its children."""

    def __init__(
        self, proposal: Proposal, node_budget: int, candidate_width: int, node_topk: int, scale: Scale
    ) -> None:
        device = proposal.hidden.device
        self._budget, self._width, self._topk, self._scale = node_budget, candidate_width, node_topk, scale
        self._static = StaticBlocks(DraftBlocks.of(proposal))
        blocks = self._static.blocks
        self._proposal = dataclasses.replace(
            proposal, root_id=blocks.root_ids[0], hidden=blocks.hidden[0], base_logits=blocks.base_logits[0]
        )
        self._free = min(proposal.uncorrected_length, self._static.slots)
        root_state = CorrectedLogits(self._proposal, candidate_width=0).root_state()
        self._states = root_state.new_zeros(1 + node_budget, len(root_state))  # row 0 is the root
        self._rows_used = 0
        self._control = torch.zeros(4, dtype=torch.int64, device=device)  # row read, row written, token, slot
        self._set_up = Captured(self._set_up_body, device)
        self._advance = Captured(self._advance_body, device)
        self._score = Captured(self._score_body, device)
        self._uncorrected: list[Children] = []

    def takes(self, proposal: Proposal) -> bool:
        return self._static.takes(DraftBlocks.of(proposal))

    def build(self, proposal: Proposal) -> DraftTree:
        self._static.load(DraftBlocks.of(proposal))
        scores, ids = self._set_up()
        self._uncorrected = list(zip(ids.tolist(), scores.tolist(), strict=True))
        self._rows_used = 1
        length = len(proposal.hidden)
        return best_first_tree(self, node_budget=self._budget, max_depth=length, device=proposal.hidden.device)

    def root_state(self) -> int:
        return 0

    def advance(self, state: int, token_id: int) -> int:
        row = self._rows_used
        self._rows_used += 1
        self._control.copy_(torch.tensor([state, row, token_id, 0]))
        self._advance()
        return row

    def children(self, state: int, slot: int) -> Children:
        if slot < self._free:
            return self._uncorrected[slot]
        self._control.copy_(torch.tensor([state, 0, 0, slot]))
        scores, ids = self._score()
        return ids.tolist(), scores.tolist()

    def _set_up_body(self) -> tuple[Tensor, Tensor]:  # [free, k] scores and token ids of the uncorrected slots
        self._logits = CorrectedLogits(self._proposal, self._width)
        self._states[0] = self._logits.root_state()
        return self._scale.best(self._proposal.base_logits[: self._free], self._topk)

    def _advance_body(self) -> Tensor:  # [G]
        read, write, token, _ = self._control.split(1)
        state = self._logits.advance(self._states.index_select(0, read)[0], token[0])
        self._states.index_copy_(0, write, state[None])
        return state

    def _score_body(self) -> tuple[Tensor, Tensor]:  # [k] scores and token ids
        state = self._states.index_select(0, self._control[:1])[0]
        return best_named(*self._logits.corrected(self._control[3:], state), self._topk, self._scale)
