"""Node budgets: the cost model, its fit, and the rule that stops a tree, against the published rule's own trees."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy.optimize import minimize

from dominotree.errors import UserError
from dominotree.tree.budget import CostModel, StoppingRule, fit_monotone_convex
from dominotree.tree.children import MarginalScorer
from dominotree.tree.heap import best_first_tree

COSTS = CostModel((100, 300), ((1.0, 1.5, 2.5), (3.0, 4.0, 6.0)), draft_seconds=0.5)


@pytest.fixture(scope="module")
def published(reference_expected: dict[str, Any]) -> CostModel:
    stored = reference_expected["cost_model"]
    rows = tuple(tuple(stored["curves"][str(length)]) for length in stored["context_lengths"])
    return CostModel(tuple(stored["context_lengths"]), rows, stored["draft_cost"])


def test_the_published_cost_aware_trees_are_matched_exactly(
    reference: Path, reference_expected: dict[str, Any], published: CostModel
) -> None:
    tensors = load_file(reference / "tensors.safetensors")
    assert len(reference_expected["caddtree"]) == 27
    for case in reference_expected["caddtree"]:
        same_position = not case["variant"].startswith("shift")  # whose first slot, the anchor's own, drafts nothing
        logits = tensors[f"{case['variant']}/block_base_logits"][0, same_position:] * case["logit_scale"]
        cap = case["max_budget"]
        full = best_first_tree(
            MarginalScorer(logits, node_topk=cap), node_budget=cap, max_depth=len(logits), device=torch.device("cpu")
        )
        assert full.path_log_probs is not None
        rule = StoppingRule(published.round_seconds(case["context_length"], cap))
        tree = full.first(rule.size(full.path_log_probs[0].tolist()))
        assert tree.token_ids[0].tolist() == case["tokens"]
        assert tree.parents[0].tolist() == case["parents"]
        assert (tree.depths[0] - 1).tolist() == case["depths"]


@settings(deadline=None)
@given(
    chances=st.lists(st.floats(0.001, 1), max_size=12).map(lambda values: sorted(values, reverse=True)),
    steps=st.lists(st.floats(0, 2), min_size=12, max_size=12).map(sorted),
    base=st.floats(0.1, 5),
)
def test_the_rule_finds_the_best_size_of_all(chances: list[float], steps: list[float], base: float) -> None:
    seconds = list(itertools.accumulate([base, *steps]))
    size = StoppingRule(seconds).size(math.log(chance) for chance in chances)
    rates = [(1 + sum(chances[:n])) / seconds[n] for n in range(len(chances) + 1)]
    assert rates[size] == pytest.approx(max(rates))


@settings(deadline=None)
@given(
    chances=st.lists(st.floats(0, 1), max_size=14).map(lambda values: sorted(values, reverse=True)),
    steps=st.lists(st.floats(0, 2), min_size=8, max_size=8),
    known=st.sets(st.integers(0, 13)),
)
def test_no_node_below_the_bound_is_taken_whichever_nodes_are_known(
    chances: list[float], steps: list[float], known: set[int]
) -> None:
    scores = [math.log(chance) if chance else -math.inf for chance in chances]
    rule = StoppingRule(list(itertools.accumulate([1.0, *steps])))
    bound = rule.bound([score for place, score in enumerate(scores) if place in known])
    assert all(score >= bound for score in scores[: rule.size(scores)])


def test_the_bound_tells_what_cannot_be_worth_its_cost() -> None:
    """A tenth of a round's cost a node: it must promise a tenth of the tokens expected without it."""
    rule = StoppingRule([1.0, 1.1, 1.2, 1.3])
    assert rule.bound([]) == pytest.approx(math.log(1.3 / 1.2 - 1))
    assert rule.bound([0.0]) == pytest.approx(math.log(2 * (1.3 / 1.2 - 1)))
    assert rule.bound([-0.1, -0.2, -0.3, -0.4]) == pytest.approx(-0.3)


def test_flat_costs_take_every_node_up_to_the_cap() -> None:
    assert StoppingRule([1.0] * 9).size([-9.0] * 20) == 8


def test_steep_costs_take_none() -> None:
    assert StoppingRule([1.0, 2.0, 3.0]).size([-0.1, -0.1]) == 0


def test_nodes_are_asked_for_one_by_one_until_the_stop() -> None:
    asked = []

    def nodes() -> Any:
        for log_chance in (-0.1, -0.2, -9.0, -9.5):
            asked.append(log_chance)
            yield log_chance

    assert StoppingRule([1.0, 1.1, 1.2, 1.3, 1.4]).size(nodes()) == 2
    assert asked == [-0.1, -0.2, -9.0]


@pytest.mark.parametrize(
    ("context_length", "expected"),
    [(100, [1.5, 2.0, 3.0]), (300, [3.5, 4.5, 6.5]), (150, [2.0, 2.625, 3.875]), (1, [1.5, 2.0, 3.0])],
)
def test_costs_are_interpolated_between_contexts_and_held_outside(context_length: int, expected: list[float]) -> None:
    assert COSTS.round_seconds(context_length, 2) == pytest.approx(expected)
    assert COSTS.round_seconds(10_000, 1) == pytest.approx([3.5, 4.5])


def test_beyond_the_measured_nodes_costs_follow_the_last_step() -> None:
    assert COSTS.round_seconds(100, 4) == pytest.approx([1.5, 2.0, 3.0, 4.0, 5.0])
    assert COSTS.round_seconds(200, 4)[-1] == pytest.approx(0.5 + (4.5 + 10.0) / 2)


def test_build_seconds_are_counted_where_they_are_given() -> None:
    costs = CostModel((1,), ((1.0, 1.5, 2.5),), draft_seconds=0.5, build_seconds=(0.0, 0.1, 0.3))
    assert costs.round_seconds(5, 3) == pytest.approx([1.5, 2.1, 3.3, 4.5])


def test_a_tree_that_is_built_whole_costs_its_building_whatever_is_verified() -> None:
    costs = CostModel((1,), ((1.0, 1.5, 2.5),), draft_seconds=0.5, build_seconds=(0.0, 0.1, 0.3))
    assert costs.building_all(2).round_seconds(5, 2) == pytest.approx([1.8, 2.3, 3.3])
    assert costs.building_all(1).round_seconds(5, 1) == pytest.approx([1.6, 2.1])


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_fit_is_monotone_and_convex_whatever_was_measured(data: st.DataObject) -> None:
    counts = sorted(data.draw(st.sets(st.integers(0, 40), min_size=2, max_size=8)))
    seconds = data.draw(st.lists(st.floats(0.001, 1), min_size=len(counts), max_size=len(counts)))
    curve = np.array(fit_monotone_convex(counts, seconds, 50))
    assert len(curve) == 51 and curve[0] >= 0
    assert np.diff(curve).min() >= -1e-9
    assert np.diff(curve, 2).min() >= -1e-9


def test_measurements_of_a_convex_curve_are_kept() -> None:
    counts = [0, 1, 4, 8, 16, 32]
    curve = fit_monotone_convex(counts, [0.1 + 0.001 * n**2 for n in counts], 40)
    assert [curve[n] for n in counts] == pytest.approx([0.1 + 0.001 * n**2 for n in counts])
    assert curve[24] == pytest.approx((curve[16] + curve[32]) / 2)
    assert curve[40] == pytest.approx(curve[32] + 8 * (curve[32] - curve[31]))


def test_no_other_monotone_convex_curve_is_closer() -> None:
    """Against a general solver that is told the constraints themselves."""
    measured = np.array([0.5, 0.9, 0.7, 1.6, 1.5])
    constraints = [{"type": "ineq", "fun": lambda curve, order=order: np.diff(curve, order)} for order in (1, 2)]
    other = minimize(lambda curve: ((curve - measured) ** 2).sum(), measured, constraints=constraints, tol=1e-12)
    assert fit_monotone_convex(range(5), measured.tolist(), 4) == pytest.approx(other.x.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("lengths", "rows", "message"),
    [
        ((1, 2), ((1.0, 2.0),), "one row of verify_seconds for each context length"),
        ((1,), ((1.0,),), "of at least 2"),
        ((2, 1), ((1.0, 2.0), (1.0, 2.0)), r"ascend, got \[2, 1\]"),
        ((1,), ((0.0, 2.0),), "positive"),
        ((1,), ((1.0, math.nan),), "finite"),
    ],
)
def test_an_impossible_cost_model_is_refused(lengths: Any, rows: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CostModel(lengths, rows, draft_seconds=0.1)
