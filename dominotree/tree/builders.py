"""Builders of the conditional tree by name. All select the same nodes; they differ in what they wait for.

`heap` is the reference: plain best-first search on the host. `graph` is the same search with its computations captured
as CUDA graphs. `frontier` scores all nodes of a depth at once. What a builder prepares once (weights laid out for the
device, the table of GRU inputs, buffers, graphs) it keeps until the head or its weights change.
Shapes: B batch, K drafted slots, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..draft.head import DominoHead
from ..draft.model import Embed
from .budget import StoppingRule
from .calibration import CalibratedLanes, CalibratedScorer, StepCalibration
from .captured import Captured, StaticBlocks
from .children import PLAIN, ChildScorer, ConditionalScorer, Proposal, Scale
from .frontier import fixed_widths, frontier_tree
from .graph import GraphHeap
from .heap import best_first_tree, takes_all
from .host_frontier import host_frontier_tree
from .lanes import ConditionalLanes, DraftBlocks, LaneScorer, PreparedHead, greedy_rollout
from .nodes import DraftTree

BUILDERS = ("auto", "heap", "graph", "frontier")
MEASURED_BEST = {"cpu": "frontier", "cuda": "frontier"}


class Builder(Protocol):
    def build(self, proposal: Proposal) -> DraftTree: ...


class TreeBuilder(Builder, Protocol):
    def build(self, proposal: Proposal, rule: StoppingRule | None = None) -> DraftTree:
        """The tree, which a `rule` ends at the first node that is not worth verifying."""
        ...


@dataclass(frozen=True)
class ConditionalTree:
    """What a conditional tree is made of, whatever builds it.

    `width`: None for the exact tree, otherwise DARTree's approximation to it: at most `width` new nodes a depth, or for
    0 an even share of the budget.
    """

    node_budget: int
    candidate_width: int
    node_topk: int
    scale: Scale = PLAIN
    input_table: bool = False
    width: int | None = None
    steps: StepCalibration | None = None  # scores are the log chances that it gives

    def widths(self, slots: int) -> list[int] | None:
        if self.width is None:
            return None
        return [self.width] * slots if self.width else fixed_widths(self.node_budget, slots, self.node_topk)

    def scorer(self, proposal: Proposal) -> ChildScorer:
        """For one node at a time."""
        scorer = ConditionalScorer(proposal, self.candidate_width, self.node_topk, self.scale)
        return scorer if self.steps is None else CalibratedScorer(scorer, self.steps)

    def lanes(self, prepared: PreparedHead, blocks: DraftBlocks) -> LaneScorer:
        """For all nodes of a depth."""
        lanes = ConditionalLanes(prepared, blocks, self.candidate_width, self.node_topk, self.scale)
        return lanes if self.steps is None else CalibratedLanes(lanes, self.steps)


def builder_for(name: str, device: torch.device) -> str:
    """The builder that `auto` stands for on a device; any other name is itself."""
    return MEASURED_BEST.get(device.type, "heap") if name == "auto" else name


def builds_whole(name: str, device: torch.device) -> bool:
    """Whether a builder makes the whole tree before a rule cuts it, so that what is cut has been paid for."""
    return builder_for(name, device) == "graph" or (device.type == "cuda" and builder_for(name, device) == "frontier")


def make_builder(
    name: str, device: torch.device, tree: ConditionalTree, prepared: Kept[PreparedHead] | None = None
) -> TreeBuilder:
    """A builder by its name in BUILDERS. Frontier builders may share what they have `prepared`."""
    chosen = builder_for(name, device)
    if chosen == "frontier":
        return (CapturedFrontier if device.type == "cuda" else FrontierBuilder)(tree, prepared)
    return GraphBuilder(tree) if chosen == "graph" else HeapBuilder(tree)


class HeapBuilder:
    """The reference."""

    def __init__(self, tree: ConditionalTree) -> None:
        self._tree = tree

    @torch.no_grad()
    def build(self, proposal: Proposal, rule: StoppingRule | None = None) -> DraftTree:
        return best_first_tree(
            self._tree.scorer(proposal),
            node_budget=self._tree.node_budget,
            max_depth=len(proposal.hidden),
            device=proposal.hidden.device,
            takes=takes_all if rule is None else rule.takes,
        )


T = TypeVar("T")


class Kept(Generic[T]):
    """Something made from a head and its embeddings, made again when they are others or the weights have changed."""

    def __init__(self, make: Callable[[Proposal], T], fits: Callable[[T, Proposal], bool] = lambda *_: True) -> None:
        self._make, self._fits = make, fits
        self._source: tuple[DominoHead, Embed, list[int]] | None = None
        self._value: T | None = None

    def get(self, proposal: Proposal) -> T:
        assert proposal.head is not None
        source = (proposal.head, proposal.embed, [weight._version for weight in proposal.head.parameters()])
        if self._value is None or self._source != source or not self._fits(self._value, proposal):
            self._value = None  # free the old one first
            self._source, self._value = source, self._make(proposal)
        return self._value


class FrontierBuilder:
    """Depth by depth, the host leaving out what cannot matter."""

    def __init__(self, tree: ConditionalTree, prepared: Kept[PreparedHead] | None = None) -> None:
        self._tree = tree
        self._prepared = prepared or kept_head(tree.input_table)

    @torch.no_grad()
    def build(self, proposal: Proposal, rule: StoppingRule | None = None) -> DraftTree:
        return self.build_all(self._prepared.get(proposal), DraftBlocks.of(proposal), None if rule is None else [rule])

    def build_all(
        self, prepared: PreparedHead, blocks: DraftBlocks, rules: Sequence[StoppingRule] | None = None
    ) -> DraftTree:
        """The trees of B sequences at once."""
        tree, slots = self._tree, blocks.hidden.shape[1]
        return host_frontier_tree(
            tree.lanes(prepared, blocks),
            node_budget=tree.node_budget,
            max_depth=slots,
            widths=tree.widths(slots),
            rules=rules,
        )


class CapturedFrontier:
    """The whole build with fixed shapes, one CUDA graph on a GPU: the host is never waited for, but for a rule, which
    cuts the tree afterwards."""

    def __init__(self, tree: ConditionalTree, prepared: Kept[PreparedHead] | None = None) -> None:
        self._tree = tree
        self._prepared = prepared or kept_head(tree.input_table)
        self._kept = Kept(self._make, self._fits)

    @torch.no_grad()
    def build(self, proposal: Proposal, rule: StoppingRule | None = None) -> DraftTree:
        static, body = self._kept.get(proposal)
        static.load(DraftBlocks.of(proposal))
        return _cut(body(), rule).clone()

    def _make(self, proposal: Proposal) -> tuple[StaticBlocks, Captured[DraftTree]]:
        tree, prepared = self._tree, self._prepared.get(proposal)
        static = StaticBlocks(DraftBlocks.of(proposal))

        def body() -> DraftTree:
            return frontier_tree(
                tree.lanes(prepared, static.blocks),
                node_budget=tree.node_budget,
                max_depth=static.slots,
                depth_limit=static.length,
                widths=tree.widths(static.slots),
            )

        return static, Captured(body, proposal.hidden.device)

    def _fits(self, kept: tuple[StaticBlocks, Captured[DraftTree]], proposal: Proposal) -> bool:
        # An even share of the budget a depth depends on how many depths there are.
        same_length = kept[0].slots == len(proposal.hidden) or self._tree.width != 0
        return kept[0].takes(DraftBlocks.of(proposal)) and same_length


class GraphBuilder:
    """The heap on the host over captured computations."""

    def __init__(self, tree: ConditionalTree) -> None:
        if tree.width is not None or tree.input_table or tree.steps is not None:
            raise ValueError("the graph builder takes no width, no input table and no calibration")
        self._kept = Kept(
            lambda proposal: GraphHeap(proposal, tree.node_budget, tree.candidate_width, tree.node_topk, tree.scale),
            GraphHeap.takes,
        )

    @torch.no_grad()
    def build(self, proposal: Proposal, rule: StoppingRule | None = None) -> DraftTree:
        return _cut(self._kept.get(proposal).build(proposal), rule)


class ChainBuilder:
    """The Domino chain, token by token."""

    def __init__(self, input_table: bool) -> None:
        self._prepared = kept_head(input_table)

    @torch.no_grad()
    def build(self, proposal: Proposal) -> DraftTree:
        lanes = ConditionalLanes(self._prepared.get(proposal), DraftBlocks.of(proposal), 0, node_topk=1)
        return DraftTree.chain(greedy_rollout(lanes, len(proposal.hidden)))


class CapturedChain:
    """The whole chain, one CUDA graph on a GPU."""

    def __init__(self, input_table: bool) -> None:
        self._input_table = input_table
        self._kept = Kept(self._make, lambda kept, proposal: kept[0].takes(DraftBlocks.of(proposal)))

    @torch.no_grad()
    def build(self, proposal: Proposal) -> DraftTree:
        static, body = self._kept.get(proposal)
        static.load(DraftBlocks.of(proposal))
        return DraftTree.chain(body()[:, : len(proposal.hidden)].clone())

    def _make(self, proposal: Proposal) -> tuple[StaticBlocks, Captured[Tensor]]:
        prepared = prepare_head(proposal, self._input_table)
        static = StaticBlocks(DraftBlocks.of(proposal))

        def body() -> Tensor:
            return greedy_rollout(ConditionalLanes(prepared, static.blocks, 0, node_topk=1), static.slots)

        return static, Captured(body, proposal.hidden.device)


def make_chain_builder(device: torch.device, *, input_table: bool) -> Builder:
    return (CapturedChain if device.type == "cuda" else ChainBuilder)(input_table)


def _cut(tree: DraftTree, rule: StoppingRule | None) -> DraftTree:
    """What a rule leaves of a whole tree, by its float32 scores; places without a node have no chance."""
    if rule is None:
        return tree
    assert tree.path_log_probs is not None
    return tree.first(rule.size(tree.path_log_probs[0].tolist()))


def prepare_head(proposal: Proposal, input_table: bool) -> PreparedHead:
    if proposal.head is None:
        raise ValueError("a corrected tree needs a drafter with a Domino head, this one has none")
    return PreparedHead(proposal.head, proposal.embed, proposal.base_logits.shape[-1], input_table=input_table)


def kept_head(input_table: bool) -> Kept[PreparedHead]:
    return Kept(lambda proposal: prepare_head(proposal, input_table))
