"""Decoding methods: each fills in *build*, the step from a drafted block to the tree that is verified."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from ..errors import UserError
from ..tree.children import (
    ChildScorer,
    ConditionalScorer,
    MarginalScorer,
    Proposal,
    StaticCorrectedScorer,
    greedy_rollout,
)
from ..tree.heap import best_first_tree
from ..tree.nodes import DraftTree

NODE_BUDGET, CANDIDATE_WIDTH, NODE_TOPK = 16, 64, 8  # as published (DominoTree, section 4)


@dataclass(frozen=True)
class Method:
    """Base of the methods. `drafts`: whether a drafter is run; `needs_head`: whether it must have a Domino head."""

    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    needs_head: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for option, lowest in (("node_budget", 1), ("candidate_width", 0), ("node_topk", 1)):
            value = getattr(self, option, lowest)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise UserError(f"method.{option} must be an integer of at least {lowest}, got {value}")

    def build(self, proposal: Proposal) -> DraftTree:
        """The tree to verify, B = 1, no deeper than the proposal has slots."""
        raise UserError(f"method {self.name} drafts nothing")


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
        return DraftTree.chain(proposal.base_logits.argmax(dim=-1)[None])


@dataclass(frozen=True)
class Domino(Method):
    """The chain drafted token by token through the Domino head (Domino)."""

    name = "domino"
    needs_head = True

    def build(self, proposal: Proposal) -> DraftTree:
        return DraftTree.chain(greedy_rollout(proposal)[None])


@dataclass(frozen=True)
class DDTree(Method):
    """The likeliest prefixes under the slots' marginals (DDTree)."""

    name = "ddtree"
    node_budget: int = NODE_BUDGET

    def build(self, proposal: Proposal) -> DraftTree:
        # No node can have more children in the tree than the tree has nodes.
        return _tree(MarginalScorer(proposal.base_logits, node_topk=self.node_budget), proposal, self.node_budget)


@dataclass(frozen=True)
class StaticCorrected(Method):
    """The control between DDTree and DominoTree: corrected, but not for each path."""

    name = "static_corrected"
    needs_head = True
    node_budget: int = NODE_BUDGET
    candidate_width: int = CANDIDATE_WIDTH
    node_topk: int = NODE_TOPK

    def build(self, proposal: Proposal) -> DraftTree:
        scorer = StaticCorrectedScorer(proposal, self.candidate_width, self.node_topk)
        return _tree(scorer, proposal, self.node_budget)


@dataclass(frozen=True)
class DominoTree(Method):
    """The likeliest prefixes under the correction along each node's own path (DominoTree)."""

    name = "dominotree"
    needs_head = True
    node_budget: int = NODE_BUDGET
    candidate_width: int = CANDIDATE_WIDTH
    node_topk: int = NODE_TOPK

    def build(self, proposal: Proposal) -> DraftTree:
        scorer = ConditionalScorer(proposal, self.candidate_width, self.node_topk)
        return _tree(scorer, proposal, self.node_budget)


METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Plain, DFlash, DDTree, Domino, StaticCorrected, DominoTree)
}


def make_method(name: str, **options: int) -> Method:
    """A method by name, with the options it has. Raises UserError for an unknown name, option or value."""
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}: choose one of {', '.join(METHODS)}")
    known = [field.name for field in fields(METHODS[name])]
    for option in options:
        if option not in known:
            raise UserError(f"method {name} has no {option}; it takes {', '.join(known) or 'no options'}")
    return METHODS[name](**options)


def _tree(scorer: ChildScorer, proposal: Proposal, node_budget: int) -> DraftTree:
    return best_first_tree(
        scorer, node_budget=node_budget, max_depth=len(proposal.hidden), device=proposal.hidden.device
    )
