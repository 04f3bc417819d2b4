"""The tables of a report."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dominotree.errors import UserError
from infer.aggregate import AVERAGE, tabulate
from infer.benchmark_config import BASELINE
from infer.bootstrap import Interval, Resampled
from infer.measurements import RUN_FILE, STAGES, Key, Measurement, read_measurements
from infer.published import Published, PublishedRow
from infer.sheets import Sheet

ALL_PAIRS_UP_TO = 5  # methods; of more only the last is compared with each of the others
OUTSIDE = "†"
NOTHING = "–"
ROUND_STAGES = [stage for stage in STAGES if stage != "prefill"]


@dataclass(frozen=True)
class Run:
    """The records of a benchmark with what run.json says about them, and the resampled figures by temperature.

    Where a run was cut short, a prompt that not all methods have answered counts for the lossless check only.
    """

    info: Mapping[str, Any]
    measurements: list[Measurement]
    unpaired: list[Measurement]
    methods: list[str]  # labels in the order of the run, plain decoding first
    datasets: list[str]
    temperatures: list[float]
    resampled: dict[float, Resampled] = field(repr=False)

    @classmethod
    def read(cls, folder: Path, *, resamples: int, seed: int) -> Run:
        """Raises UserError for a folder without a benchmark's records."""
        try:
            info = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} holds no benchmark: cannot read its {RUN_FILE}: {error}") from error
        everything = list(read_measurements(folder).values())
        methods = list(info["identity"]["methods"])
        measurements, unpaired = _paired(everything)
        if not measurements:
            raise UserError(
                f"{folder} holds no prompt that every method has answered; python -m infer.benchmark goes on with it"
            )
        there = {one.key.dataset for one in measurements}
        temperatures = sorted({one.key.temperature for one in measurements})
        return cls(
            info=info,
            measurements=measurements,
            unpaired=unpaired,
            methods=methods,
            datasets=[dataset for dataset in info["datasets"] if dataset in there],
            temperatures=temperatures,
            resampled={
                temperature: Resampled(
                    [one for one in measurements if one.key.temperature == temperature],
                    methods,
                    resamples=resamples,
                    seed=seed,
                )
                for temperature in temperatures
            },
        )

    @property
    def columns(self) -> list[str]:
        """Data sets, and their average where there are several."""
        return [*self.datasets, AVERAGE] if len(self.datasets) > 1 else self.datasets

    def of(self, temperature: float, method: str) -> list[Measurement]:
        return [one for one in self.measurements if (one.key.temperature, one.key.method) == (temperature, method)]


def _paired(everything: list[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Those of prompts and turns that every method has answered, and the others."""
    methods = {one.key.method for one in everything}
    answered: dict[Key, set[str]] = defaultdict(set)
    for one in everything:
        answered[one.key._replace(method="")].add(one.key.method)
    whole = {key for key, answers in answered.items() if answers == methods}
    is_whole = [one.key._replace(method="") in whole for one in everything]
    return (
        [one for one, paired in zip(everything, is_whole, strict=True) if paired],
        [one for one, paired in zip(everything, is_whole, strict=True) if not paired],
    )


def method_pairs(run: Run, wanted: tuple[str, ...]) -> list[tuple[str, str]]:
    """Which methods to compare: those `wanted`, as "A over B", or a choice that suits their number."""
    pairs = [tuple(part.strip() for part in pair.split(" over ")) for pair in wanted]
    for pair in pairs:
        if len(pair) != 2 or not set(pair) <= set(run.methods):
            raise UserError(
                f"pairs= has {' over '.join(pair)!r}; write two of {', '.join(run.methods)} as 'dominotree over ddtree'"
            )
    if pairs:
        return [(pair[0], pair[1]) for pair in pairs]
    drafting = [method for method in run.methods if method != BASELINE]
    if len(drafting) <= ALL_PAIRS_UP_TO:
        return [(later, earlier) for earlier, later in combinations(drafting, 2)]
    return [(drafting[-1], other) for other in drafting[:-1]]


def main_sheets(run: Run, published: Published, *, paper: bool) -> Iterator[Sheet]:
    """Speedup and τ in the papers' layout, one table a temperature, the authors' figures below the same row of ours."""
    for temperature in run.temperatures:
        theirs = [row for row in published.rows if row.temperature == temperature and row.cells]
        resampled = run.resampled[temperature]
        rows = []
        for method in run.methods:
            same = [row for row in theirs if row.ours == method]
            expected = same if paper else []
            rows.append([method, *(_main_cell(resampled, column, method, expected) for column in run.columns)])
            rows += [_published_line(row, run.columns) for row in same]
        rows += [_published_line(row, run.columns) for row in theirs if row.ours is None]
        note = "Speedup over plain decoding of the same run / τ, tokens a round with the bonus token."
        if theirs:
            note += (
                " Authors' figures: " + "; ".join(dict.fromkeys(f"{row.source}: {row.setting}" for row in theirs)) + "."
            )
        if theirs and paper:
            note += f" {OUTSIDE}: a published figure of this method lies outside our 95 % interval of the cell."
        yield Sheet(f"Speedup and τ at temperature {temperature:g}", note, [_target(run), *run.columns], rows)


def difference_sheets(run: Run, published: Published, pairs: list[tuple[str, str]], *, paper: bool) -> Iterator[Sheet]:
    """Paired differences in percent with their intervals, one table of speed and one of τ a temperature."""
    for temperature in run.temperatures:
        resampled = run.resampled[temperature]
        for what, gain in (("speed", resampled.speed_gain), ("τ", resampled.tau_gain)):
            rows, found = [], False
            for method, over in pairs:
                cells = []
                for column in run.columns:
                    theirs = published.gain(temperature, column, method, over) if what == "speed" else None
                    found = found or theirs is not None
                    cells.append(_gain_cell(gain(column, method, over), theirs, paper))
                rows.append([f"{method} over {over}", *cells])
            note = "Percent, with the 95 % interval of a paired bootstrap over prompts."
            if found:
                note += " In brackets with A: the authors' figure and its interval (DominoTree, arXiv 2607.08642)."
                note += f" {OUTSIDE}: ours lies outside that interval." if paper else ""
            title = f"Differences in {what} at temperature {temperature:g}"
            yield Sheet(title, note, ["difference", *run.columns], rows)


def stage_sheet(run: Run) -> Sheet:
    """Where the time goes: means over all generations of a temperature."""
    rows = []
    for temperature in run.temperatures:
        for method in run.methods:
            group = run.of(temperature, method)
            stages = stage_milliseconds(group)
            rows.append(
                [
                    f"{method}, T={temperature:g}",
                    *(f"{stages[stage]:.2f}" for stage in ROUND_STAGES),
                    f"{sum(stages.values()):.2f}",
                    f"{1e3 * fmean(one.first_token_seconds for one in group):.1f}" if group else NOTHING,
                    _peak(group),
                ]
            )
    columns = ["method", *ROUND_STAGES, "round", "first token", "peak MiB"]
    note = (
        "Milliseconds a round by stage, until the first token (prefill), and peak memory of the device or the process."
    )
    return Sheet("Time and memory", note, columns, rows)


def size_sheets(run: Run) -> Iterator[Sheet]:
    """Budgets that methods chose round by round: their mean, their quartiles, and how often the cap was hit."""
    rows = []
    for temperature in run.temperatures:
        for method in run.methods:
            sizes = tree_sizes(run.of(temperature, method))
            if sizes:
                cap = run.info["identity"]["methods"][method]["cap"]
                at_cap = sum(size >= cap for size in sizes) / len(sizes)
                spread = " / ".join(f"{quartile:.0f}" for quartile in np.percentile(sizes, (25, 50, 75)))
                cells = [str(cap), f"{fmean(sizes):.1f}", spread, f"{100 * at_cap:.1f}"]
                rows.append([f"{method}, T={temperature:g}", *cells])
    if rows:
        note = "Nodes verified a round by the methods that choose them, and the rounds that went to the cap."
        columns = ["method", "cap", "mean nodes", "quartiles", "% of rounds at the cap"]
        yield Sheet("Budgets chosen round by round", note, columns, rows)


def tree_sizes(group: list[Measurement]) -> list[int]:
    """Of all rounds of methods that choose their budgets."""
    return [size for one in group for size in one.tree_sizes or ()]


def lossless_sheet(run: Run) -> Sheet:
    """Greedy tokens against plain decoding's, by method."""
    dtype = run.info["identity"]["dtype"]
    rows = []
    for method in run.methods:
        everything = [*run.measurements, *run.unpaired]
        group = [one for one in everything if one.key.method == method and one.key.temperature == 0]
        differences = [one.difference for one in group if one.difference is not None]
        if method != BASELINE and group:
            near = sum(bool(difference["allowed"]) for difference in differences)
            counts = (len(group), len(group) - len(differences), near, len(differences) - near)
            rows.append([method, *map(str, counts)])
    rule = (
        "In float32 every token must be plain decoding's."
        if dtype == "float32"
        else f"In {dtype} a first difference must be a near-tie of the target's logits; what follows it may differ."
    )
    note = f"{rule} Sampled tokens are not compared: two draws differ though their distribution is the same."
    return Sheet(
        "Lossless check", note, ["method", "generations", "identical", "near-ties", "beyond the contract"], rows
    )


def cells_csv(run: Run) -> str:
    """Every cell with its interval, one a line."""
    table = tabulate(run.measurements)
    rows = []
    for temperature in run.temperatures:
        for dataset in run.columns:
            for method in run.methods:
                figures = table.get((temperature, dataset, method))
                if figures is None:
                    continue
                speedup, tau = (get(dataset, method) for get in _both(run.resampled[temperature]))
                per_second = None if not figures.seconds_per_token else 1 / figures.seconds_per_token
                numbers = [*_bounds(speedup), *_bounds(tau), _number(per_second), str(figures.generations)]
                rows.append([f"{temperature:g}", dataset, method, *numbers])
    names = [f"{name}{part}" for name in ("speedup", "tau") for part in ("", "_low", "_high")]
    columns = ["temperature", "dataset", "method", *names, "tokens_per_second", "generations"]
    return Sheet("", "", columns, rows).csv()


def stage_milliseconds(group: list[Measurement]) -> dict[str, float]:
    """Mean milliseconds a round by stage, the prefill left out."""
    rounds = sum(len(one.accepted_lengths) for one in group)
    totals: dict[str, float] = defaultdict(float)
    for one in group:
        for stage in ROUND_STAGES:
            totals[stage] += one.seconds[stage]
    return {stage: 1e3 * totals[stage] / rounds if rounds else 0.0 for stage in ROUND_STAGES}


def _both(resampled: Resampled) -> tuple[Callable[[str, str], Interval | None], Callable[[str, str], Interval | None]]:
    return resampled.speedup, resampled.tau


def _main_cell(resampled: Resampled, dataset: str, method: str, expected: list[PublishedRow]) -> str:
    speedup, tau = (get(dataset, method) for get in _both(resampled))
    if speedup is None or tau is None:
        return NOTHING
    published = [row.cells[dataset] for row in expected if dataset in row.cells]
    marks = [
        OUTSIDE if any(not interval.holds(figures[place]) for figures in published) else ""
        for place, interval in enumerate((speedup, tau))
    ]
    return f"{speedup.value:.2f}{marks[0]}/{tau.value:.2f}{marks[1]}"


def _published_line(row: PublishedRow, columns: list[str]) -> list[str]:
    cells = (row.cells.get(column) for column in columns)
    shown = [NOTHING if cell is None else f"{cell[0]:.2f}/{cell[1]:.2f}" for cell in cells]
    return [f"{row.name}, authors' figures: {row.source}", *shown]


def _gain_cell(gain: Interval | None, theirs: Interval | None, paper: bool) -> str:
    if gain is None:
        return NOTHING
    cell = f"{gain.value:+.1f} [{gain.low:.1f}, {gain.high:.1f}]"
    if theirs is None:
        return cell
    mark = OUTSIDE if paper and not theirs.holds(gain.value) else ""
    return f"{cell}{mark} (A {theirs.value:+.1f} [{theirs.low:.1f}, {theirs.high:.1f}])"


def _target(run: Run) -> str:
    return str(run.info["target"]).rstrip("/").split("/")[-1]


def _peak(group: list[Measurement]) -> str:
    peaks = [one.peak_mib for one in group if one.peak_mib is not None]
    return f"{max(peaks):.0f}" if peaks else NOTHING


def _bounds(interval: Interval | None) -> list[str]:
    return ["", "", ""] if interval is None else [_number(x) for x in (interval.value, interval.low, interval.high)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
