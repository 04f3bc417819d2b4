"""Command-line words before Hydra sees them.

Hydra's override grammar gives commas, quotes, braces, `=`, `$` and more a meaning of their own, drops spaces at the
ends and turns `true` or `1e3` into values. Text typed by a user must arrive as typed, so such values are taken out here
and put back after Hydra has composed the rest; lists of strings are read here as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import UserError

CUSTOM = "custom"  # the option of a model group that takes any directory or hub id as its `path`
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")
_LIST_ITEM = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^,]*?)\s*,""", re.DOTALL)


@dataclass
class Words:
    """A command line, sorted: what Hydra may read, and the values that it must not touch, by dotted key."""

    overrides: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)  # the option chosen for each group
    paths: dict[str, str] = field(default_factory=dict)  # the directory or hub id given for a model group


def sort_words(
    argv: Sequence[str],
    *,
    groups: Mapping[str, Sequence[str]],
    models: Collection[str] = (),
    free_text: Collection[str] = (),
    string_lists: Collection[str] = (),
) -> Words:
    """Sort `key=value` words.

    groups: option names by config group. models: groups that take a directory or a hub id besides an option.
    free_text, string_lists: dotted keys. Of a key given twice the last value counts.
    Raises UserError for a word that is not `key=value`, an unknown option, an unreadable list.
    """
    words = Words()
    for word in argv:
        name, equals, value = word.partition("=")
        key = name.lstrip("+")
        if not key or word.startswith("-") or (not equals and not word.startswith("~")):
            raise UserError(f"settings are written key=value, got {word!r}; --help lists the keys")
        if key.startswith("hydra."):
            raise UserError(f"{key} would set nothing: this command does not run under Hydra's own launcher")
        if key in free_text:
            words.values[key] = value
        elif key in string_lists:
            words.values[key] = parse_string_list(key, value)
        elif name in groups:
            _choose(words, name, value, groups[name], takes_path=name in models)
        else:
            words.overrides.append(word)
    words.overrides += [f"{group}={option}" for group, option in words.choices.items()]
    for group, path in words.paths.items():
        words.values.setdefault(f"{group}.path", path)
    return words


def parse_string_list(key: str, value: str) -> tuple[str, ...]:
    """`["a","b\\n"]` (JSON strings), `['it''s']` (YAML single quotes), `[a,b]`, or one bare string.

    Quoted entries may hold any character; bare ones are taken as they are, without spaces at the ends.
    A value that does not begin with `[` is one string exactly as given, and no string at all when it is empty.
    """
    if not value.startswith("["):
        return (value,) if value else ()
    if not value.rstrip().endswith("]"):
        raise UserError(
            f'{key}={value} opens a list without closing it; for a string that begins so write {key}=["[..."]'
        )
    inner = value.rstrip()[1:-1]
    if not inner.strip():
        return ()
    inner += ","
    strings, position = [], 0
    while item := _LIST_ITEM.match(inner, position):
        strings.append(_unquote(key, item[1]))
        position = item.end()
    return tuple(strings)


def looks_like_hub_id(word: str) -> bool:
    """Whether a word has the form `owner/name`."""
    return _HUB_ID.fullmatch(word) is not None


def _choose(words: Words, group: str, word: str, options: Sequence[str], takes_path: bool) -> None:
    """Note the option chosen for a group; any other word of a model group is its path."""
    words.paths.pop(group, None)
    if word in options:
        words.choices[group] = word
        return
    names = ", ".join(options)
    if not takes_path:
        raise UserError(f"{group}={word}: there is no such {group}; choose one of {names}")
    if not looks_like_hub_id(word) and not Path(word).expanduser().is_dir():
        raise UserError(f"{group}={word} is neither one of {names}, nor a directory, nor a hub id (owner/name)")
    words.choices[group], words.paths[group] = CUSTOM, word


def _unquote(key: str, item: str) -> str:
    if item.startswith('"'):
        try:
            return str(json.loads(item, strict=False))
        except ValueError as error:
            raise UserError(f"cannot read {item} in {key}: double quotes hold a JSON string ({error})") from error
    if item.startswith("'"):
        if not re.fullmatch(r"'(?:[^']|'')*'", item, re.DOTALL):
            raise UserError(f"cannot read {item} in {key}: inside single quotes a single quote is written twice")
        return item[1:-1].replace("''", "'")
    return item
