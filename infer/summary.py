"""What an answer cost, in lines for people."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from dominotree.decode.generation import Generation
from infer.answer import Answer

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

GIB = 2**30


def describe(answer: Answer, device: torch.device) -> str:
    """Method, τ, rounds, tokens, speed, time to first token and peak memory of one answer, in one line."""
    generation = answer.generation
    first = answer.first_token_seconds
    parts = [
        f"{generation.method}: τ {generation.acceptance_length:.2f} over {len(generation.accepted_lengths)} rounds",
        f"{len(generation.token_ids)} tokens ({generation.finish_reason})",
        f"{generation.tokens_per_second:.1f} tokens/s",
        f"first token after {first:.2f} s" if first is not None else "no token",
        describe_memory(device),
    ]
    return ", ".join(parts)


def describe_memory(device: torch.device) -> str:
    """Peak memory of this process so far, on the host and on the GPU where one is used."""
    host = peak_memory_bytes()
    parts = [] if host is None else [f"{host / GIB:.2f} GiB"]
    if device.type == "cuda":
        parts.append(f"{torch.cuda.max_memory_allocated(device) / GIB:.2f} GiB on the GPU")
    return f"peak memory {' and '.join(parts) or 'not known'}"


def peak_memory_bytes() -> int | None:
    """The most memory this process has held so far, None where the system does not say."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass
class Total:
    """Several generations of one method, added up."""

    tokens: int = 0  # without the first of each, which the prefill gives
    seconds: float = 0.0  # without the prefills
    rounds: int = 0
    committed: int = 0  # tokens committed by the rounds

    def add(self, generation: Generation) -> None:
        self.tokens += max(0, len(generation.token_ids) - 1)
        self.seconds += generation.seconds["total"] - generation.seconds["prefill"]
        self.rounds += len(generation.accepted_lengths)
        self.committed += sum(generation.accepted_lengths)

    @property
    def acceptance_length(self) -> float:
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0
