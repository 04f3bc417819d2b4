"""Choosing tokens from the target's logits. Shapes: B batch, Q positions, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..errors import UserError
from ..tree.topk import ordered_argmax

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in the published code; dividing by them would overflow


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. `top_k` 0 and `top_p` 1 keep the whole vocabulary; `seed` starts the generator.

    Raises UserError for values outside their range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), int | float):
                raise UserError(f"{name} must be a number, got {getattr(self, name)!r}")
        for name in ("top_k", "seed"):
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie above 0 and be at most 1 (off), got {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed must lie in 0..2**64-1, got {self.seed}")


class TokenPicker:
    """The target's choice at every position: its argmax, or one draw from its own distribution.

    Temperature, top-k and top-p shape the target's logits before the draw, in that order, as in transformers.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._greedy = sampling.temperature < GREEDY_BELOW
        self._generator = torch.Generator(device).manual_seed(sampling.seed)
        self._no_tokens = torch.empty(0, dtype=torch.int64)  # these warpers do not look at the tokens so far
        self._warpers: list[LogitsProcessor] = []
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def pick(self, logits: Tensor) -> Tensor:  # [B, Q, V] -> [B, Q]
        if self._greedy:
            return ordered_argmax(logits)
        scores = logits.flatten(0, 1).float()
        for warper in self._warpers:
            scores = warper(self._no_tokens, scores)
        draws = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator)
        return draws.view(logits.shape[:2])
