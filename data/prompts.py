"""Prompts as the user gave them: one text, a text file, a JSONL file, or standard input. Text is never altered."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dominotree.errors import UserError

STANDARD_INPUT = "-"
KINDS = ("prompt", "turns", "messages")


@dataclass(frozen=True)
class Prompt:
    """What to ask: the messages so far, then user turns one after the other, each answered before the next."""

    turns: tuple[str, ...]
    source: str  # where it came from, for messages to the user: "prompt", "questions.jsonl line 3"
    history: tuple[dict[str, str], ...] = ()  # messages with `role` and `content` before the first turn


def text_prompt(text: str, source: str = "prompt") -> Prompt:
    """One prompt of one turn. UserError where the text is empty or cannot be written as UTF-8."""
    return Prompt((_checked(text, source),), source)


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a file: `.jsonl` holds one a line, any other file is one prompt; `-` is standard input.

    A JSONL line is an object with one of `prompt` (a string), `turns` (a list of strings, answered in turn) or
    `messages` (a chat that ends with the user); other keys are ignored, blank lines too.
    Raises UserError for a file that cannot be read or is empty, naming the line where there is one.
    """
    if path == STANDARD_INPUT:
        return [text_prompt(read_standard_input(), "standard input")]
    text = _decoded(_file_bytes(path), path)
    if Path(path).suffix.lower() != ".jsonl":
        return [text_prompt(text, path)]
    lines = enumerate(text.removeprefix("\ufeff").split("\n"), start=1)
    prompts = [_parse_line(line, f"{path} line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{path} holds no prompt: it is empty; expected one JSON object a line")
    return prompts


def read_standard_input() -> str:
    """Everything on standard input, byte for byte. Raises UserError where it is not UTF-8."""
    buffer = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if buffer is None else _decoded(buffer.read(), "standard input")


def _file_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the prompt file {path}: {error.strerror or error}") from error


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{source} is not UTF-8 text: line {line} has the byte 0x{data[error.start]:02x}") from error


def _checked(text: str, source: str) -> str:
    if not text:
        raise UserError(f"the prompt is empty ({source}); give at least one character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not valid Unicode text ({source}): {error.reason} at {error.start}") from error
    return text


def _parse_line(line: str, source: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{source} must be a JSON object with {', '.join(KINDS)}; got {_short(record)}")
    given = [kind for kind in KINDS if kind in record]
    if len(given) != 1:
        found = " and ".join(given) if given else f"the keys {_short(list(record))}"
        raise UserError(f"{source} must have exactly one of {', '.join(KINDS)}; got {found}")
    (kind,) = given
    if kind == "prompt":
        return Prompt((_text(record["prompt"], source, "prompt"),), source)
    if kind == "turns":
        turns = _filled_list(record["turns"], source, "turns")
        return Prompt(tuple(_text(turn, source, f"turns[{i}]") for i, turn in enumerate(turns)), source)
    messages = _filled_list(record["messages"], source, "messages")
    return _from_messages([_message(message, source, f"messages[{i}]") for i, message in enumerate(messages)], source)


def _from_messages(messages: list[dict[str, str]], source: str) -> Prompt:
    last = messages[-1]
    if last["role"] != "user":
        raise UserError(
            f"{source}: the last of messages must be from the user, to be answered; got role {last['role']!r}"
        )
    return Prompt((_checked(last["content"], source),), source, tuple(messages[:-1]))


def _message(value: Any, source: str, name: str) -> dict[str, str]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise UserError(f"{source}: {name} must be an object with role and content; got {_short(value)}")
    content = value.get("content")
    if not isinstance(content, str):
        raise UserError(f"{source}: {name}.content must be a string; got {_short(content)}")
    return {"role": value["role"], "content": _checked(content, source) if content else ""}


def _filled_list(value: Any, source: str, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{source}: {name} must be a list with at least one entry; got {_short(value)}")
    return value


def _text(value: Any, source: str, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{source}: {name} must be a string; got {_short(value)}")
    return _checked(value, source)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
