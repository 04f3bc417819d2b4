"""Everything that changes over training, as functions of the number of optimizer updates done so far."""

from __future__ import annotations

import math


def lambda_base(update: int, total_updates: int, *, start: float, decay_ratio: float) -> float:
    """Weight of the base loss in update number `update` (the first is 1): linear from `start` to 0 over the first
    `decay_ratio` of training (Domino, section 4)."""
    decay_updates = max(1, int(total_updates * decay_ratio))
    return min(1.0, max(0.0, start * (1 - min(update / decay_updates, 1.0))))


def learning_rate_factor(update: int, total_updates: int, *, schedule: str, warmup_ratio: float) -> float:
    """Factor on the peak learning rate in update number `update` (the first is 1): linear warm-up, then a half cosine
    or a line towards 0, or constant."""
    warmup = max(1, int(total_updates * warmup_ratio)) if warmup_ratio else 0
    if update <= warmup:
        return update / warmup
    # Of the updates done before this one, so that the last one still learns.
    progress = (update - 1 - warmup) / max(1, total_updates - warmup)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if schedule == "linear":
        return max(0.0, 1 - progress)
    return 1.0
