"""The processes that `accelerate launch` started, or the one there is, and what each of them takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from dominotree.dtypes import parse_device
from dominotree.errors import UserError

PATIENCE = timedelta(days=30)  # how long a process waits for the slowest of the others


@dataclass(frozen=True)
class Processes:
    """This process's place among `count`, its device, and what makes it wait until all have come as far."""

    index: int
    count: int
    device: str
    wait: Callable[[], None]

    @property
    def is_main(self) -> bool:
        return self.index == 0


def find_processes(device: str) -> Processes:
    """Raises UserError for a device that several processes cannot share out, and where they do not find each other."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    parsed = parse_device(device)
    if launched == 1:
        return Processes(0, 1, device, lambda: None)
    if parsed.index is not None:
        raise UserError(f"{launched} processes were launched, got device={device}; choose GPUs by CUDA_VISIBLE_DEVICES")
    from accelerate import PartialState

    state = PartialState(cpu=parsed.type == "cpu", timeout=PATIENCE)
    if state.num_processes != launched:
        raise UserError(
            f"{launched} processes were launched, but accelerate sees {state.num_processes}; launch them with "
            "accelerate launch --multi_gpu, or --cpu on CPUs"
        )
    return Processes(state.process_index, launched, str(state.device), state.wait_for_everyone)


def share_out(loads: Iterable[int], count: int) -> list[int]:
    """Which of `count` processes takes each piece of work, in order: the one that has least to do so far."""
    given = [0] * count
    takers = []
    for load in loads:
        taker = given.index(min(given))
        given[taker] += load
        takers.append(taker)
    return takers
