"""Decoding methods: each fills in *build*, the step from a drafted block to the tree that is verified."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from ..draft.model import DraftModel
from ..errors import UserError
from ..target import Target
from ..tree.builders import Builder, ConditionalTree, make_builder, make_chain_builder
from ..tree.children import ChildScorer, MarginalScorer, Proposal, Scale, StaticCorrectedScorer
from ..tree.heap import best_first_tree
from ..tree.nodes import DraftTree
from ..tree.topk import ordered_argmax
from .adaptive import Adaptive, CaDDTree, CondAdaptive
from .base import CANDIDATE_WIDTH, NODE_BUDGET, NODE_TOPK, Method, check_flag, table_notes
from .conditional import Conditional

DARTREE_BUDGET, DARTREE_WIDTH = 64, 12  # as published (DARTree)


@dataclass(frozen=True)
class Plain(Method):
    """One token a forward: the baseline every speedup is measured against."""

    name = "ar"
    drafts = False


@dataclass(frozen=True)
class DFlash(Method):
    """The likeliest token of every slot, as one chain (DFlash)."""

    name = "dflash"

    def build(self, proposal: Proposal) -> DraftTree:
        return DraftTree.chain(ordered_argmax(proposal.base_logits)[None])


@dataclass(frozen=True)
class _Prepared(Method):
    """A method whose builder prepares things on its first round."""

    @cached_property
    def _builders(self) -> dict[torch.device, Builder]:
        return {}

    def build(self, proposal: Proposal) -> DraftTree:
        device = proposal.hidden.device
        if device not in self._builders:
            self._builders[device] = self._make_builder(device)
        return self._builders[device].build(proposal)

    @abstractmethod
    def _make_builder(self, device: torch.device) -> Builder: ...


@dataclass(frozen=True)
class Domino(_Prepared):
    """The chain drafted token by token through the Domino head (Domino)."""

    name = "domino"
    needs_head = True
    input_table: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("input_table", self.input_table)

    def notes(self, target: Target, draft: DraftModel) -> list[str]:
        return table_notes(self.input_table, target, draft)

    def _make_builder(self, device: torch.device) -> Builder:
        return make_chain_builder(device, input_table=self.input_table)


@dataclass(frozen=True)
class _Tree(Method):
    """Options of every tree: how many nodes, and how the draft's logits become scores, see Scale."""

    node_budget: int = NODE_BUDGET
    draft_temperature: float = field(default=1.0, kw_only=True)
    depth_term: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_number(self.draft_temperature) or self.draft_temperature <= 0:
            raise UserError(f"method.draft_temperature must be a number above 0, got {self.draft_temperature}")
        if not _is_number(self.depth_term) or self.depth_term > 0:
            raise UserError(
                f"method.depth_term must be a number of 0 or less, got {self.depth_term}; above 0 a path's score could "
                "rise, and the best nodes would not be a tree"
            )

    @property
    def scale(self) -> Scale:
        return Scale(self.draft_temperature, self.depth_term)


@dataclass(frozen=True)
class DDTree(_Tree):
    """The likeliest prefixes under the slots' marginals (DDTree)."""

    name = "ddtree"

    def build(self, proposal: Proposal) -> DraftTree:
        # No node can have more children in the tree than the tree has nodes.
        scorer = MarginalScorer(proposal.base_logits, self.node_budget, self.scale)
        return _by_heap(scorer, proposal, self.node_budget)


@dataclass(frozen=True)
class StaticCorrected(_Tree):
    """The control between DDTree and DominoTree: corrected, but not for each path."""

    name = "static_corrected"
    needs_head = True
    candidate_width: int = CANDIDATE_WIDTH
    node_topk: int = NODE_TOPK

    def build(self, proposal: Proposal) -> DraftTree:
        scorer = StaticCorrectedScorer(proposal, self.candidate_width, self.node_topk, self.scale)
        return _by_heap(scorer, proposal, self.node_budget)


@dataclass(frozen=True)
class DominoTree(Conditional, _Tree):
    """The likeliest prefixes under the correction along each node's own path (DominoTree)."""

    name = "dominotree"

    @property
    def tree(self) -> ConditionalTree:
        return ConditionalTree(self.node_budget, self.candidate_width, self.node_topk, self.scale, self.input_table)

    def build(self, proposal: Proposal) -> DraftTree:
        return self.tree_builder(proposal.hidden.device).build(proposal)


@dataclass(frozen=True)
class DARTree(_Prepared, _Tree):
    """An approximation to DominoTree that keeps few nodes a depth (DARTree): at most `width` and then the best of all
    (its pruned variant), or for a `width` of 0 an even share of the budget (its fixed variant)."""

    name = "dartree"
    needs_head = True
    node_budget: int = DARTREE_BUDGET
    candidate_width: int = CANDIDATE_WIDTH
    node_topk: int = CANDIDATE_WIDTH  # every candidate
    width: int = DARTREE_WIDTH
    input_table: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("input_table", self.input_table)

    def notes(self, target: Target, draft: DraftModel) -> list[str]:
        return table_notes(self.input_table, target, draft)

    def _make_builder(self, device: torch.device) -> Builder:
        tree = ConditionalTree(
            self.node_budget, self.candidate_width, self.node_topk, self.scale, self.input_table, self.width
        )
        return make_builder("frontier", device, tree)


_FIXED = (Plain, DFlash, DDTree, Domino, StaticCorrected, DominoTree, DARTree)
_ADAPTIVE = (CaDDTree, CondAdaptive, Adaptive)
METHODS: dict[str, type[Method]] = {method.name: method for method in (*_FIXED, *_ADAPTIVE)}


def make_method(name: str, **options: Any) -> Method:
    """A method by name, with the options it has. Raises UserError for an unknown name, option or value."""
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}: choose one of {', '.join(METHODS)}")
    known = [option.name for option in fields(METHODS[name])]
    for option in options:
        if option not in known:
            raise UserError(f"method {name} has no {option}; it takes {', '.join(known) or 'no options'}")
    return METHODS[name](**options)


def _by_heap(scorer: ChildScorer, proposal: Proposal, node_budget: int) -> DraftTree:
    return best_first_tree(
        scorer, node_budget=node_budget, max_depth=len(proposal.hidden), device=proposal.hidden.device
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
