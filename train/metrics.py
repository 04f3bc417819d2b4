"""Teacher-forced figures of an update. Real acceptance is measured by decoding, in `validation`."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .objective import Objective

NAMES = ("final_loss", "base_loss", "weight", "final_right", "base_right", "tokens", "final_run", "base_run", "blocks")


@dataclass
class StepSums:
    """Sums over micro-batches, kept on the device; `tensor` and `from_tensor` let processes add theirs up."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, output: Objective, weights: Tensor) -> None:  # weights [B, A, K]
        counts = weights > 0
        blocks = counts.any(dim=-1)
        # Right drafts before the first wrong one; a slot without a label ends the run.
        final_run = (output.final_right & counts).long().cumprod(dim=-1).sum(dim=-1)
        base_run = (output.base_right & counts).long().cumprod(dim=-1).sum(dim=-1)
        new = (
            output.final_loss,
            output.base_loss,
            weights.sum(),
            (output.final_right & counts).sum(),
            (output.base_right & counts).sum(),
            counts.sum(),
            (final_run * blocks).sum(),
            (base_run * blocks).sum(),
            blocks.sum(),
        )
        for name, value in zip(NAMES, new, strict=True):
            self.values[name] = self.values.get(name, torch.zeros((), device=weights.device)) + value.detach().float()

    def tensor(self) -> Tensor:  # [len(NAMES)]
        return torch.stack([self.values[name] for name in NAMES])


def teacher_forced(sums: Tensor, lambda_base: float) -> dict[str, float]:  # [len(NAMES)]
    """Losses, accuracies and teacher-forced accepted lengths (bonus included) from summed figures."""
    total = dict(zip(NAMES, sums.tolist(), strict=True))
    weight, tokens, blocks = (max(total[name], 1e-6) for name in ("weight", "tokens", "blocks"))
    final_loss, base_loss = total["final_loss"] / weight, total["base_loss"] / weight
    return {
        "loss": (1 - lambda_base) * final_loss + lambda_base * base_loss,
        "final_loss": final_loss,
        "base_loss": base_loss,
        "accuracy": total["final_right"] / tokens,
        "base_accuracy": total["base_right"] / tokens,
        "teacher_forced_length": 1 + total["final_run"] / blocks,
        "base_teacher_forced_length": 1 + total["base_run"] / blocks,
        "supervised_tokens": total["tokens"],
    }


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far: of the GPU where training runs on one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
