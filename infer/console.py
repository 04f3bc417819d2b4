"""What the screen shows: the answers on standard output, everything else on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dominotree.errors import UserError

HEADING_WIDTH = 72


class Console:
    """Bars are drawn only where standard error is a terminal."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another
        self._bars = sys.stderr.isatty()

    def write(self, text: str) -> None:
        """Text of an answer, at once."""
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def note(self, line: str) -> None:
        """One line beside the answer."""
        print(line, file=sys.stderr, flush=True)

    def ask(self) -> str | None:
        """The next line typed by the user, None at the end of the input. UserError where it is not text."""
        sys.stderr.write("> ")
        sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not {error.encoding} text: {error.reason}") from error
        return line.removesuffix("\n") if line else None

    def heading(self, number: int, total: int, text: str) -> None:
        """What sets one answer apart from the one before it, where there are several."""
        first = " ".join(text.split())
        short = first if len(first) <= HEADING_WIDTH else first[: HEADING_WIDTH - 1] + "…"
        self.write(f"{'' if number == 1 else chr(10)}[{number}/{total}] {short}\n")

    @contextmanager
    def loading(self) -> Iterator[Callable[[str], None]]:
        """A bar that names what is being loaded; call what it yields with each step."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with self._progress(*columns) as progress:
            task = progress.add_task("loading", total=None)
            yield lambda description: progress.update(task, description=description, refresh=True)

    @contextmanager
    def counting(self, total: int) -> Iterator[Callable[[], None]]:
        """A bar over several prompts; call what it yields after each.

        Where the answers stream to a terminal too, a moving bar would be torn apart: there it is a line after each.
        """
        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = self._progress(*columns, disable=total < 2)
        task = progress.add_task("prompts", total=total)
        if not sys.stdout.isatty():
            with progress:
                yield lambda: progress.advance(task)
            return

        def advance_and_print() -> None:
            progress.advance(task)
            if not progress.disable:
                progress.console.print(progress.get_renderable())

        yield advance_and_print

    def _progress(self, *columns: object, disable: bool = False) -> Progress:
        # Redirecting would hold back an answer until its line is complete.
        return Progress(
            *columns,  # type: ignore[arg-type]
            console=rich.console.Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            disable=disable or not self._bars,
        )
