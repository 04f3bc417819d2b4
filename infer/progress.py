"""How far a benchmark is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from types import TracebackType

from data.progress import progress_bar
from infer.measurements import Measurement

LINE_EVERY = 30.0  # seconds


class Progress:
    """Counts generations, `done` of them before; the time left supposes that they go on as before. One of several
    `processes` counts its own share."""

    def __init__(self, total: int, done: int, *, shown: bool, processes: int = 1) -> None:
        self._what = "generations" if processes == 1 else f"generations of the first of {processes} processes"
        self._total, self._done, self._before = total, done, done
        self._bar = shown and sys.stderr.isatty()
        self._lines = shown and not self._bar
        self._started = self._last_line = time.monotonic()
        self._stack = ExitStack()

    def __enter__(self) -> Progress:
        if self._bar:
            self._advance = self._stack.enter_context(progress_bar(self._what, self._total, done=self._done))
        elif self._lines and self._before:
            self._print(f"{self._done} of {self._total} {self._what} are there already")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def step(self, measurement: Measurement) -> None:
        self._done += 1
        key = measurement.key
        speed = 1 / measurement.seconds_per_token if measurement.seconds_per_token else 0.0
        note = f"{key.dataset} T={key.temperature:g} {key.method}: {speed:.1f} tokens/s"
        if self._bar:
            self._advance(1, note)
        now = time.monotonic()
        if self._lines and (now - self._last_line >= LINE_EVERY or self._done == self._total):
            self._last_line = now
            elapsed = now - self._started
            left = elapsed / (self._done - self._before) * (self._total - self._done)
            self._print(
                f"{self._done}/{self._total} {self._what}, {_clock(elapsed)} so far, {_clock(left)} left; {note}"
            )

    @staticmethod
    def _print(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
