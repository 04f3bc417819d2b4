"""Measure what rounds cost on this machine, for `method=caddtree`, `condadaptive` and `adaptive`.

python -m infer.profile draft=runs/smollm2/head/last
python -m infer.profile target=qwen3_4b draft=qwen3_4b output=profile.json context_lengths=[256,2048,8192]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dominotree.command import Command, run_command
from infer.measured_config import ProfileConfig

USAGE = """python -m infer.profile draft=DIRECTORY KEY=VALUE...

Times real rounds of this target and drafter by node count and context length, fits non-decreasing convex costs and
writes them beside the drafter. The figures hold for this machine only: leave it otherwise idle meanwhile."""

PROFILE = Command(name="profile", config=ProfileConfig, usage=USAGE, free_text=("output",), models=("target", "draft"))


def profile(config: ProfileConfig) -> int:
    # Imported here: a mistake in the settings, or --help, need not wait for torch.
    from data.models import quiet_libraries
    from infer.profiling import profile_and_write

    if not config.debug:
        quiet_libraries()
    profile_and_write(config)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv`, by default the process's own; returns the exit code."""
    return run_command(PROFILE, profile, argv)


if __name__ == "__main__":
    sys.exit(main())
