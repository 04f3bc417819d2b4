"""What one forward and backward pass of the objective costs: whole logits, checkpointed chunks, and in one pass.

python -m train.bench_objective
python -m train.bench_objective shapes=qwen3_4b output=objective.json

A measurement, not a test: compare figures of one run only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dominotree.checked import at_least, one_of
from dominotree.command import Command, run_command
from dominotree.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from train.cross_entropy import CrossEntropy

USAGE = """python -m train.bench_objective KEY=VALUE...

Times one forward and backward pass of the training objective and prints a table: whole logits, checkpointed chunks, and
the one pass that training uses."""

SHAPES = {  # H, V, R, default rows
    "tiny": (32, 512, 8, 64),
    "smollm2": (576, 49152, 128, 1024),
    "qwen3_4b": (2560, 151936, 256, 128),
}
LAMBDA = 0.4


@dataclass(frozen=True)
class BenchConfig:
    shapes: str
    rows: int | None
    logits_mib: int
    loss_kernel: str
    dtype: str
    device: str
    repeats: int
    output: str | None
    debug: bool

    def __post_init__(self) -> None:
        one_of("shapes", self.shapes, tuple(SHAPES))
        one_of("loss_kernel", self.loss_kernel, ("torch", "liger"))
        for name, value in (("logits_mib", self.logits_mib), ("repeats", self.repeats), ("rows", self.rows)):
            if value is not None:
                at_least(name, value, 1)


BENCH = Command(name="bench_objective", config=BenchConfig, usage=USAGE, free_text=("output",))


@dataclass(frozen=True)
class Case:
    """Random inputs of the objective."""

    hidden: Tensor  # [n, H]
    low_rank: Tensor  # [n, R]
    lm_weight: Tensor  # [V, H]
    rows: Tensor  # [V, R]
    labels: Tensor  # [n]
    weights: Tensor  # [n]
    cross_entropy: CrossEntropy  # of the one pass

    @property
    def learners(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, self.low_rank, self.rows) if tensor.requires_grad]


Variant = Callable[[Case, int], "Tensor"]  # the case and bytes of logits -> the loss


def make_case(config: BenchConfig, *, frozen: bool) -> Case:
    import torch

    from dominotree.dtypes import parse_device, parse_dtype
    from train.cross_entropy import make_cross_entropy

    hidden_size, vocab_size, rank, default_rows = SHAPES[config.shapes]
    count = config.rows or default_rows
    generator = torch.Generator().manual_seed(0)
    dtype, device = parse_dtype(config.dtype), parse_device(config.device)

    def normal(*shape: int, scale: float) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(device, dtype)

    case = Case(
        normal(count, hidden_size, scale=1.0),
        normal(count, rank, scale=0.3),
        normal(vocab_size, hidden_size, scale=0.1),
        normal(vocab_size, rank, scale=0.1),
        torch.randint(vocab_size, (count,), generator=generator).to(device),
        torch.rand(count, generator=generator).to(device),
        make_cross_entropy(config.loss_kernel, device),
    )
    case.hidden.requires_grad_(not frozen)
    case.low_rank.requires_grad_(True)
    case.rows.requires_grad_(True)
    return case


def chunk_loss(
    hidden: Tensor, low_rank: Tensor, lm_weight: Tensor, rows: Tensor, labels: Tensor, weights: Tensor
) -> Tensor:
    """The loss of some rows by torch's own cross-entropy over their logits."""
    from torch.nn.functional import cross_entropy, linear

    base = linear(hidden, lm_weight)
    final = base + linear(low_rank, rows)
    losses = [(cross_entropy(x.float(), labels, reduction="none") * weights).sum() for x in (final, base)]
    return (1 - LAMBDA) * losses[0] + LAMBDA * losses[1]


def whole_logits(case: Case, logits_bytes: int) -> Tensor:
    return chunk_loss(case.hidden, case.low_rank, case.lm_weight, case.rows, case.labels, case.weights)


def checkpointed_chunks(case: Case, logits_bytes: int) -> Tensor:
    """Chunks whose logits are formed again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    from train.objective import rows_in

    size = rows_in(logits_bytes, case.lm_weight, tensors=2)
    loss = case.weights.new_zeros(())
    for start in range(0, len(case.labels), size):
        part = slice(start, start + size)
        loss = loss + checkpoint(
            chunk_loss,
            case.hidden[part],
            case.low_rank[part],
            case.lm_weight,
            case.rows,
            case.labels[part],
            case.weights[part],
            use_reentrant=False,
        )
    return loss


def ours(case: Case, logits_bytes: int) -> Tensor:
    from train.objective import one_pass

    return one_pass(
        case.hidden,
        case.low_rank,
        case.lm_weight,
        case.rows,
        case.labels,
        case.weights,
        LAMBDA,
        sampled=len(case.labels) // 8,
        logits_bytes=logits_bytes,
        cross_entropy=case.cross_entropy,
    ).loss


VARIANTS: dict[str, Variant] = {
    "whole logits": whole_logits,
    "checkpointed chunks": checkpointed_chunks,
    "one pass": ours,
}


def run_once(variant: Variant, case: Case, logits_bytes: int) -> tuple[float, list[Tensor]]:
    """Seconds of one forward and backward pass, and its gradients."""
    import torch

    for tensor in case.learners:
        tensor.grad = None
    start = time.perf_counter()
    variant(case, logits_bytes).backward()
    if case.hidden.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, [tensor.grad for tensor in case.learners if tensor.grad is not None]


class PeakMemory:
    """The most memory that this process has held since `start`, in bytes: of the GPU, or what is resident."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type != "cuda" and not Path("/proc/self/clear_refs").exists():
            raise UserError(f"peak memory on {device.type} is read from /proc, which this system has not")

    def start(self) -> None:
        import torch

        gc.collect()
        _return_free_memory()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark down to the present
            self._before = _resident("VmRSS")

    def stop(self) -> int:
        import torch

        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return _resident("VmHWM") - self._before


def _return_free_memory() -> None:
    """What has been freed back to the system, where the C library can do that: reused, it would not count."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(config: BenchConfig, *, frozen: bool) -> list[dict[str, Any]]:
    """One record a variant. The variants take turns, so that a busy machine is busy for all of them."""
    case = make_case(config, frozen=frozen)
    logits_bytes = config.logits_mib << 20
    memory = PeakMemory(case.hidden.device)
    records: list[dict[str, Any]] = []
    expected: list[Tensor] = []
    for name, variant in VARIANTS.items():
        run_once(variant, case, logits_bytes)
        for tensor in case.learners:
            tensor.grad = None
        memory.start()
        _, gradients = run_once(variant, case, logits_bytes)
        peak, kept = memory.stop(), sum(gradient.nbytes for gradient in gradients)
        expected = expected or [gradient.clone() for gradient in gradients]
        off = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, expected, strict=True))
        records.append(
            {
                "variant": name,
                "backbone": "frozen" if frozen else "trained",
                "peak_mib": peak / 2**20,
                "beside_gradients_mib": (peak - kept) / 2**20,
                "gradient_difference": off,
                "seconds": [],
            }
        )
    for _ in range(config.repeats):
        for record, variant in zip(records, VARIANTS.values(), strict=True):
            record["seconds"].append(run_once(variant, case, logits_bytes)[0])
    for record in records:
        record["median_seconds"] = statistics.median(record["seconds"])
    for record in records:
        record["times_as_fast_as_checkpointed"] = records[1]["median_seconds"] / record["median_seconds"]
    return records


def bench(config: BenchConfig) -> int:
    """Measure, print and, where asked, write down; returns the exit code."""
    import torch
    from rich.console import Console
    from rich.table import Table

    records = [record for frozen in (False, True) for record in measure(config, frozen=frozen)]
    table = Table(
        "objective", "backbone", "seconds", "× checkpointed", "peak MiB", "beside gradients", "gradients off by"
    )
    for record in records:
        table.add_row(
            record["variant"],
            record["backbone"],
            f"{record['median_seconds']:.3f}",
            f"{record['times_as_fast_as_checkpointed']:.2f}",
            f"{record['peak_mib']:.0f}",
            f"{record['beside_gradients_mib']:.0f}",
            f"{record['gradient_difference']:.0e}",
        )
    console = Console(width=110)
    console.print(
        f"{config.shapes}, {config.rows or SHAPES[config.shapes][3]} rows, logits_mib={config.logits_mib}, "
        f"loss_kernel={config.loss_kernel}, "
        f"{config.dtype}, {torch.get_num_threads()} threads; median of {config.repeats}"
    )
    console.print(table)
    if config.output is not None:
        written = {"config": asdict(config), "threads": torch.get_num_threads(), "records": records}
        Path(config.output).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv`, by default the process's own; returns the exit code."""
    return run_command(BENCH, bench, argv)


if __name__ == "__main__":
    sys.exit(main())
