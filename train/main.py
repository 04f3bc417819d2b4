"""Train a drafter: the Domino head on a given backbone, both together, or a DFlash backbone.

accelerate launch train/main.py data_dir=runs/data draft=runs/backbone/last
accelerate launch --config_file conf/accelerate/ddp.yaml train/main.py experiment=qwen3_8b_domino data_dir=…
python -m train.main stage=dflash backbone=trained draft=fresh data_dir=runs/data
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dominotree.command import Command, run_command
from dominotree.errors import UserError
from train.config import TrainConfig

USAGE = """accelerate launch train/main.py KEY=VALUE...

Trains a drafter on a data directory written by python -m data.prepare. What it writes, python -m infer.generate
reads."""

TRAIN = Command(
    name="train",
    config=TrainConfig,
    usage=USAGE,
    free_text=("data_dir", "output", "tracking.name", "tracking.project"),
    models=("target", "draft"),
)


def train(config: TrainConfig) -> int:
    """Assemble the run and carry it out; returns the exit code."""
    # Shapes change from update to update, and oneDNN would keep what it compiled for 1,024 of them: gigabytes, on CPUs.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    # Imported here: a mistake in the settings, or --help, need not wait for torch.
    from data.models import quiet_libraries
    from train.assemble import assemble
    from train.setup import another_ended

    if not config.debug:
        quiet_libraries()
    trainer, tracker = assemble(config, Path(config.output))
    done = False
    try:
        trainer.run()
        done = True
    except RuntimeError as error:
        if not another_ended(error):
            raise
        raise UserError(
            "another process of this run has ended; the same command goes on from the last checkpoint"
        ) from error
    finally:
        tracker.close(failed=not done)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv`, by default the process's own; returns the exit code."""
    return run_command(TRAIN, train, argv)


def leave(code: int) -> None:
    """End this process. One of several leaves at once: threads of the process group can abort an orderly shutdown of
    the interpreter, after all work is done, and the launch would fail."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
