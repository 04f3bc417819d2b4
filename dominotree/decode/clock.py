"""Seconds spent in each stage of a round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageClock:
    """Times stages by the host's clock, or by a GPU's own: events in its queue, which make nobody wait.

    The GPU's time from a stage's first event to its last holds what it waited for the host in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            start = self._event()
            yield
            self._events.append((name, start, self._event()))
        else:
            began = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - began)

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call; waits for a GPU to finish the last stage."""
        for name, start, end in self._events:
            end.synchronize()
            self._add(name, start.elapsed_time(end) / 1e3)
        self._events = []
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
