"""Make a data directory: conversations in the target's own words, and its features where they are asked for.

python -m data.prepare output=runs/smollm2-data count=6000
python -m data.prepare output=runs/qwen3-data target=qwen3_4b data=perfectblend features=int8
python -m data.prepare output=runs/own-data data.path=prompts.jsonl data=custom
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from data.config import PrepareConfig
from dominotree.command import Command, run_command
from dominotree.errors import UserError

USAGE = """python -m data.prepare output=DIRECTORY KEY=VALUE...

Writes conversations for training: prompts of a data set, a benchmark or the target itself, answered by the target.
Killed at any point, the same command goes on where it was; a larger count= adds to what is there."""

PREPARE = Command(
    name="prepare",
    config=PrepareConfig,
    usage=USAGE,
    free_text=("output",),
    string_lists=("data.openers",),
    models=("target", "data"),
)


def prepare(config: PrepareConfig) -> int:
    """Write what is missing of the data directory, and return the exit code."""
    # Imported here: a mistake in the settings, or --help, need not wait for torch.
    import torch

    from data.models import quiet_libraries
    from data.preparation import Preparation

    if not config.debug:
        quiet_libraries()
    try:
        return Preparation(config).run()
    except torch.OutOfMemoryError as error:
        raise UserError(f"the device is out of memory: {str(error).splitlines()[0]}; lower batch_size") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv`, by default the process's own; returns the exit code."""
    return run_command(PREPARE, prepare, argv)


if __name__ == "__main__":
    sys.exit(main())
