"""Trees: the best-first builder against brute force, the arrays derived from a tree, the ordered top-k."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from conftest import RandomTree, batch_of, random_trees
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dominotree.tree.heap import best_first_tree
from dominotree.tree.mask import ancestor_closure, ancestor_mask, node_positions
from dominotree.tree.nodes import DraftTree
from dominotree.tree.topk import ordered_argmax, ordered_topk

CPU = torch.device("cpu")
VOCABULARY = 9
Path = tuple[int, ...]


@dataclass
class RandomScorer:
    """Random children for every path, or for every depth; some nodes have none. It counts what it is asked for."""

    seed: int
    width: int  # most children of a node
    levels: Sequence[float] = ()  # log-probabilities to draw from; empty: continuous ones, free of ties
    by_path: bool = True
    asked: list[Path] = field(default_factory=list)
    advanced: list[Path] = field(default_factory=list)

    def root_state(self) -> Path:
        return ()

    def advance(self, state: Path, token_id: int) -> Path:
        self.advanced.append((*state, token_id))
        return (*state, token_id)

    def children(self, state: Path, slot: int) -> tuple[list[int], list[float]]:
        assert slot == len(state)
        self.asked.append(state)
        return self.table(state)

    def table(self, state: Path) -> tuple[list[int], list[float]]:
        rng = random.Random(f"{self.seed}/{state if self.by_path else len(state)}")
        tokens = rng.sample(range(VOCABULARY), rng.randint(0, self.width))
        scores = [rng.choice(self.levels) if self.levels else -rng.expovariate(1.0) - 1e-6 for _ in tokens]
        pairs = sorted(zip(tokens, scores, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return [token for token, _ in pairs], [score for _, score in pairs]


def scorers(levels: Sequence[float] = ()) -> st.SearchStrategy[RandomScorer]:
    return st.builds(
        RandomScorer,
        seed=st.integers(0, 10**6),
        width=st.integers(1, 4),
        levels=st.just(levels),
        by_path=st.booleans(),
    )


def build(scorer: RandomScorer, budget: int, max_depth: int) -> DraftTree:
    return best_first_tree(scorer, node_budget=budget, max_depth=max_depth, device=CPU)


def paths_of(tree: DraftTree, row: int = 0) -> list[Path]:
    """The tokens from the root to every node, following the parents."""
    paths: list[Path] = []
    for token, parent in zip(tree.token_ids[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def every_prefix(scorer: RandomScorer, max_depth: int) -> dict[Path, float]:
    """All prefixes there are, with their log-probabilities."""
    scores: dict[Path, float] = {}
    level: dict[Path, float] = {(): 0.0}
    for _ in range(max_depth):
        level = {
            (*path, token): score + log_prob
            for path, score in level.items()
            for token, log_prob in zip(*scorer.table(path), strict=True)
        }
        scores |= level
    return scores


def push_all(scorer: RandomScorer, budget: int, max_depth: int) -> list[Path]:
    """Best-first search by its definition: of all children of the chosen nodes take the best, again and again.

    Equal scores: lowest token id, then the shallower node, then the one whose parent was chosen first.
    """
    chosen: list[Path] = []
    order: dict[Path, int] = {(): -1}
    frontier: list[tuple[float, int, int, int, Path]] = []

    def put_children(path: Path, score: float) -> None:
        if len(path) < max_depth:
            for token, log_prob in zip(*scorer.table(path), strict=True):
                frontier.append((-(score + log_prob), token, len(path) + 1, order[path], (*path, token)))

    put_children((), 0.0)
    while frontier and len(chosen) < budget:
        best = min(frontier)
        frontier.remove(best)
        order[best[-1]] = len(chosen)
        chosen.append(best[-1])
        put_children(best[-1], -best[0])
    return chosen


BUDGETS, DEPTHS = st.integers(0, 40), st.integers(0, 5)


@given(scorer=scorers() | scorers(levels=(0.0, -0.5, -1.0, -math.inf)), budget=BUDGETS, max_depth=DEPTHS)
@settings(deadline=None, max_examples=200)
def test_every_tree_is_well_formed(scorer: RandomScorer, budget: int, max_depth: int) -> None:
    tree = build(scorer, budget, max_depth)
    parents, depths, tokens = tree.parents[0].tolist(), tree.depths[0].tolist(), tree.token_ids[0].tolist()
    assert tree.size <= budget
    assert all(-1 <= parent < node for node, parent in enumerate(parents))  # parents come before children
    assert all(
        depth == (depths[parent] if parent >= 0 else 0) + 1 <= max_depth
        for depth, parent in zip(depths, parents, strict=True)
    )
    assert len(set(zip(parents, tokens, strict=True))) == tree.size  # siblings differ
    paths = paths_of(tree)
    assert {path[:-1] for path in paths} <= {(), *paths}  # closed under prefixes
    assert tree.path_log_probs is not None
    scores = tree.path_log_probs[0].tolist()
    expected = every_prefix(scorer, max_depth)
    assert scores == pytest.approx([expected[path] for path in paths], rel=1e-6)
    assert all(earlier >= later for earlier, later in itertools.pairwise(scores))
    assert tree.size == min(budget, len(expected))  # smaller only when there is nothing left


@given(scorer=scorers(), budget=BUDGETS, max_depth=DEPTHS)
@settings(deadline=None, max_examples=300)
def test_the_tree_holds_the_likeliest_prefixes_in_order(scorer: RandomScorer, budget: int, max_depth: int) -> None:
    prefixes = every_prefix(scorer, max_depth)
    assert len(set(prefixes.values())) == len(prefixes)  # free of ties
    assert paths_of(build(scorer, budget, max_depth)) == sorted(prefixes, key=lambda p: -prefixes[p])[:budget]


@given(scorer=scorers(levels=(0.0, -0.5, -1.0)), budget=BUDGETS, max_depth=DEPTHS)
@settings(deadline=None, max_examples=300)
def test_ties_go_to_the_lowest_token_then_the_shallower_node(scorer: RandomScorer, budget: int, max_depth: int) -> None:
    assert paths_of(build(scorer, budget, max_depth)) == push_all(scorer, budget, max_depth)


@given(scorer=scorers(), budgets=st.tuples(BUDGETS, BUDGETS), max_depth=DEPTHS)
@settings(deadline=None)
def test_a_larger_budget_only_appends(scorer: RandomScorer, budgets: tuple[int, int], max_depth: int) -> None:
    small, large = (paths_of(build(scorer, budget, max_depth)) for budget in sorted(budgets))
    assert large[: len(small)] == small


@given(scorer=scorers(), budget=st.integers(1, 40), max_depth=st.integers(1, 5))
@settings(deadline=None)
def test_states_are_computed_for_selected_nodes_only(scorer: RandomScorer, budget: int, max_depth: int) -> None:
    paths = paths_of(build(scorer, budget, max_depth))
    assert len(set(scorer.asked)) == len(scorer.asked)
    assert set(scorer.advanced) <= set(paths)
    assert set(scorer.asked) <= {(), *paths}
    assert all(len(path) < max_depth for path in scorer.asked)


@pytest.mark.parametrize(("budget", "max_depth"), [(0, 4), (5, 0)])
def test_nothing_to_build_is_an_empty_tree(budget: int, max_depth: int) -> None:
    scorer = RandomScorer(seed=0, width=3)
    tree = build(scorer, budget, max_depth)
    assert tree.size == 0
    assert tree.token_ids.shape == tree.parents.shape == tree.depths.shape == (1, 0)
    assert not scorer.asked and not scorer.advanced


def by_hops(tree: RandomTree) -> list[list[bool]]:
    """Node by node, walk up the parents."""
    size = len(tree.parents)
    seen = [[False] * size for _ in range(size)]
    for node in range(size):
        above = node
        while above >= 0:
            seen[node][above] = True
            above = tree.parents[above]
    return seen


@given(tree=random_trees(max_size=40))
@settings(deadline=None, max_examples=200)
def test_the_closure_is_every_node_with_its_ancestors(tree: RandomTree) -> None:
    assert ancestor_closure(tree.arrays())[0].tolist() == by_hops(tree)


@given(tree=random_trees(max_size=20))
@settings(deadline=None)
def test_the_mask_adds_the_root_that_all_see_and_that_sees_itself_only(tree: RandomTree) -> None:
    mask = ancestor_mask(tree.arrays())[0].tolist()
    assert mask[0] == [True] + [False] * len(tree.parents)
    assert mask[1:] == [[True, *row] for row in by_hops(tree)]


@pytest.mark.parametrize("size", [*range(1, 18), 31, 32, 33, 64, 65, 200])
def test_a_chain_s_mask_is_causal(size: int) -> None:
    chain = DraftTree.chain(torch.arange(size)[None])
    assert chain.linear and chain.size == size
    assert torch.equal(ancestor_mask(chain)[0], torch.ones(size + 1, size + 1).tril().bool())
    assert node_positions(chain, 7).tolist() == [list(range(7, 8 + size))]


@given(trees=st.lists(random_trees(max_size=12), min_size=2, max_size=3), position=st.integers(0, 1000))
@settings(deadline=None)
def test_a_batch_is_its_rows(trees: list[RandomTree], position: int) -> None:
    batch = batch_of(trees)
    for row, tree in enumerate(trees):
        own, count = tree.arrays(), len(tree.parents)
        assert torch.equal(ancestor_mask(batch)[row, : 1 + count, : 1 + count], ancestor_mask(own)[0])
        assert not ancestor_mask(batch)[row, : 1 + count, 1 + count :].any()  # nobody sees padding
        assert torch.equal(node_positions(batch, position)[row, : 1 + count], node_positions(own, position)[0])


@given(tree=random_trees(max_size=20), position=st.integers(0, 1000))
@settings(deadline=None)
def test_positions_are_distances_from_the_root(tree: RandomTree, position: int) -> None:
    hops = [sum(row) for row in by_hops(tree)]
    assert node_positions(tree.arrays(), position).tolist() == [[position, *(position + hop for hop in hops)]]


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.1754942e-38, math.inf, -math.inf, 3.4028235e38, -3.4028235e38]
VALUES = st.sampled_from(SPECIAL) | st.floats(width=32, allow_nan=False)


def by_sorting(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


@given(rows=st.lists(st.lists(VALUES, min_size=7, max_size=7), min_size=1, max_size=3), k=st.integers(1, 9))
@settings(deadline=None, max_examples=400)
def test_topk_is_a_sort_by_value_then_id(rows: list[list[float]], k: int) -> None:
    scores = torch.tensor(rows, dtype=torch.float32)
    values, ids = ordered_topk(scores, k)
    assert ids.tolist() == [by_sorting(row, k) for row in scores.tolist()]
    assert torch.equal(values, scores.gather(-1, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_topk_of_a_large_vocabulary_full_of_ties(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    scores: Tensor = (torch.randn(3, 20_000, generator=generator) * 2).round().div(2).to(dtype)
    values, ids = ordered_topk(scores, 200)
    assert values.dtype == dtype
    assert ids.tolist() == [by_sorting(row, 200) for row in scores.tolist()]


@pytest.mark.parametrize("value", [0.0, -2.5, math.inf, -math.inf])
def test_topk_of_equal_scores_is_the_first_ids(value: float) -> None:
    assert ordered_topk(torch.full((151_936,), value), 4)[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [255, 256, 257, 4096, 4100, 20_001])
@pytest.mark.parametrize("k", [1, 2, 15, 64])
def test_topk_by_blocks_is_a_sort_too(size: int, k: int) -> None:
    """Few values, so that blocks tie with blocks, and the last block is not full."""
    generator = torch.Generator().manual_seed(size)
    scores = torch.randint(-9, 3, (2, size), generator=generator).float()
    scores[0, -1] = 50.0
    scores[1, ::7] = -torch.inf
    assert ordered_topk(scores, k)[1].tolist() == [by_sorting(row, k) for row in scores.tolist()]


@pytest.mark.parametrize("size", [1, 300, 20_001, 32_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_argmax_of_a_tie_is_the_lowest_id(size: int, dtype: torch.dtype) -> None:
    scores = torch.zeros(2, 3, size, dtype=dtype)
    scores[1, 2, size // 3 :] = 1.0
    expected = torch.zeros(2, 3, dtype=torch.int64)
    expected[1, 2] = size // 3
    assert torch.equal(ordered_argmax(scores), expected)
