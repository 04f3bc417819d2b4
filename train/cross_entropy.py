"""Cross-entropies of logits whose gradient takes the logits' place: in plain torch, or by a fused kernel.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dominotree.errors import UserError


class CrossEntropy(ABC):
    @abstractmethod
    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """What it needs beside every logit of this kind."""

    @abstractmethod
    def into_gradient(
        self,
        logits: Tensor,  # [n, V], overwritten with the gradient of the cross-entropy
        labels: Tensor,  # [n]
        scratch: Tensor | None,  # [n, V] float32, where `scratch_bytes` asks for it
    ) -> tuple[Tensor, Tensor]:  # [n] float32, [n] bool
        """Cross-entropies, and whether the label's logit is the largest."""


class TorchCrossEntropy(CrossEntropy):
    """On any device; half precision goes through a float32 copy. A tie with the largest logit counts as right."""

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        return 0 if dtype.itemsize >= 4 else 4

    def into_gradient(self, logits: Tensor, labels: Tensor, scratch: Tensor | None) -> tuple[Tensor, Tensor]:
        place = labels[:, None]
        largest = logits.amax(dim=-1, keepdim=True)
        own = logits.gather(1, place)
        # The softmax goes row by row, so that it may write where it reads.
        wide = logits if scratch is None else scratch
        torch.softmax(logits, dim=-1, dtype=wide.dtype, out=wide)
        # The largest probability is at least 1/V: its logarithm is exact where that of the label's may have underflown.
        normaliser = largest.to(wide.dtype) - wide.amax(dim=-1, keepdim=True).log()
        losses = normaliser - own.to(wide.dtype)
        wide.scatter_(1, place, torch.expm1(-losses))  # probability - 1, with all of its digits
        if scratch is not None:
            logits.copy_(scratch)
        return losses[:, 0].float(), (own == largest)[:, 0]


class LigerCrossEntropy(CrossEntropy):
    """One Triton kernel of liger-kernel a chunk, on a GPU: logits are read twice and written once. Each loss is rounded
    to the logits' number format, gradients are as torch's; in a tie the first of the largest logits counts."""

    def __init__(self) -> None:
        try:
            from liger_kernel.ops.cross_entropy import cross_entropy_forward
        except ImportError as error:
            raise UserError(
                f"loss_kernel=liger needs the liger-kernel package ({error}): pip install -e '.[kernels]'"
            ) from error
        self._forward = cross_entropy_forward

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        return 0

    def into_gradient(self, logits: Tensor, labels: Tensor, scratch: Tensor | None) -> tuple[Tensor, Tensor]:
        in_place = logits.detach().requires_grad_()  # without which it forms no gradient
        losses, _, right, *_ = self._forward(
            in_place,
            labels,
            weight=None,
            ignore_index=-100,
            lse_square_scale=0.0,
            label_smoothing=0.0,
            reduction="none",
            softcap=None,
            return_z_loss=False,
            return_token_accuracy=True,
        )
        return losses.float(), right.bool()


def make_cross_entropy(kernel: str, device: torch.device) -> CrossEntropy:
    """By name, torch or liger. Raises UserError where the kernel cannot run."""
    if kernel == "torch":
        return TorchCrossEntropy()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own way to run on a CPU, for tests
    if device.type != "cuda" and not interpreted:
        raise UserError(f"loss_kernel=liger runs on GPUs, got {device.type}; say loss_kernel=torch")
    return LigerCrossEntropy()
