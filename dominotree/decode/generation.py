"""What a generation yields round by round, and what it adds up to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Round:
    """Tokens committed at once. The first round is the prefill: one token, no accepted length."""

    token_ids: list[int]
    accepted_length: int | None  # tokens committed by a draft-verify round, bonus included, after any cut at the end
    seconds: dict[str, float]  # by stage: prefill, or draft, build, verify, commit
    finish_reason: str | None  # "stop", "length", or None while it goes on
    tree_size: int | None = None  # drafted nodes that a draft-verify round verified


@dataclass
class Generation:
    """The sum of the rounds so far; `finish_reason` is None while it is unfinished."""

    method: str
    token_ids: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    tree_sizes: list[int] = field(default_factory=list)  # beside the accepted lengths
    finish_reason: str | None = None
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefill", "draft", "build", "verify", "commit", "total"), 0.0)
    )
    text: str = ""

    def add(self, round_: Round) -> None:
        self.token_ids += round_.token_ids
        if round_.accepted_length is not None:
            self.accepted_lengths.append(round_.accepted_length)
        if round_.tree_size is not None:
            self.tree_sizes.append(round_.tree_size)
        for stage, spent in round_.seconds.items():
            self.seconds[stage] += spent
            self.seconds["total"] += spent
        self.finish_reason = round_.finish_reason

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed a round, bonus included (τ); 0 when there was no round after the prefill."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) if self.accepted_lengths else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first, over the time after the prefill."""
        decoding = self.seconds["total"] - self.seconds["prefill"]
        return (len(self.token_ids) - 1) / decoding if decoding > 0 else 0.0
