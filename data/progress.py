"""Progress bars on standard error, drawn only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(label: str, total: int, *, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """A bar over `total` things, `done` of them before; call what it yields with those done now and a short note."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task(label, total=total, completed=done, note="")
        yield lambda advance, note: bars.update(task, advance=advance, note=note)
