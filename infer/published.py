"""The authors' own figures, from `published.yaml`, where the setting of a run is that of a published one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infer.aggregate import AVERAGE
from infer.bootstrap import Interval

PUBLISHED_DATASETS = {"gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt_bench", "alpaca"}


@dataclass(frozen=True)
class PublishedRow:
    """One method's published speedup and τ by data set (benchmark names, and the average)."""

    name: str
    source: str
    setting: str
    temperature: float
    ours: str | None  # the row of the run that it is about
    cells: dict[str, tuple[float, float]]


class Published:
    """What was published for the target and the answer length of one run; nothing where they do not match."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        """`run` is the content of a run.json."""
        content = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text(encoding="utf-8"))
        self._target = str(run["target"]).rstrip("/").split("/")[-1].lower()
        self._methods = {
            label: {"draft": run["draft"], **method} for label, method in run["identity"]["methods"].items()
        }
        self._datasets = {label for label, dataset in run["datasets"].items() if dataset["benchmark"]}
        self._others = len(run["datasets"]) - len(self._datasets)
        tables = [table for table in content["tables"] if self._is_target(table)]
        tables = [table for table in tables if table["max_new_tokens"] == run["identity"]["max_new_tokens"]]
        self.rows = [self._row(table, row) for table in tables for row in table["rows"]]
        self._gains = [gain for gain in content["gains"] if tables and self._is_target(gain)]

    def gain(self, temperature: float, dataset: str, label: str, over: str) -> Interval | None:
        """The published difference in speed, percent, between what two rows of the run are."""
        for gain in self._gains if self._has(dataset) else ():
            is_cell = (gain["temperature"], gain["dataset"]) == (temperature, dataset)
            if is_cell and self._is(label, gain["ours"]) and self._is(over, gain["over"]):
                return Interval(*gain["percent"])
        return None

    def _has(self, dataset: str) -> bool:
        """An average is comparable where the run has the published data sets, and no others."""
        if dataset == AVERAGE:
            return self._datasets == PUBLISHED_DATASETS and not self._others
        return dataset in self._datasets

    def _is_target(self, entry: Mapping[str, Any]) -> bool:
        return bool(entry["target"].lower() == self._target)

    def _is(self, label: str, wanted: Mapping[str, Any]) -> bool:
        return all(self._methods[label].get(key) == value for key, value in wanted.items())

    def _row(self, table: Mapping[str, Any], row: Mapping[str, Any]) -> PublishedRow:
        wanted = row.get("ours")
        ours = next((label for label in self._methods if wanted and self._is(label, wanted)), None)
        pairs = dict(zip(table["columns"], row["cells"].split(), strict=True))
        cells = {column: _figures(cell) for column, cell in pairs.items() if cell != "-" and self._has(column)}
        return PublishedRow(row["name"], table["source"], table["setting"], table["temperature"], ours, cells)


def _figures(cell: str) -> tuple[float, float]:
    speedup, tau = cell.split("/")
    return float(speedup), float(tau)
