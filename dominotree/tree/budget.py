"""How many nodes to verify: the measured cost of a round against the tokens it can be expected to commit (CaDDTree).

Shapes: C measured context lengths, N the largest measured node count.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile

import numpy as np
from scipy.optimize import nnls

from ..errors import UserError

ROUNDING = 1e-12  # the rule divides where the bound multiplies


@dataclass(frozen=True)
class CostModel:
    """Seconds of a round by nodes to verify and committed tokens before them.

    Between measured context lengths costs are interpolated, outside they stay those of the nearest one. Beyond N nodes
    they go on along the last step.
    """

    context_lengths: tuple[int, ...]  # [C] ascending
    verify_seconds: tuple[tuple[float, ...], ...]  # [C, 1 + N] the root with 0, 1, … N nodes
    draft_seconds: float
    build_seconds: tuple[float, ...] = ()  # [1 + N] a tree of so many nodes; empty: not counted, as published

    def __post_init__(self) -> None:
        sizes = {len(row) for row in self.verify_seconds} | ({len(self.build_seconds)} - {0})
        if len(sizes) != 1 or min(sizes) < 2 or len(self.verify_seconds) != len(self.context_lengths):
            raise UserError(
                "a cost model has one row of verify_seconds for each context length, all of one length of at least 2, "
                f"got rows of {sorted(sizes)} for {len(self.context_lengths)} context lengths"
            )
        if list(self.context_lengths) != sorted(set(self.context_lengths)):
            raise UserError(f"a cost model's context lengths ascend, got {list(self.context_lengths)}")
        costs = np.array(
            [self.draft_seconds, *self.build_seconds, *(cost for row in self.verify_seconds for cost in row)]
        )
        if not np.all(np.isfinite(costs)) or costs.min() < 0 or min(row[0] for row in self.verify_seconds) <= 0:
            raise UserError("a cost model's seconds are finite and positive")

    def round_seconds(self, context_length: int, cap: int) -> list[float]:
        """Seconds of a round with 0, 1, … `cap` nodes behind `context_length` tokens."""
        return (self.draft_seconds + self._verify(context_length, cap) + _extended(self.build_seconds, cap)).tolist()

    def building_all(self, cap: int) -> CostModel:
        """The same where all `cap` nodes are built whatever is verified."""
        return replace(
            self, build_seconds=(float(_extended(self.build_seconds, cap)[-1]),) * len(self.verify_seconds[0])
        )

    def _verify(self, context_length: int, cap: int) -> np.ndarray:  # [1 + cap]
        after = bisect.bisect_right(self.context_lengths, context_length)
        if after in (0, len(self.context_lengths)):
            return _extended(self.verify_seconds[max(0, after - 1)], cap)
        before, behind = self.context_lengths[after - 1], self.context_lengths[after]
        share = (context_length - before) / (behind - before)
        rows = [_extended(self.verify_seconds[index], cap) for index in (after - 1, after)]
        return (1 - share) * rows[0] + share * rows[1]


class StoppingRule:
    """Takes nodes, likeliest first, as long as each raises the expected tokens a second (CaDDTree, greedy stop).

    A round commits one token of the target's own and each node with its chance of acceptance, so n nodes give
    (1 + Σ chances) / seconds[n]. Chances that never rise and convex costs make the first stop the best size of all.
    """

    def __init__(self, seconds: Sequence[float]) -> None:  # [1 + cap], see CostModel.round_seconds
        self._seconds = seconds
        self._tokens = 1.0
        self._size = 0
        rises = [after / before - 1 - ROUNDING for before, after in pairwise(seconds)]
        self._least_rise = list(accumulate(reversed(rises), min))[::-1]  # [cap] of this size and all larger ones

    def takes(self, log_chance: float) -> bool:
        """Whether the next node, accepted with a chance of exp(log_chance), is worth verifying; if so it is counted."""
        if self._size + 1 >= len(self._seconds):
            return False
        tokens = self._tokens + math.exp(log_chance)
        if tokens / self._seconds[self._size + 1] <= self._tokens / self._seconds[self._size]:
            return False
        self._tokens, self._size = tokens, self._size + 1
        return True

    def bound(self, log_chances: Sequence[float]) -> float:
        """A log chance below which no node will be taken, whatever else is found beside the nodes known so far.

        `log_chances` are those of known nodes, likeliest first. Another node can only move a node back in the order and
        add to the tokens expected before it, and a node at place n or later must be likelier than those tokens times
        the least rise of the cost from there on.
        """
        tokens, above = 1.0, 0.0
        for place, rise in enumerate(self._least_rise):
            log_chance = log_chances[place] if place < len(log_chances) else -math.inf
            if math.exp(log_chance) <= tokens * rise:
                return min(above, math.log(tokens * rise))
            tokens, above = tokens + math.exp(log_chance), log_chance
        return above  # all places are taken by nodes that may be worth it

    def size(self, log_chances: Iterable[float]) -> int:
        """How many nodes are taken of a tree in order of selection."""
        return sum(1 for _ in takewhile(self.takes, log_chances))


def fit_monotone_convex(node_counts: Sequence[int], seconds: Sequence[float], largest: int) -> tuple[float, ...]:
    """The non-negative, non-decreasing, convex curve closest to measurements in the least-squares sense, at 0…largest.

    Such a curve, piecewise linear between the measured counts, is a sum of a constant and of hinges that open at
    them, with no negative weight: a non-negative least-squares problem. It is linear outside the measurements.
    """
    counts = np.array(node_counts, dtype=float)
    knots = np.unique(counts)[:-1]
    weights, _ = nnls(_hinges(counts, knots), np.array(seconds, dtype=float))
    return tuple((_hinges(np.arange(largest + 1.0), knots) @ weights).tolist())


def _hinges(counts: np.ndarray, knots: np.ndarray) -> np.ndarray:  # [n], [k] -> [n, 1 + k]
    # The first hinge opens at 0, or counts below the first measured one would all cost the same.
    openings = np.concatenate([[0.0], knots[1:]])
    return np.concatenate([np.ones((len(counts), 1)), np.maximum(counts[:, None] - openings, 0)], axis=1)


def _extended(row: Sequence[float], cap: int) -> np.ndarray:  # [1 + N] -> [1 + cap]; nothing counts nothing
    if not row:
        return np.zeros(cap + 1)
    known = np.array(row[: cap + 1])
    beyond = np.arange(1, cap + 2 - len(known))
    return np.concatenate([known, row[-1] + beyond * (row[-1] - row[-2])])
