"""Prompts by name: the target's own, a benchmark's, or those of any data set of chats, on the hub or on the disk."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.answers import ChatPrompt
from data.benchmarks import BENCHMARKS
from data.config import DataChoice
from data.conversations import Dropped, Record
from dominotree.errors import UserError

SHUFFLE_SEED = 0  # the papers' own for the benchmark subsets
FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "instruction", "question", "text")
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}


@dataclass(frozen=True)
class Source:
    """Prompts in a fixed order; a prompt's id is its place in it. `rows` None: the target writes them itself."""

    choice: DataChoice
    total: int
    rows: Sequence[Mapping[str, Any]] | None
    name: str

    def prompts(self, done_ids: Collection[int]) -> Iterator[ChatPrompt | Record]:
        """The prompts whose id is not done; for a row that gives none, its record with the reason."""
        for prompt_id in range(self.total):
            if prompt_id not in done_ids:
                try:
                    yield self._prompt(prompt_id)
                except Dropped as dropped:
                    yield {"id": prompt_id, "dropped": dropped.reason, "source": self.name}

    def given(self, done_ids: Collection[int]) -> Iterator[Record]:
        """Conversations with the answers that the data set has, as records; dropped ones with the reason."""
        assert self.rows is not None
        for prompt_id in range(self.total):
            if prompt_id not in done_ids:
                record: Record = {"id": prompt_id}
                try:
                    messages = row_messages(self.rows[prompt_id], self.choice.column)
                    if all(message["role"] != "assistant" for message in messages):
                        raise Dropped("no_assistant_turn")
                    record["messages"] = messages
                except Dropped as dropped:
                    record["dropped"] = dropped.reason
                yield record | {"source": self.name}

    def _prompt(self, prompt_id: int) -> ChatPrompt:
        choice = self.choice
        if self.rows is None:
            opener = choice.openers[prompt_id % len(choice.openers)] if choice.openers else ""
            return ChatPrompt(prompt_id, (None,) * choice.turns, self.name, opener=opener)
        row = self.rows[prompt_id]
        if choice.source == "benchmark":
            return ChatPrompt(prompt_id, BENCHMARKS[str(choice.name)].turns(row), self.name)
        messages = row_messages(row, choice.column)
        system = [message for message in messages[:1] if message["role"] == "system"]
        turns = tuple(message["content"] for message in messages if message["role"] == "user")
        return ChatPrompt(prompt_id, turns, self.name, tuple(system))


def open_source(choice: DataChoice, count: int | None) -> Source:
    """The first `count` prompts of a source, all of them where it is None or the source has fewer.

    Benchmarks and hub data sets are shuffled first (seed 0; benchmarks only where they are larger than `count`, as in
    the papers), files are read in their own order. Raises UserError for a source that cannot be read, or is empty.
    """
    if choice.source == "synthesis":
        assert count is not None
        return Source(choice, count, None, "synthesis")
    if choice.source == "benchmark":
        return _open_benchmark(choice, count)
    path = Path(str(choice.path)).expanduser()
    if path.exists():
        rows = _load_local(path, choice)
    else:
        rows = _load(str(choice.path), config=choice.config, split=choice.split).shuffle(seed=SHUFFLE_SEED)
    total = len(rows) if count is None else min(count, len(rows))
    if total == 0:
        raise UserError(f"{choice.path} holds no rows; it needs at least one prompt")
    return Source(choice, total, rows, str(choice.path))


def row_messages(row: Mapping[str, Any], column: str | None = None) -> list[dict[str, str]]:
    """A row as messages with `role` and `content`: from a chat (`role`/`content` or `from`/`value`), a list of user
    turns, or one text, an `input` beside an `instruction` included. A `finish_reason` of length stays with its answer.

    Raises Dropped: `no_prompt_column`, `not_text`, `unknown_role`, `misplaced_system`, `no_user_turn`.
    """
    name = column or next((name for name in COLUMNS if row.get(name)), None)
    if name is None or row.get(name) is None:
        raise Dropped("no_prompt_column")
    value = row[name]
    if isinstance(value, str):
        extra = row.get("input") if name == "instruction" else None
        return [_message("user", f"{value}\n\n{extra}" if extra else value)]
    if not isinstance(value, list | tuple):
        raise Dropped("not_text")
    messages = [_message("user", item) if isinstance(item, str) else _as_message(item) for item in value]
    if any(message["role"] == "system" for message in messages[1:]):
        raise Dropped("misplaced_system")
    if all(message["role"] != "user" for message in messages):
        raise Dropped("no_user_turn")
    return messages


def _as_message(item: Any) -> dict[str, str]:
    if not isinstance(item, Mapping):
        raise Dropped("not_text")
    role = ROLES.get(str(item.get("role") or item.get("from")).lower())
    if role is None:
        raise Dropped("unknown_role")
    content = item.get("content")
    message = _message(role, item.get("value") if content is None else content)
    was_cut = role == "assistant" and item.get("finish_reason") == "length"
    return message | ({"finish_reason": "length"} if was_cut else {})


def _message(role: str, content: Any) -> dict[str, str]:
    if not isinstance(content, str):
        raise Dropped("not_text")
    if role == "user" and not content.strip():
        raise Dropped("empty_user_turn")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Dropped("not_unicode") from error
    return {"role": role, "content": content}


def _open_benchmark(choice: DataChoice, count: int | None) -> Source:
    if choice.name not in BENCHMARKS:
        raise UserError(f"there is no benchmark {choice.name}; choose data.name= of {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[choice.name]
    files = list(benchmark.data_files) or None
    rows = _load(benchmark.path, config=benchmark.config, split=benchmark.split, data_files=files)
    wanted = benchmark.count if count is None else count
    if len(rows) > wanted:
        rows = rows.shuffle(seed=SHUFFLE_SEED).select(range(wanted))
    return Source(choice, len(rows), rows, choice.name)


def _load_local(path: Path, choice: DataChoice) -> Any:
    if path.is_dir():
        return _load(str(path), config=choice.config, split=choice.split)
    kind = FILE_KINDS.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"data.path={path} must end in {', '.join(FILE_KINDS)}, or be a directory or a hub id")
    if path.suffix.lower() == ".jsonl":
        _check_lines(path)
    return _load(kind, config=None, split="train", data_files=[str(path)])


def _load(path: str, *, config: str | None, split: str, data_files: list[str] | None = None) -> Any:
    """A map-style `datasets.Dataset`. Raises UserError with the library's reason."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        return datasets.load_dataset(path, config, split=split, data_files=data_files)
    except (*HfHubHTTPError.__bases__, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        # the first are the base classes of what the hub's client raises, whichever HTTP library it uses
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        what = data_files[0] if data_files else path
        raise UserError(f"cannot read the data set {what} (split {split}): {reason}") from error


def _check_lines(path: Path) -> None:
    """Name the first line of a JSONL file that is no JSON object: `datasets` would not say which."""
    is_empty = True
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    is_empty = False
                    _check_json_line(line, f"{path} line {number}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
    if is_empty:
        raise UserError(f"{path} holds no rows; it needs at least one prompt")


def _check_json_line(line: str, where: str) -> None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where} must be a JSON object, got {line.strip()[:60]}")
