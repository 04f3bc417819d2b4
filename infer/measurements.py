"""Raw records of a benchmark: one JSON line a generation, and one JSON file that says how they were made.

A record's token ids are left out where they are those of plain decoding after the same prompt: at temperature 0, where
nothing is lost, they are stored once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dominotree.errors import UserError

RUN_FILE = "run.json"
RECORDS = "records*.jsonl"  # the first process writes records.jsonl, the n-th of several records-n.jsonl
STAGES = ("prefill", "draft", "build", "verify", "commit", "other")  # other: the loop's own time between the stages
DIGITS = 6  # of seconds


class Key(NamedTuple):
    """What a record is of; each is measured once."""

    dataset: str
    prompt: str  # a digest of its text
    turn: int
    temperature: float
    method: str  # the row's label


@dataclass(frozen=True)
class Measurement:
    """One generation. All seconds are the host's clock, a GPU waited for."""

    key: Key
    tokens: int  # up to and including the end token, none after it
    finish_reason: str
    accepted_lengths: tuple[int, ...]  # tokens committed by every round, bonus included
    seconds: dict[str, float]  # by STAGES
    first_token_seconds: float
    peak_mib: float | None  # host memory of the process so far, or GPU memory of this generation
    token_ids: tuple[int, ...] | None  # None: those of plain decoding
    difference: dict[str, Any] | None = None  # from plain decoding, at temperature 0
    tree_sizes: tuple[int, ...] | None = None  # nodes verified by every round; None where the method does not choose

    @property
    def acceptance_length(self) -> float | None:
        """τ of this generation; None where the prefill's token ended it."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) if self.accepted_lengths else None

    @property
    def seconds_per_token(self) -> float | None:
        """Time after the prefill over the tokens after the first; None where there is none."""
        decoding = sum(spent for stage, spent in self.seconds.items() if stage != "prefill")
        return decoding / (self.tokens - 1) if self.tokens > 1 else None

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            **self.key._asdict(),
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "accepted_lengths": list(self.accepted_lengths),
            "seconds": [round(self.seconds[stage], DIGITS) for stage in STAGES],
            "first_token_seconds": round(self.first_token_seconds, DIGITS),
            "peak_mib": None if self.peak_mib is None else round(self.peak_mib),
        }
        if self.token_ids is not None:
            record["token_ids"] = list(self.token_ids)
        if self.difference is not None:
            record["difference"] = self.difference
        if self.tree_sizes is not None:
            record["tree_sizes"] = list(self.tree_sizes)
        return record

    @classmethod
    def parse(cls, record: dict[str, Any]) -> Measurement:
        """Raises KeyError, TypeError or ValueError for what `record` never wrote."""
        key = Key(*(record[name] for name in Key._fields))
        token_ids, tree_sizes = record.get("token_ids"), record.get("tree_sizes")
        return cls(
            key=key._replace(temperature=float(key.temperature)),
            tokens=int(record["tokens"]),
            finish_reason=str(record["finish_reason"]),
            accepted_lengths=tuple(record["accepted_lengths"]),
            seconds=dict(zip(STAGES, map(float, record["seconds"]), strict=True)),
            first_token_seconds=float(record["first_token_seconds"]),
            peak_mib=record["peak_mib"],
            token_ids=None if token_ids is None else tuple(token_ids),
            difference=record.get("difference"),
            tree_sizes=None if tree_sizes is None else tuple(tree_sizes),
        )


def read_measurements(folder: Path) -> dict[Key, Measurement]:
    """The records of every process by key, in the order of the files; an unfinished last line is none.

    Raises UserError naming the line that is no record.
    """
    found: dict[Key, Measurement] = {}
    for path in sorted(folder.glob(RECORDS)):
        for number, line in enumerate(_whole_lines(path), start=1):
            try:
                measurement = Measurement.parse(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path} line {number} is no benchmark record: {error!r}; remove that line") from error
            found.setdefault(measurement.key, measurement)
    return found


def cut_half_line(path: Path) -> bool:
    """Take away what a killed process left of its last line; whether there was any."""
    if not path.exists():
        return False
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return whole < len(content)


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))
