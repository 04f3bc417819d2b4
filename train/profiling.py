"""Where the time of training goes, and how much of the machine it uses."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .flops import Work

PARTS = ("data", "target", "backbone", "head", "lm_head", "optimizer", "other")


class Timeline:
    """One part of an update runs at any time; `switch` says which from now on.

    Inactive it does nothing. Active on a GPU it waits for the work of the part that ends, which costs a little.
    """

    def __init__(self, device: torch.device, *, active: bool) -> None:
        self.active = active
        self._device = device
        self._part = "other"
        self._since = perf_counter()
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def switch(self, part: str) -> None:
        if not self.active:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = perf_counter()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def switch_when_gradient_arrives(self, tensor: Tensor, part: str) -> None:
        """Switch in the backward pass, as soon as the gradient of `tensor` is whole."""
        if self.active and tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.switch(part))

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        self.switch(self._part)
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken


IDLE = Timeline(torch.device("cpu"), active=False)


class Profile:
    """Adds up updates; `add` gives the figures of one, `show` prints those of all but the first, which warms up."""

    def __init__(self, peak_flops: float) -> None:
        self._peak_flops = peak_flops
        self._totals: dict[str, float] = {}
        self._updates = 0

    def add(
        self, seconds: Mapping[str, float], work: Work, flops: Mapping[str, float], places: int, slots: int
    ) -> dict[str, float]:
        """What this process did in an update: seconds by part, samples a second, use of the machine, and how much of
        the `places` for tokens and the `slots` of blocks, padding included, was padding."""
        figures = {f"seconds/{part}": value for part, value in seconds.items()}
        sums = figures | {"samples": work.samples, "supervised": work.rows, "flops": sum(flops.values())}
        sums |= {"tokens": work.tokens, "places": places, "own_slots": work.slots, "slots": slots}
        self._updates += 1
        if self._updates > 1:
            self._totals = {name: self._totals.get(name, 0.0) + value for name, value in sums.items()}
        return {f"profile/{name}": value for name, value in (figures | self._rates(sums)).items()}

    def _rates(self, sums: Mapping[str, float]) -> dict[str, float]:
        whole = sum(value for name, value in sums.items() if name.startswith("seconds/"))
        return {
            "samples_per_second": sums["samples"] / whole,
            "supervised_tokens_per_second": sums["supervised"] / whole,
            "tflops": sums["flops"] / whole / 1e12,
            "flop_utilisation": sums["flops"] / whole / self._peak_flops,
            "padding": 1 - sums["tokens"] / sums["places"],
            "block_padding": 1 - sums["own_slots"] / sums["slots"],
        }

    def show(self, peak_memory_gib: float) -> None:
        """A table on standard error."""
        if not self._totals:
            return
        count, rates = self._updates - 1, self._rates(self._totals)
        whole = sum(self._totals[f"seconds/{part}"] for part in PARTS)
        table = Table("part", "ms an update", "share", title=f"mean of {count} updates")
        for part in PARTS:
            seconds = self._totals[f"seconds/{part}"]
            table.add_row(part, f"{1e3 * seconds / count:.1f}", f"{seconds / whole:.1%}")
        console = Console(stderr=True)
        console.print(table)
        console.print(
            f"{rates['supervised_tokens_per_second']:.0f} supervised tokens/s, {rates['samples_per_second']:.1f} "
            f"samples/s, {rates['tflops']:.3f} TFLOP/s, {rates['flop_utilisation']:.1%} of what one large product "
            f"reaches here ({self._peak_flops / 1e12:.3f}), {rates['padding']:.1%} of the tokens and "
            f"{rates['block_padding']:.1%} of the blocks padding, peak memory {peak_memory_gib:.2f} GiB",
            soft_wrap=True,
            highlight=False,
        )


def product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in one large matrix product on this device, the best of several: the measure of the rest."""
    size = 8192 if device.type == "cuda" else 1024
    left = torch.ones(size, size, device=device, dtype=dtype)
    timeline = Timeline(device, active=True)
    best = float("inf")
    for _ in range(6):
        timeline.take()
        left @ left
        best = min(best, sum(timeline.take().values()))
    return 2 * size**3 / best
