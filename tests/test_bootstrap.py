"""Intervals against a closed form, against scipy's own bootstrap, and paired on the prompt."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from bench_records import record

from infer.aggregate import AVERAGE, tabulate
from infer.bootstrap import Interval, Resampled
from infer.measurements import Measurement


def measured(seconds: dict[str, np.ndarray], dataset: str = "a", **values: object) -> list[Measurement]:
    """One generation a prompt and method, of four tokens in three times these seconds after the prefill."""
    return [
        Measurement.parse(record(dataset, prompt, method, seconds=[9.0, 3 * spent, 0, 0, 0, 0], **values))
        for method, all_of_them in seconds.items()
        for prompt, spent in enumerate(all_of_them)
    ]


def resampled(measurements: list[Measurement], methods: list[str], seed: int = 0, resamples: int = 4000) -> Resampled:
    return Resampled(measurements, methods, resamples=resamples, seed=seed)


def bounds(interval: Interval | None) -> tuple[float, float, float]:
    assert interval is not None
    return interval.value, interval.low, interval.high


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    # Plain decoding always takes 1: the speedup is 1 over the mean.
    spent = np.random.default_rng(1).normal(2.0, 0.3, size=400)
    value, low, high = bounds(resampled(measured({"ar": np.ones(400), "b": spent}), ["ar", "b"]).speedup("a", "b"))
    half = 1.96 * spent.std(ddof=1) / 20
    assert value == pytest.approx(1 / spent.mean())
    assert 1 / low - 1 / high == pytest.approx(2 * half, rel=0.05)
    assert 1 / high == pytest.approx(spent.mean() - half, rel=0.003)


def test_a_difference_is_scipy_s_paired_bootstrap() -> None:
    generator = np.random.default_rng(2)
    slow = generator.gamma(4.0, 0.5, size=60)
    fast = 0.8 * slow + generator.normal(0, 0.05, size=60)
    table = resampled(measured({"ar": 2 * slow, "slow": slow, "fast": fast}), ["ar", "slow", "fast"], resamples=20000)
    expected = scipy.stats.bootstrap(
        (slow, fast),
        lambda a, b, axis: 100 * (a.mean(axis=axis) / b.mean(axis=axis) - 1),
        paired=True,
        method="percentile",
        n_resamples=20000,
        rng=np.random.default_rng(3),
    ).confidence_interval
    value, low, high = bounds(table.speed_gain("a", "fast", "slow"))
    assert value == pytest.approx(100 * (slow.mean() / fast.mean() - 1))
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.05 * (expected.high - expected.low))


def test_pairing_leaves_no_doubt_where_every_prompt_agrees() -> None:
    slow = np.random.default_rng(4).gamma(1.0, 1.0, size=20)
    table = resampled(measured({"ar": slow, "fast": slow / 1.25}), ["ar", "fast"])
    assert bounds(table.speed_gain("a", "fast", "ar")) == pytest.approx((25, 25, 25))


def test_turns_of_a_prompt_are_drawn_together() -> None:
    spent = np.random.default_rng(5).gamma(2.0, 1.0, size=30)
    methods = {"ar": np.ones(30), "b": spent}
    once = resampled(measured(methods), ["ar", "b"])
    twice = resampled([*measured(methods), *measured(methods, turn=1)], ["ar", "b"])
    assert bounds(twice.speedup("a", "b")) == pytest.approx(bounds(once.speedup("a", "b")))


def test_an_average_counts_every_data_set_once_and_varies_less() -> None:
    generator = np.random.default_rng(6)
    many = measured({"ar": np.full(80, 4.0), "b": generator.gamma(4.0, 0.5, size=80)}, "many")
    few = measured({"ar": np.full(20, 4.0), "b": generator.gamma(4.0, 0.5, size=20)}, "few")
    table = resampled([*many, *few], ["ar", "b"])
    cells = {name: bounds(table.speedup(name, "b")) for name in ("many", "few", AVERAGE)}
    assert cells[AVERAGE][0] == pytest.approx((cells["many"][0] + cells["few"][0]) / 2)
    assert cells[AVERAGE][2] - cells[AVERAGE][1] < cells["few"][2] - cells["few"][1]


def test_the_estimates_are_the_table_s() -> None:
    generator = np.random.default_rng(7)
    group = [
        one
        for name in ("x", "y")
        for one in measured({method: generator.gamma(2.0, 1.0, size=7) for method in ("ar", "b")}, name)
    ]
    table, drawn = tabulate(group), resampled(group, ["ar", "b"])
    for name in ("x", "y", AVERAGE):
        assert bounds(drawn.speedup(name, "b"))[0] == pytest.approx(table[0.0, name, "b"].speedup)
        assert bounds(drawn.tau(name, "b"))[0] == pytest.approx(table[0.0, name, "b"].tau)


def test_intervals_follow_the_seed() -> None:
    group = measured({"ar": np.ones(9), "b": np.random.default_rng(8).gamma(2.0, 1.0, size=9)})
    first, again, other = (bounds(resampled(group, ["ar", "b"], seed).speedup("a", "b")) for seed in (1, 1, 2))
    assert first == again != other


def test_a_method_without_records_has_no_interval() -> None:
    table = resampled(measured({"ar": np.ones(3)}), ["ar", "b"])
    assert table.speedup("a", "b") is None and table.speedup("nowhere", "ar") is None


def test_a_generation_of_one_token_counts_for_neither_speed_nor_tau() -> None:
    group = measured({"ar": np.ones(3), "b": np.ones(3)})
    empty = Measurement.parse(record("a", 7, "b", tokens=1, accepted_lengths=[], seconds=[1, 0, 0, 0, 0, 0]))
    assert tabulate([*group, empty])[0.0, "a", "b"].speedup == tabulate(group)[0.0, "a", "b"].speedup
    assert bounds(resampled([*group, empty], ["ar", "b"]).tau("a", "b")) == pytest.approx((1.5, 1.5, 1.5))
