"""Seconds spent in each stage of a round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageClock:
    """Times stages by the host's clock. A GPU is waited for at both ends, so that its work counts in its own stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
