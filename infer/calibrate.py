"""Fit the chance that the target accepts a draft node, for `method=adaptive`, and say why the raw one is off.

python -m infer.calibrate draft=runs/smollm2/head/last prompts=held_out.jsonl
python -m infer.calibrate draft=runs/smollm2/head/last prompts=runs/smollm2/held-out-data temperatures=[0.0,0.7,1.0]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dominotree.command import Command, run_command
from infer.measured_config import CalibrateConfig

USAGE = """python -m infer.calibrate draft=DIRECTORY prompts=FILE.jsonl KEY=VALUE...

Decodes prompts, logs which draft nodes the target accepts, and writes a calibration beside the drafter, with a report
(calibration_report.json) and reliability diagrams (calibration.png)."""

CALIBRATE = Command(
    name="calibrate",
    config=CalibrateConfig,
    usage=USAGE,
    free_text=("prompts", "output", "profile"),
    models=("target", "draft"),
)


def calibrate(config: CalibrateConfig) -> int:
    # Imported here: a mistake in the settings, or --help, need not wait for torch.
    from data.models import quiet_libraries
    from infer.calibrating import calibrate_and_write

    if not config.debug:
        quiet_libraries()
    calibrate_and_write(config)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv`, by default the process's own; returns the exit code."""
    return run_command(CALIBRATE, calibrate, argv)


if __name__ == "__main__":
    sys.exit(main())
