"""The conversations of a data directory: one JSON object a line, only ever added to.

A line is `{"id", "messages", "source"}`, or `{"id", "dropped", "source"}` for a prompt that gave no conversation, so
that it is counted and not tried again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dominotree.errors import UserError

FILE_NAME = "conversations.jsonl"
Record = dict[str, Any]


class Dropped(Exception):
    """A row or a conversation that gives no sample; `reason` is one word, by which they are counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConversationStore:
    """`conversations.jsonl`: reading takes whole lines only; `claim` makes this process the one that may append.

    `done_ids` holds the ids of all lines, `dropped` counts them by reason. Raises UserError for a line that is not one
    of ours, naming it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done_ids: set[int] = set()
        self.dropped: Counter[str] = Counter()
        self._lock: FileLock | None = None
        self._load()

    @property
    def kept(self) -> int:
        """Conversations, dropped prompts not counted."""
        return len(self.done_ids) - self.dropped.total()

    def claim(self) -> None:
        """Make the directory, keep other writers out until this process ends, and cut off a half-written last line.

        Raises UserError when another process writes there, or the directory cannot be written.
        """
        if self._lock is not None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path.with_name(self.path.name + ".lock"))
            lock.acquire(timeout=0)
            _cut_half_line(self.path)
        except Timeout as error:
            raise UserError(
                f"another process is writing to {self.path}; wait for it, or name another output"
            ) from error
        except OSError as error:
            raise UserError(f"cannot write to {self.path.parent}: {error.strerror or error}") from error
        self._lock = lock
        self._load()

    def append(self, records: Sequence[Record]) -> None:
        """Add lines, all of them on the disk when this returns.

        Raises UserError for an id that is there already, and when the disk takes no more: then none of them is added.
        """
        self.claim()
        twice = [record["id"] for record in records if record["id"] in self.done_ids]
        if twice:
            raise UserError(f"{self.path} holds the id {twice[0]} already")
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode("utf-8")
        try:
            _append_whole(self.path, lines)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path}: {error.strerror or error}; what was written before is kept, so make "
                "room and run the same command again"
            ) from error
        for record in records:
            self._note(record, str(self.path))

    def close(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def read(self) -> list[Record]:
        """The conversations ordered by id, dropped prompts left out."""
        return sorted((record for record in self if "dropped" not in record), key=lambda record: record["id"])

    def __iter__(self) -> Iterator[Record]:
        """All lines in the order they were written."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield _parse(line, f"{self.path} line {number}")

    def _load(self) -> None:
        self.done_ids, self.dropped = set(), Counter()
        for number, record in enumerate(self, start=1):
            self._note(record, f"{self.path} line {number}")

    def _note(self, record: Record, where: str) -> None:
        if record["id"] in self.done_ids:
            raise UserError(f"{where} has the id {record['id']} for the second time; remove one of the two lines")
        self.done_ids.add(record["id"])
        if "dropped" in record:
            self.dropped[record["dropped"]] += 1


def _parse(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one too
        raise UserError(f"{where} is not JSON: {error}; remove that line") from error
    if not isinstance(record, dict) or type(record.get("id")) is not int or not _has_content(record):
        raise UserError(f'{where} must be a JSON object with a whole number "id" and a list of "messages"')
    return record


def _has_content(record: Record) -> bool:
    if "dropped" in record:
        return isinstance(record["dropped"], str)
    messages = record.get("messages")
    return isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )


def _append_whole(path: Path, lines: bytes) -> None:
    """Append and bring to the disk, or leave the file as long as it was."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(lines):
                written += os.write(descriptor, lines[written:])
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _cut_half_line(path: Path) -> None:
    """Drop what follows the last line end: the write of a process that was killed."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        file.truncate(end)
