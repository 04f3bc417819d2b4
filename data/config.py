"""The settings of `python -m data.prepare`, checked as they are made; `conf/prepare.yaml` explains the keys."""

from __future__ import annotations

from dataclasses import dataclass

from data.models import TargetChoice
from dominotree.checked import at_least, one_of
from dominotree.errors import UserError

SOURCES = ("synthesis", "benchmark", "dataset")


@dataclass(frozen=True)
class DataChoice:
    """Where prompts come from: `source` synthesis (the target writes them), benchmark (a test set by its name), or
    dataset (a hub id, a directory, or a JSONL, JSON, Parquet or CSV file)."""

    source: str
    name: str | None = None  # of a benchmark
    path: str | None = None
    config: str | None = None  # a hub data set's configuration
    split: str = "train"
    column: str | None = None  # what holds the prompt or the messages; None finds it by its usual names
    turns: int = 1  # of a synthesised conversation
    openers: tuple[str, ...] = ()
    max_user_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        one_of("data.source", self.source, SOURCES)
        if self.source == "dataset" and not self.path:
            raise UserError("data.path must be a hub id, a directory or a file, got none; give data.path=…")
        for name in ("turns", "max_user_tokens"):
            at_least(f"data.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class PrepareConfig:
    """Everything `conf/prepare.yaml` holds."""

    target: TargetChoice
    data: DataChoice
    output: str
    count: int | None
    answers: str
    max_length: int
    max_answer_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    batch_size: int
    features: str
    num_features: int
    layer_ids: tuple[int, ...]
    dtype: str
    device: str
    debug: bool

    def __post_init__(self) -> None:
        if not self.output:
            raise UserError("output= needs a directory, got none")
        one_of("answers", self.answers, ("target", "given"))
        one_of("features", self.features, ("none", "bfloat16", "int8"))
        for name in ("max_answer_tokens", "batch_size", "num_features"):
            at_least(name, getattr(self, name), 1)
        at_least("max_length", self.max_length, 2)
        at_least("seed", self.seed, 0)
        if self.count is not None:
            at_least("count", self.count, 1)
        if self.data.source == "synthesis" and self.count is None:
            raise UserError("data=synthesis has no end of its own, got count=null; give the conversations wanted")
        if self.answers == "given" and self.data.source != "dataset":
            raise UserError(f"answers=given keeps a data set's answers, which data.source={self.data.source} has not")
        if self.layer_ids and min(self.layer_ids) < 0:
            raise UserError(f"layer_ids must not be negative, got {list(self.layer_ids)}")
