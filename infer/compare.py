"""A method beside plain decoding on the same prompt: both speeds, and whether the tokens are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from dominotree.decode.generation import Generation
from dominotree.target import Target

NEAR_TIE_STEPS = 8  # of the number format, at the logits' size
HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Comparison:
    """Plain decoding and a method after one prompt. Tokens are compared for greedy decoding only."""

    plain: Generation
    method: Generation
    greedy: bool
    half_precision: bool
    differing: int  # positions whose tokens differ
    first_difference: int | None  # index of the first of them
    logit_gap: float | None  # how far apart the target's logits of the two tokens are at that place
    near_tie: bool | None  # whether that gap is within a few steps of the target's number format

    @property
    def identical(self) -> bool | None:
        """None where tokens were sampled: two samples differ though their distribution is the same."""
        return self.first_difference is None if self.greedy else None

    @property
    def speedup(self) -> float | None:
        """Tokens/s over plain decoding's; None where one of them made too few tokens to tell."""
        if not self.plain.tokens_per_second or not self.method.tokens_per_second:
            return None
        return self.method.tokens_per_second / self.plain.tokens_per_second

    def lines(self) -> list[str]:
        return [self._speed_line(), self._token_line()]

    def record(self) -> dict[str, Any]:
        return {
            "plain_tokens_per_second": self.plain.tokens_per_second,
            "speedup": self.speedup,
            "identical": self.identical,
            "differing_tokens": self.differing if self.greedy else None,
            "first_difference": self.first_difference if self.greedy else None,
            "logit_gap": self.logit_gap,
            "near_tie": self.near_tie,
        }

    def _speed_line(self) -> str:
        name, speedup = self.method.method, self.speedup
        speeds = (
            f"plain decoding {self.plain.tokens_per_second:.1f} tokens/s, "
            f"{name} {self.method.tokens_per_second:.1f} tokens/s"
        )
        if speedup is None:
            return f"compare: {speeds}: too few tokens to tell the speeds apart"
        if speedup >= 1:
            return f"compare: {speeds}: {speedup:.2f} times as fast"
        costs = _seconds_per_round(self.method) / _seconds_per_round(self.plain)
        return (
            f"compare: {speeds}: {speedup:.2f} times as fast, so slower here: a round costs {costs:.2f} times a plain "
            f"step and commits τ {self.method.acceptance_length:.2f} tokens"
        )

    def _token_line(self) -> str:
        count = len(self.method.token_ids)
        if not self.greedy:
            return "compare: sampled tokens are not compared: the two draws differ, their distribution is the same"
        if self.first_difference is None:
            return f"compare: tokens identical ({count} of {count})"
        line = (
            f"compare: tokens DIFFER from token {self.first_difference + 1} on, at {self.differing} of "
            f"{max(count, len(self.plain.token_ids))} positions"
        )
        if self.logit_gap is None:
            return line
        line += f"; there the target's logits of the two are {self.logit_gap:.4g} apart, "
        if not self.half_precision:
            return line + "which is a fault in float32: please report it"
        near = "a near-tie, which half precision flips"
        return line + (near if self.near_tie else "more than half precision explains")


def compare(
    target: Target, prompt_ids: Sequence[int], plain: Generation, method: Generation, *, greedy: bool
) -> Comparison:
    """Set two generations after `prompt_ids` side by side; one more target forward where their tokens differ."""
    pairs = list(zip_longest(plain.token_ids, method.token_ids))
    places = [index for index, (left, right) in enumerate(pairs) if left != right]
    gap = near_tie = None
    if greedy and places and None not in pairs[places[0]]:
        left, right = pairs[places[0]]
        logits = target.logits_at([*prompt_ids, *plain.token_ids[: places[0]]])
        gap = float((logits[left] - logits[right]).abs())
        steps = NEAR_TIE_STEPS * torch.finfo(target.dtype).eps
        near_tie = gap <= steps * max(1.0, float(logits[left].abs()))
    return Comparison(
        plain=plain,
        method=method,
        greedy=greedy,
        half_precision=target.dtype in HALF_PRECISION,
        differing=len(places),
        first_difference=places[0] if places else None,
        logit_gap=gap,
        near_tie=near_tie,
    )


def _seconds_per_round(generation: Generation) -> float:
    return (generation.seconds["total"] - generation.seconds["prefill"]) / max(1, len(generation.accepted_lengths))
