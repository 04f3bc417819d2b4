"""Teacher-forced figures of an update. Real acceptance is measured by decoding, in `validation`."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .objective import Objective

MEASURES = ("loss", "weight", "right", "tokens", "run", "blocks")  # of the final and of the base logits
NAMES = (*(f"{logits}_{name}" for logits in ("final", "base") for name in MEASURES), "tokens")


@dataclass
class StepSums:
    """Sums over micro-batches, kept on the device; `tensor` and `from_tensor` let processes add theirs up."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, output: Objective, weights: Tensor) -> None:  # weights [B, A, K]
        new = (
            *_measures(output.final_loss, output.final_right, output.final_measured, weights),
            *_measures(output.base_loss, output.base_right, output.base_measured, weights),
            (weights > 0).sum(),
        )
        for name, value in zip(NAMES, new, strict=True):
            self.values[name] = self.values.get(name, torch.zeros((), device=weights.device)) + value.detach().float()

    def tensor(self) -> Tensor:  # [len(NAMES)]
        return torch.stack([self.values[name] for name in NAMES])


def _measures(loss: Tensor, right: Tensor, measured: Tensor, weights: Tensor) -> tuple[Tensor, ...]:  # [B, A, K] each
    blocks = measured.any(dim=-1)
    # Right drafts before the first wrong one; a slot without a label ends the run.
    run = right.long().cumprod(dim=-1).sum(dim=-1)
    return loss, (weights * measured).sum(), right.sum(), measured.sum(), (run * blocks).sum(), blocks.sum()


def teacher_forced(sums: Tensor, lambda_base: float) -> dict[str, float]:  # [len(NAMES)]
    """Losses, accuracies and teacher-forced accepted lengths (bonus included) from summed figures; those of logits
    without a part in training from a sample of the blocks."""
    total = dict(zip(NAMES, sums.tolist(), strict=True))

    def mean(name: str, per: str) -> float:
        return total[name] / max(total[per], 1e-6)

    final_loss, base_loss = mean("final_loss", "final_weight"), mean("base_loss", "base_weight")
    return {
        "loss": (1 - lambda_base) * final_loss + lambda_base * base_loss,
        "final_loss": final_loss,
        "base_loss": base_loss,
        "accuracy": mean("final_right", "final_tokens"),
        "base_accuracy": mean("base_right", "base_tokens"),
        "teacher_forced_length": 1 + mean("final_run", "final_blocks"),
        "base_teacher_forced_length": 1 + mean("base_run", "base_blocks"),
        "supervised_tokens": total["tokens"],
    }


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far: of the GPU where training runs on one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
