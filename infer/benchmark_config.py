"""The settings of `python -m infer.benchmark`, checked as they are made; `conf/benchmark.yaml` explains the keys."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from data.benchmarks import BENCHMARKS
from data.models import DraftChoice, TargetChoice
from data.tracking import TrackingConfig
from dominotree.checked import at_least
from dominotree.errors import UserError
from infer.config import MethodConfig

BASELINE = "ar"


@dataclass(frozen=True)
class MethodRow(MethodConfig):
    """One row of the tables: a method with its options, a label, and a drafter of its own where it has one."""

    label: str | None = None
    draft: str | None = None  # a directory or a hub id; None is the drafter of the run

    @property
    def options(self) -> dict[str, int | float | str]:
        """What the method itself is given."""
        return {name: value for name, value in super().options.items() if name not in ("label", "draft")}

    @property
    def title(self) -> str:
        """The label; without one the method's name and the options that were given, as in `dominotree@32`."""
        if self.label is not None:
            return self.label
        options = dict(self.options)
        budget = options.pop("node_budget", None)
        title = self.name if budget is None else f"{self.name}@{budget}"
        return " ".join([title, *(f"{option}={value}" for option, value in options.items())])


@dataclass(frozen=True)
class BenchmarkConfig:
    """Everything `conf/benchmark.yaml` holds."""

    target: TargetChoice
    draft: DraftChoice
    tracking: TrackingConfig
    output: str
    datasets: tuple[str, ...]
    methods: tuple[str | MethodRow, ...]
    node_budgets: tuple[int, ...]
    temperatures: tuple[float, ...]
    limit: int | None
    max_new_tokens: int
    top_k: int
    top_p: float
    seed: int
    dtype: str
    device: str
    debug: bool

    def __post_init__(self) -> None:
        if not self.output:
            raise UserError("output= needs a directory, got none")
        if not self.datasets:
            raise UserError(
                f"datasets= names no prompts; give benchmark sets ({', '.join(BENCHMARKS)}) or JSONL files, as "
                "datasets=[gsm8k,questions.jsonl]"
            )
        for name in ("methods", "temperatures"):
            if not getattr(self, name):
                raise UserError(f"{name}= is empty; give at least one")
        for name in ("methods", "temperatures", "node_budgets"):
            _distinct(name, list(getattr(self, name)))
        _distinct("datasets: names", [dataset_label(dataset) for dataset in self.datasets])
        _distinct("methods: labels", [row.title for row in self.rows()])
        at_least("max_new_tokens", self.max_new_tokens, 2)
        at_least("seed", self.seed, 0)
        if self.limit is not None:
            at_least("limit", self.limit, 1)

    @property
    def effective_dtype(self) -> str:
        return self.target.effective_dtype(self.dtype)

    def rows(self) -> list[MethodRow]:
        """Plain decoding first, the baseline of all; a tree without a budget of its own once for each of node_budgets.

        Raises UserError for a method that does not exist.
        """
        rows = [MethodRow(entry) if isinstance(entry, str) else entry for entry in self.methods]
        plain = [row for row in rows if row.name == BASELINE]
        drafting = [row for row in rows if row.name != BASELINE]
        if len(plain) > 1 or (plain and plain[0].title != BASELINE):
            raise UserError(f"methods= has plain decoding once, labelled {BASELINE}; it is the baseline of all others")
        return [MethodRow(BASELINE), *(spread for row in drafting for spread in self._spread(row))]

    def _spread(self, row: MethodRow) -> list[MethodRow]:
        if not self.node_budgets or row.node_budget is not None or not _has_budget(row.name):
            return [row]
        label = row.label
        return [
            replace(row, node_budget=budget, label=None if label is None else f"{label}@{budget}")
            for budget in self.node_budgets
        ]


def dataset_label(dataset: str) -> str:
    """A benchmark's own name, or that of a file without its ending."""
    return dataset if dataset in BENCHMARKS else Path(dataset).stem


def _has_budget(name: str) -> bool:
    from dominotree.decode.methods import METHODS  # here, so that a mistake elsewhere shows before torch is imported

    if name not in METHODS:
        raise UserError(f"methods= has {name}, which does not exist; choose of {', '.join(METHODS)}")
    return "node_budget" in {field.name for field in fields(METHODS[name])}


def _distinct(what: str, values: list[object]) -> None:
    twice = [value for index, value in enumerate(values) if value in values[:index]]
    if twice:
        raise UserError(f"{what} must differ, got {twice[0]} twice")
