"""Calibration: what is recovered, how it bends chances, and that trees built on it stay exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from dominotree.errors import UserError
from dominotree.tree.calibration import CalibratedScorer, Calibration, StepCalibration, fit_steps, log_odds
from dominotree.tree.children import Children, DepthScorer
from dominotree.tree.heap import best_first_tree

CPU = torch.device("cpu")


def drawn(slope: float, offsets: list[float], count: int = 40_000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps whose acceptance follows a known map."""
    random = np.random.default_rng(0)
    log_probs, depths = np.log(random.uniform(0.01, 0.99, count)), random.integers(1, 1 + len(offsets), count)
    odds = log_odds(torch.from_numpy(log_probs)).numpy()
    chances = expit(slope * odds + np.array(offsets)[depths - 1])
    return log_probs, depths, random.uniform(size=count) < chances


def test_the_fit_recovers_the_map_that_acceptance_follows() -> None:
    fitted = fit_steps(*drawn(0.6, [0.0, -0.5, -1.0]), max_depth=3)
    assert fitted.slope == pytest.approx(0.6, abs=0.03)
    assert fitted.offsets == pytest.approx((0.0, -0.5, -1.0), abs=0.06)


def test_probabilities_that_are_right_are_left_alone() -> None:
    fitted = fit_steps(*drawn(1.0, [0.0, 0.0]), max_depth=2)
    assert (fitted.slope, *fitted.offsets) == pytest.approx((1.0, 0.0, 0.0), abs=0.06)


def test_a_depth_that_was_never_reached_stays_at_the_identity() -> None:
    assert fit_steps(*drawn(0.6, [-1.0]), max_depth=3).offsets[1:] == pytest.approx((0.0, 0.0))


def test_with_nothing_logged_the_map_is_the_identity() -> None:
    fitted = fit_steps(np.zeros(0), np.zeros(0, dtype=int), np.zeros(0, dtype=bool), max_depth=2)
    assert (fitted.slope, *fitted.offsets) == (1.0, 0.0, 0.0)


@given(log_prob=st.floats(-60, 0), depth=st.integers(1, 4))
def test_the_identity_map_gives_the_probability_itself(log_prob: float, depth: int) -> None:
    mapped = StepCalibration(1.0, (0.0, 0.0)).log_chances(torch.tensor(log_prob, dtype=torch.float64), depth)
    assert float(mapped) == pytest.approx(log_prob, abs=2e-6)


@given(
    slope=st.floats(0.01, 3),
    offset=st.floats(-5, 5),
    log_probs=st.lists(st.floats(-30, 0), min_size=2, max_size=8).map(lambda values: sorted(values, reverse=True)),
)
def test_chances_lie_below_one_and_siblings_keep_their_order(
    slope: float, offset: float, log_probs: list[float]
) -> None:
    mapped = StepCalibration(slope, (offset,)).log_chances(torch.tensor(log_probs, dtype=torch.float64), 1)
    assert mapped.max() <= 0
    assert mapped.diff().max() <= 0


def test_depths_beyond_the_last_offset_take_it() -> None:
    steps, log_prob = StepCalibration(1.0, (0.0, -2.0)), torch.tensor(-1.0, dtype=torch.float64)
    expected = math.log(expit(float(log_odds(log_prob)) - 2))
    assert [float(steps.log_chances(log_prob, depth)) for depth in (2, 9)] == pytest.approx([expected] * 2)


def test_between_two_temperatures_the_map_lies_between() -> None:
    calibration = Calibration(64, (0.0, 1.0), (StepCalibration(1.0, (0.0, 0.0)), StepCalibration(0.5, (-1.0, -2.0))))
    assert calibration.at(0.5) == StepCalibration(0.75, (-0.5, -1.0))
    assert calibration.at(2.0) == calibration.steps[1]
    assert calibration.at(0.0) == calibration.steps[0]


def families(seed: int) -> list[Children]:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(3, 5, generator=generator).log_softmax(-1).sort(descending=True).values
    return [([10 * slot + rank for rank in range(5)], row.tolist()) for slot, row in enumerate(log_probs)]


@pytest.mark.parametrize("seed", range(3))
def test_the_calibrated_tree_holds_the_likeliest_paths_of_all(seed: int) -> None:
    """Against every path of up to three steps, scored one by one."""
    steps = StepCalibration(0.7, (-0.3, 0.4, -1.0))
    paths: dict[tuple[int, ...], float] = {(): 0.0}
    for slot, (token_ids, log_probs) in enumerate(families(seed)):
        chances = [expit(0.7 * math.log(math.exp(lp) / (1 - math.exp(lp))) + steps.offsets[slot]) for lp in log_probs]
        for path in [path for path in paths if len(path) == slot]:
            paths |= {(*path, t): paths[path] + math.log(c) for t, c in zip(token_ids, chances, strict=True)}
    best = sorted((score for path, score in paths.items() if path), reverse=True)[:20]
    tree = best_first_tree(
        CalibratedScorer(DepthScorer(families(seed)), steps), node_budget=20, max_depth=3, device=CPU
    )
    assert tree.path_log_probs is not None
    assert tree.path_log_probs[0].tolist() == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize(("slope", "offsets"), [(0.0, (0.0,)), (1.0, ()), (math.nan, (0.0,)), (1.0, (math.inf,))])
def test_an_impossible_map_is_refused(slope: float, offsets: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="slope of at least"):
        StepCalibration(slope, offsets)


def test_maps_must_fit_their_temperatures() -> None:
    step = StepCalibration(1.0, (0.0,))
    with pytest.raises(UserError, match="one map for each temperature"):
        Calibration(64, (0.0, 1.0), (step,))
    with pytest.raises(UserError, match="ascend"):
        Calibration(64, (1.0, 0.0), (step, step))
