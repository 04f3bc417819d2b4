"""The depth-synchronous builder against the reference heap, node for node, ties and dead branches included."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dominotree.tree.budget import StoppingRule
from dominotree.tree.frontier import fixed_widths, frontier_tree
from dominotree.tree.heap import best_first_tree
from dominotree.tree.host_frontier import host_frontier_tree
from dominotree.tree.nodes import DraftTree

CPU = torch.device("cpu")
Build = Callable[..., DraftTree]
FRONTIERS = [frontier_tree, host_frontier_tree]
VOCABULARY = 9
LONGEST = 7
Path = tuple[int, ...]
Rows = list[tuple[int, int, int, float]]


@dataclass
class RandomChildren:
    """Random children for every path of every sequence; some nodes have none."""

    seeds: Sequence[int]  # one a sequence
    width: int
    levels: Sequence[float]  # scores to draw from; empty: continuous ones, free of ties

    def table(self, row: int, path: Path) -> tuple[list[int], list[float]]:
        rng = random.Random(f"{self.seeds[row]}/{path}")
        tokens = rng.sample(range(VOCABULARY), rng.randint(0, self.width))
        scores = [rng.choice(self.levels) if self.levels else -rng.expovariate(1.0) - 1e-6 for _ in tokens]
        pairs = sorted(zip(tokens, scores, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return [token for token, _ in pairs], [score for _, score in pairs]


class OneByOne:
    """A sequence of RandomChildren as the heap asks for it: a state is the path."""

    def __init__(self, children: RandomChildren, row: int) -> None:
        self._children, self._row = children, row

    def root_state(self) -> Path:
        return ()

    def advance(self, state: Path, token_id: int) -> Path:
        return (*state, token_id)

    def children(self, state: Path, slot: int) -> tuple[list[int], list[float]]:
        return self._children.table(self._row, state)


class AllAtOnce:
    """All sequences of RandomChildren as the frontier asks for them: a state holds the path, ended by -1."""

    def __init__(self, children: RandomChildren) -> None:
        self._children = children

    def root_states(self) -> Tensor:
        return torch.full((len(self._children.seeds), 1, LONGEST), -1.0)

    def advance(self, states: Tensor, token_ids: Tensor) -> Tensor:
        length = (states >= 0).sum(dim=-1, keepdim=True).clamp(max=LONGEST - 1)
        return states.scatter(-1, length, token_ids[..., None].float())

    def children(self, slot: int, states: Tensor) -> tuple[Tensor, Tensor]:
        width = max(self._children.width, 1)
        ids = torch.full((*states.shape[:2], width), -1)
        scores = torch.full(ids.shape, -math.inf, dtype=torch.float64)
        for row, lane in ((row, lane) for row in range(len(ids)) for lane in range(ids.shape[1])):
            path = tuple(int(token) for token in states[row, lane].tolist() if token >= 0)
            tokens, values = self._children.table(row, path)
            ids[row, lane, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            scores[row, lane, : len(values)] = torch.tensor(values, dtype=torch.float64)
        return ids, scores


def listed(tree: DraftTree, row: int = 0) -> Rows:
    """Nodes of a sequence without padding."""
    assert tree.path_log_probs is not None
    columns = (tree.token_ids[row], tree.parents[row], tree.depths[row], tree.path_log_probs[row])
    return [node for node in zip(*(column.tolist() for column in columns), strict=True) if node[2] > 0]


def by_heap(children: RandomChildren, row: int, budget: int, max_depth: int, **options: Any) -> Rows:
    scorer = OneByOne(children, row)
    return listed(best_first_tree(scorer, node_budget=budget, max_depth=max_depth, device=CPU, **options))


def scored(levels: Sequence[float] = (), batch: int = 3) -> st.SearchStrategy[RandomChildren]:
    seeds = st.lists(st.integers(0, 10**6), min_size=1, max_size=batch)
    return st.builds(RandomChildren, seeds=seeds, width=st.integers(0, 4), levels=st.just(levels))


BUDGETS, DEPTHS = st.integers(0, 24), st.integers(0, 5)
TIED = (0.0, -0.5, -1.0)


@pytest.mark.parametrize("build", FRONTIERS)
@given(
    children=scored() | scored(TIED) | scored((-0.5,)) | scored((0.0,)),
    budget=BUDGETS,
    max_depth=DEPTHS,
)
@settings(deadline=None, max_examples=150)
def test_the_frontier_selects_what_best_first_search_selects(
    build: Build, children: RandomChildren, budget: int, max_depth: int
) -> None:
    tree = build(AllAtOnce(children), node_budget=budget, max_depth=max_depth)
    for row in range(len(children.seeds)):
        assert listed(tree, row) == by_heap(children, row, budget, max_depth)


@given(
    children=scored() | scored(TIED) | scored((0.0, -math.inf)),
    steps=st.lists(st.floats(0, 0.5), min_size=1, max_size=16),
    max_depth=st.integers(1, 5),
)
@settings(deadline=None, max_examples=150)
def test_a_rule_ends_the_frontier_where_it_ends_best_first_search(
    children: RandomChildren, steps: list[float], max_depth: int
) -> None:
    seconds = list(itertools.accumulate([1.0, *steps]))
    rules = [StoppingRule(seconds) for _ in children.seeds]
    tree = host_frontier_tree(AllAtOnce(children), node_budget=len(steps), max_depth=max_depth, rules=rules)
    for row in range(len(children.seeds)):
        takes = StoppingRule(seconds).takes
        assert listed(tree, row) == by_heap(children, row, len(steps), max_depth, takes=takes)


def test_what_a_rule_cannot_take_is_not_scored() -> None:
    """Costs that rise by a fifth of a round a node, so that unlikely nodes cannot matter."""
    scored_lanes = {False: 0, True: 0}

    class Counting(AllAtOnce):
        def children(self, slot: int, states: Tensor) -> tuple[Tensor, Tensor]:
            scored_lanes[ruled] += states.shape[1]
            return super().children(slot, states)

    seconds = [1 + 0.2 * n for n in range(25)]
    for seed, ruled in itertools.product(range(20), (False, True)):
        rules = [StoppingRule(seconds)] if ruled else None
        host_frontier_tree(Counting(RandomChildren((seed,), 4, ())), node_budget=24, max_depth=5, rules=rules)
    assert 20 < scored_lanes[True] < 0.6 * scored_lanes[False]


@pytest.mark.parametrize("build", FRONTIERS)
@given(children=scored((*TIED, -math.inf)), budget=BUDGETS, max_depth=DEPTHS)
@settings(deadline=None, max_examples=100)
def test_impossible_nodes_only_fill_what_the_possible_ones_leave(
    build: Build, children: RandomChildren, budget: int, max_depth: int
) -> None:
    """Which nodes of probability zero fill a tree is left open; the others are selected as ever."""
    tree = build(AllAtOnce(children), node_budget=budget, max_depth=max_depth)
    for row in range(len(children.seeds)):
        ours, expected = listed(tree, row), by_heap(children, row, budget, max_depth)
        possible = [node for node in expected if node[3] > -math.inf]
        assert ours[: len(possible)] == possible
        assert len(ours) == len(expected)
        assert all(parent < place for place, (_, parent, _, _) in enumerate(ours))


@given(children=scored((), batch=1), budget=st.integers(1, 24), max_depth=st.integers(1, 5), limit=st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_a_depth_limit_on_the_device_is_a_shorter_search(
    children: RandomChildren, budget: int, max_depth: int, limit: int
) -> None:
    tree = frontier_tree(
        AllAtOnce(children),
        node_budget=budget,
        max_depth=max_depth,
        depth_limit=torch.tensor(limit),
    )
    assert listed(tree) == by_heap(children, 0, budget, min(limit, max_depth))


@pytest.mark.parametrize("build", FRONTIERS)
@given(children=scored() | scored(TIED), budget=st.integers(1, 24), cut=st.integers(0, 30), max_depth=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_the_first_nodes_of_a_tree_are_the_tree_of_that_budget(
    build: Build, children: RandomChildren, budget: int, cut: int, max_depth: int
) -> None:
    whole = build(AllAtOnce(children), node_budget=budget, max_depth=max_depth)
    assert whole.path_log_probs is not None
    scores = whole.path_log_probs
    assert bool((scores[:, 1:] <= scores[:, :-1]).all()) or bool((whole.depths == 0).any())
    for row in range(len(children.seeds)):
        assert listed(whole.first(cut), row) == by_heap(children, row, min(cut, budget), max_depth)


@pytest.mark.parametrize("build", FRONTIERS)
@given(children=scored(batch=2), budget=st.integers(1, 12), spare=st.integers(0, 4), max_depth=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_a_width_of_the_budget_changes_nothing(
    build: Build, children: RandomChildren, budget: int, spare: int, max_depth: int
) -> None:
    wide = build(AllAtOnce(children), node_budget=budget, max_depth=max_depth, widths=[budget + spare] * max_depth)
    for row in range(len(children.seeds)):
        assert listed(wide, row) == by_heap(children, row, budget, max_depth)


def pruned_by_definition(children: RandomChildren, row: int, budget: int, widths: Sequence[int]) -> dict[Path, float]:
    """DARTree: at each depth keep the best children of the nodes kept before, in the end the best of all kept."""
    kept: dict[Path, float] = {}
    level: dict[Path, float] = {(): 0.0}
    for width in widths:
        below = {
            (*path, token): score + value
            for path, score in level.items()
            for token, value in zip(*children.table(row, path), strict=True)
        }
        level = {path: below[path] for path in sorted(below, key=lambda p: -below[p])[:width]}
        kept |= level
    return {path: kept[path] for path in sorted(kept, key=lambda p: -kept[p])[:budget]}


def paths_of(rows: Rows) -> list[Path]:
    paths: list[Path] = []
    for token, parent, _, _ in rows:
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize("build", FRONTIERS)
@given(children=scored(batch=2), budget=st.integers(1, 20), widths=st.lists(st.integers(1, 5), min_size=1, max_size=5))
@settings(deadline=None, max_examples=80)
def test_widths_below_the_budget_prune_depth_by_depth(
    build: Build, children: RandomChildren, budget: int, widths: list[int]
) -> None:
    tree = build(AllAtOnce(children), node_budget=budget, max_depth=len(widths), widths=widths)
    for row in range(len(children.seeds)):
        assert paths_of(listed(tree, row)) == list(pruned_by_definition(children, row, budget, widths))


@pytest.mark.parametrize(
    ("budget", "depth", "topk", "widths"),
    [
        (64, 16, 64, [4] * 16),
        (10, 4, 8, [3, 3, 2, 2]),
        (3, 5, 8, [1, 1, 1, 0, 0]),
        (16, 3, 2, [2, 4, 8]),  # as many as there are
        (16, 4, 1, [1, 1, 1, 1]),
    ],
)
def test_an_even_share_of_the_budget(budget: int, depth: int, topk: int, widths: list[int]) -> None:
    assert fixed_widths(budget, depth, topk) == widths
