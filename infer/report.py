"""Tables with intervals, figures and one HTML page from the raw records of a benchmark; needs no model and no GPU.

python -m infer.report run=runs/bench
python -m infer.report run=runs/bench_paper_domino_4b paper=true
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dominotree.checked import at_least
from dominotree.command import Command, run_command
from dominotree.errors import UserError

USAGE = """python -m infer.report run=DIRECTORY KEY=VALUE...

Writes report.md, report.tex, CSV files, figures and index.html from the records that python -m infer.benchmark left in
a folder. The same records and seed give the same bytes."""


@dataclass(frozen=True)
class ReportConfig:
    """Everything `conf/report.yaml` holds."""

    run: str
    output: str | None
    paper: bool
    pairs: tuple[str, ...]
    resamples: int
    seed: int
    debug: bool

    def __post_init__(self) -> None:
        if not self.run:
            raise UserError("run= needs the folder of a benchmark, got none")
        at_least("resamples", self.resamples, 1)
        at_least("seed", self.seed, 0)


REPORT = Command(name="report", config=ReportConfig, usage=USAGE, free_text=("run", "output"), string_lists=("pairs",))


def report(config: ReportConfig) -> int:
    """Write the report, and return the exit code, 0."""
    # Imported here: a mistake in the settings, or --help, need not wait for what draws.
    from infer.page import write_page
    from infer.plots import draw_figures
    from infer.published import Published
    from infer.tables import (
        Run,
        cells_csv,
        difference_sheets,
        lossless_sheet,
        main_sheets,
        method_pairs,
        size_sheets,
        stage_sheet,
    )

    source = Path(config.run).expanduser()
    run = Run.read(source, resamples=config.resamples, seed=config.seed)
    published = Published(run.info)
    pairs = method_pairs(run, config.pairs)
    sheets = [
        *main_sheets(run, published, paper=config.paper),
        *difference_sheets(run, published, pairs, paper=config.paper),
        stage_sheet(run),
        *size_sheets(run),
        lossless_sheet(run),
    ]
    folder = source / "report" if config.output is None else Path(config.output).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    figures = draw_figures(run, folder)
    files = {
        "report.md": "\n".join(sheet.markdown() for sheet in sheets),
        "report.tex": "\n".join(sheet.latex() for sheet in sheets),
        "cells.csv": cells_csv(run),
        "index.html": write_page(run, sheets, figures, folder),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    print(folder / "index.html")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv`, by default the process's own; returns the exit code."""
    return run_command(REPORT, report, argv)


if __name__ == "__main__":
    sys.exit(main())
