"""The settings of `python -m infer.profile` and `python -m infer.calibrate`, checked as they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data.models import DraftChoice, TargetChoice
from dominotree.checked import at_least
from dominotree.errors import UserError

if TYPE_CHECKING:
    from dominotree.draft.model import DraftModel


@dataclass(frozen=True)
class ProfileConfig:
    """Everything `conf/profile.yaml` holds."""

    target: TargetChoice
    draft: DraftChoice
    output: str | None
    context_lengths: tuple[int, ...]
    node_counts: tuple[int, ...]
    repeats: int
    seed: int
    dtype: str
    device: str
    debug: bool

    def __post_init__(self) -> None:
        _ascending("context_lengths", self.context_lengths, at_least_one=1)
        _ascending("node_counts", self.node_counts, at_least_one=2)
        at_least("context_lengths", self.context_lengths[0], 1)
        at_least("node_counts", self.node_counts[0], 0)
        at_least("repeats", self.repeats, 1)
        at_least("seed", self.seed, 0)
        _check_output(self.output, self.draft)


@dataclass(frozen=True)
class CalibrateConfig:
    """Everything `conf/calibrate.yaml` holds."""

    target: TargetChoice
    draft: DraftChoice
    prompts: str
    limit: int | None
    raw: bool
    max_new_tokens: int
    temperatures: tuple[float, ...]
    node_budget: int
    candidate_width: int
    node_topk: int
    caps: tuple[int, ...]
    profile: str | None
    output: str | None
    seed: int
    dtype: str
    device: str
    debug: bool

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UserError("prompts= needs a file of prompts or a data directory, got none")
        _ascending("temperatures", self.temperatures, at_least_one=1)
        _ascending("caps", self.caps, at_least_one=1)
        for name in ("limit", "max_new_tokens", "node_budget", "node_topk"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 2 if name in ("limit", "max_new_tokens") else 1)
        at_least("candidate_width", self.candidate_width, 0)
        at_least("temperatures", self.temperatures[0], 0)
        at_least("caps", self.caps[0], 1)
        at_least("seed", self.seed, 0)
        _check_output(self.output, self.draft)


def output_path(output: str | None, draft: DraftModel, name: str) -> Path:
    """The file to write: the one asked for, else `name` beside the drafter's weights. Raises UserError."""
    if output is not None:
        return Path(output).expanduser()
    if draft.directory is None:
        raise UserError(f"output= needs a file, as this drafter was not loaded from a directory that could hold {name}")
    return draft.directory / name


def _check_output(output: str | None, draft: DraftChoice) -> None:
    if draft.source == "none":
        raise UserError("this measures a drafter, got draft=none; name one")
    if output is None and draft.source == "fresh":
        raise UserError("output= needs a file, as draft=fresh has no directory to write to")
    if output == "":
        raise UserError("output= needs a file, got none")


def _ascending(name: str, values: tuple[float, ...], *, at_least_one: int) -> None:
    if len(values) < at_least_one or list(values) != sorted(set(values)):
        raise UserError(f"{name} must be {at_least_one} or more ascending numbers, got {list(values)}")
