"""Files of what was measured: a profile of round costs, a calibration of acceptance; each says what it holds for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..checked import build
from ..draft.model import DraftModel
from ..errors import UserError
from ..identity import check_identity, speed_identity, weights_identity
from ..target import Target
from ..tree.budget import CostModel
from ..tree.calibration import Calibration
from .sampling import GREEDY_BELOW

T = TypeVar("T")
PROFILE, CALIBRATION = "profile.json", "calibration.json"  # beside the drafter's weights
PROFILE_REMEDY = "measure again with python -m infer.profile"
CALIBRATION_REMEDY = "fit again with python -m infer.calibrate"


@dataclass(frozen=True)
class Profile:
    """Seconds of every stage of a round, fitted to measurements on one machine with one pair of models."""

    made_on: dict[str, str]  # see `speed_identity`
    context_lengths: tuple[int, ...]
    draft_seconds: float
    build_seconds: tuple[float, ...]  # [1 + N] a tree of so many nodes, scored as the drafter allows
    greedy: tuple[tuple[float, ...], ...]  # [C, 1 + N] verification and commit at temperature 0
    sampled: tuple[tuple[float, ...], ...]  # [C, 1 + N] at positive temperatures, which draw at every node

    def __post_init__(self) -> None:
        for temperature in (0.0, 1.0):
            self.costs(temperature, with_build=True)  # raises for impossible figures

    @classmethod
    def read(cls, path: str) -> Profile:
        """Raises UserError for a file that is missing or no profile."""
        return _read(cls, path, "profile", PROFILE_REMEDY)

    def check(self, path: str, target: Target, draft: DraftModel) -> None:
        """Raises UserError, naming what differs, where the figures are of another machine, library or model."""
        check_identity(path, self.made_on, speed_identity(target, draft), PROFILE_REMEDY)

    def costs(self, temperature: float, *, with_build: bool) -> CostModel:
        """Costs of rounds at a temperature; published rules leave the building of the tree out."""
        verify = self.greedy if temperature < GREEDY_BELOW else self.sampled
        return CostModel(self.context_lengths, verify, self.draft_seconds, self.build_seconds if with_build else ())


@dataclass(frozen=True)
class FittedCalibration:
    """A calibration with the models it was fitted for."""

    made_on: dict[str, str]  # see `weights_identity`
    calibration: Calibration

    @classmethod
    def read(cls, path: str) -> FittedCalibration:
        """Raises UserError for a file that is missing or no calibration."""
        return _read(cls, path, "calibration", CALIBRATION_REMEDY)

    def check(self, path: str, target: Target, draft: DraftModel, candidate_width: int) -> None:
        """Raises UserError, naming what differs, where it was fitted for other weights or another normalisation."""
        now = weights_identity(target, draft) | {"candidate_width": str(candidate_width)}
        made = self.made_on | {"candidate_width": str(self.calibration.candidate_width)}
        check_identity(path, made, now, CALIBRATION_REMEDY)


def _read(kind: type[T], path: str, what: str, remedy: str) -> T:
    file = Path(path).expanduser()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no {what} {path}; {remedy}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the {what} {path}: {error}; {remedy}") from error
    if not isinstance(values, Mapping):
        raise UserError(f"{path} is no {what}: it holds no JSON object; {remedy}")
    try:
        return build(kind, values)
    except UserError as error:
        raise UserError(f"{path} is no {what} that this version reads: {error}; {remedy}") from error
