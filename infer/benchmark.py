"""Measure every method on the same prompts in one run, and keep one raw record a generation.

python -m infer.benchmark output=runs/bench datasets=[gsm8k,humaneval] limit=20
python -m infer.benchmark output=runs/bench experiment=bench_smollm2 datasets=[questions.jsonl]
accelerate launch --config_file conf/accelerate/ddp.yaml -m infer.benchmark experiment=bench_paper_domino_4b
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dominotree.command import Command, run_command
from dominotree.errors import UserError
from infer.benchmark_config import BenchmarkConfig

USAGE = """python -m infer.benchmark output=DIRECTORY datasets=[NAME|FILE.jsonl,...] KEY=VALUE...

Runs methods x datasets x temperatures x budgets beside plain decoding and writes raw records, from which
python -m infer.report makes tables and figures. Stopped at any point, the same command goes on where it was."""

BENCHMARK = Command(
    name="benchmark",
    config=BenchmarkConfig,
    usage=USAGE,
    free_text=("output",),
    string_lists=("datasets",),
    models=("target", "draft"),
)


def benchmark(config: BenchmarkConfig) -> int:
    """Measure what is missing, and return the exit code: 1 where a method broke the lossless contract."""
    # Imported here: a mistake in the settings, or --help, need not wait for torch.
    import torch

    from data.models import quiet_libraries
    from infer.benchmark_run import BenchmarkRun

    if not config.debug:
        quiet_libraries()
    try:
        return BenchmarkRun(config).run()
    except torch.OutOfMemoryError as error:
        raise UserError(f"the device is out of memory: {str(error).splitlines()[0]}; try dtype=bfloat16") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv`, by default the process's own; returns the exit code."""
    return run_command(BENCHMARK, benchmark, argv)


if __name__ == "__main__":
    sys.exit(main())
