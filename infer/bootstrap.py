"""Confidence intervals by resampling prompts, all methods on the same draws: differences are paired.

Shapes: P prompts of a data set, R resamples, M methods.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infer.aggregate import AVERAGE
from infer.benchmark_config import BASELINE
from infer.measurements import Measurement

CONFIDENCE = 0.95
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds of its confidence interval (percentile bootstrap)."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class Resampled:
    """Speedup and τ of every method and data set at one temperature, as measured and in R resamples of the prompts.

    A prompt is drawn with all its turns. Prompts of a data set are drawn from that set, so averages over sets are
    stratified. The figures are those of `infer.aggregate`.
    """

    def __init__(self, measurements: Iterable[Measurement], methods: Sequence[str], *, resamples: int, seed: int):
        by_dataset: dict[str, list[Measurement]] = defaultdict(list)
        for measurement in measurements:
            by_dataset[measurement.key.dataset].append(measurement)
        self._speedups: dict[str, Array] = {}  # [1 + R, M] by data set, the first row as measured
        self._taus: dict[str, Array] = {}
        for index, (dataset, group) in enumerate(sorted(by_dataset.items())):
            prompts = list(dict.fromkeys(one.key.prompt for one in group))
            draws = _draws(len(prompts), resamples, np.random.default_rng([seed, index]))
            spent = _means(draws, group, prompts, methods, lambda one: one.seconds_per_token)
            self._taus[dataset] = _means(draws, group, prompts, methods, lambda one: one.acceptance_length)
            with np.errstate(invalid="ignore", divide="ignore"):
                self._speedups[dataset] = spent[:, [list(methods).index(BASELINE)]] / spent
        for figures in (self._speedups, self._taus):
            figures[AVERAGE] = _average(list(figures.values()))
        self._methods = list(methods)

    def speedup(self, dataset: str, method: str) -> Interval | None:
        """None where nothing was measured; so below."""
        return _interval(self._column(self._speedups, dataset, method))

    def tau(self, dataset: str, method: str) -> Interval | None:
        return _interval(self._column(self._taus, dataset, method))

    def speed_gain(self, dataset: str, method: str, over: str) -> Interval | None:
        """Percent by which `method` is faster than `over`."""
        return self._gain(self._speedups, dataset, method, over)

    def tau_gain(self, dataset: str, method: str, over: str) -> Interval | None:
        """Percent by which the τ of `method` is greater than that of `over`."""
        return self._gain(self._taus, dataset, method, over)

    def _gain(self, figures: dict[str, Array], dataset: str, method: str, over: str) -> Interval | None:
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = self._column(figures, dataset, method) / self._column(figures, dataset, over)
        return _interval(100 * (ratio - 1))

    def _column(self, figures: dict[str, Array], dataset: str, method: str) -> Array:  # [1 + R]
        found = figures.get(dataset)
        return np.array([np.nan]) if found is None else found[:, self._methods.index(method)]


def _draws(prompts: int, resamples: int, generator: np.random.Generator) -> Array:  # [1 + R, P]
    """How often each prompt is in each resample; in the first row once."""
    drawn = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    return np.concatenate([np.ones((1, prompts)), drawn.astype(np.float64)])


def _means(
    draws: Array,
    group: Sequence[Measurement],
    prompts: Sequence[str],
    methods: Sequence[str],
    figure: Callable[[Measurement], float | None],
) -> Array:  # [1 + R, M]
    """Means over generations of a figure, for every resample; not a number where no generation has it."""
    sums, counts = np.zeros((2, len(prompts), len(methods)))
    rows = {prompt: row for row, prompt in enumerate(prompts)}
    columns = {method: column for column, method in enumerate(methods)}
    for one in group:
        value = figure(one)
        if value is not None and one.key.method in columns:
            place = rows[one.key.prompt], columns[one.key.method]
            sums[place] += value
            counts[place] += 1
    with np.errstate(invalid="ignore", divide="ignore"):
        return (draws @ sums) / (draws @ counts)


def _average(figures: Sequence[Array]) -> Array:
    """Over the data sets in which a method has figures at all."""
    stacked = np.stack(figures)  # [data sets, 1 + R, M]
    there = ~np.isnan(stacked[:, :1])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(there, stacked, 0.0).sum(axis=0) / there.sum(axis=0)


def _interval(figures: Array) -> Interval | None:  # [1 + R]
    if np.isnan(figures[0]):
        return None
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.nanpercentile(figures[1:], [tail, 100 - tail]) if len(figures) > 1 else (figures[0], figures[0])
    return Interval(float(figures[0]), float(low), float(high))
