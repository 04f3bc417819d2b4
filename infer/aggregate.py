"""From records to the figures of the papers' tables: τ and speedup by data set, temperature and method.

As in the papers: τ is the mean over generations of each one's mean; the speedup is plain decoding's mean time a token
over the method's; an average over data sets counts each of them once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from infer.benchmark_config import BASELINE
from infer.measurements import Measurement

AVERAGE = "Avg."


@dataclass(frozen=True)
class Figures:
    """One cell of a table. None where no generation has a second token."""

    tau: float | None
    seconds_per_token: float | None
    speedup: float | None
    generations: int


Table = dict[tuple[float, str, str], Figures]  # by temperature, data set and method


def tabulate(measurements: Iterable[Measurement]) -> Table:
    """All cells, with those of AVERAGE over the data sets in which a method has figures."""
    groups: dict[tuple[float, str, str], list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        key = measurement.key
        groups[key.temperature, key.dataset, key.method].append(measurement)
    table: Table = {}
    for (temperature, dataset, method), group in groups.items():
        spent = _mean(one.seconds_per_token for one in group)
        plain = _mean(one.seconds_per_token for one in groups.get((temperature, dataset, BASELINE), []))
        table[temperature, dataset, method] = Figures(
            tau=_mean(one.acceptance_length for one in group),
            seconds_per_token=spent,
            speedup=plain / spent if plain is not None and spent else None,
            generations=len(group),
        )
    return table | _averages(table)


def _averages(table: Table) -> Table:
    rows: dict[tuple[float, str], list[Figures]] = defaultdict(list)
    for (temperature, _, method), figures in table.items():
        rows[temperature, method].append(figures)
    return {
        (temperature, AVERAGE, method): Figures(
            tau=_mean(figures.tau for figures in row),
            seconds_per_token=_mean(figures.seconds_per_token for figures in row),
            speedup=_mean(figures.speedup for figures in row),
            generations=sum(figures.generations for figures in row),
        )
        for (temperature, method), row in rows.items()
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
