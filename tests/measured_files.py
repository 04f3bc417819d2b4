"""Made-up measurements for a pair of models, in the files that the adaptive methods read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from dominotree.decode.measured import FittedCalibration, Profile
from dominotree.decode.methods import Method, make_method
from dominotree.draft.model import DraftModel
from dominotree.identity import speed_identity, weights_identity
from dominotree.target import Target
from dominotree.tree.calibration import Calibration, StepCalibration

ADAPTIVE = ("caddtree", "condadaptive", "adaptive")
CAP = 12
SHY, BOLD = StepCalibration(1.0, (-3.0,)), StepCalibration(1.0, (2.0,))  # at temperatures 0 and 1


@dataclasses.dataclass(frozen=True)
class Measured:
    """A pair of models and the folder of its files."""

    target: Target
    draft: DraftModel
    folder: Path

    def method(self, name: str, **options: Any) -> Method:
        files = {"profile": "profile.json"} | ({"calibration": "calibration.json"} if name == "adaptive" else {})
        return make_method(name, cap=CAP, **{key: str(self.folder / file) for key, file in files.items()}, **options)

    def checked(self, name: str, **options: Any) -> Method:
        method = self.method(name, **options)
        method.check(self.target, self.draft)
        return method

    def change(self, file: str, **values: Any) -> None:
        stored = json.loads((self.folder / file).read_text())
        (self.folder / file).write_text(json.dumps(stored | values))


def write_measured(target: Target, draft: DraftModel, folder: Path) -> Measured:
    """Costs that rise by a tenth of a round's a node, three times as fast behind a long context."""
    rows = (tuple(0.1 + 0.01 * n for n in range(9)), tuple(0.1 + 0.03 * n for n in range(9)))
    profile = Profile(speed_identity(target, draft), (10, 1000), 0.02, (0.0,) * 9, rows, rows)
    calibration = FittedCalibration(weights_identity(target, draft), Calibration(64, (0.0, 1.0), (SHY, BOLD)))
    for name, value in (("profile", profile), ("calibration", calibration)):
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(value)))
    return Measured(target, draft, folder)
