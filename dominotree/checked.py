"""Plain values into checked dataclasses: every key known, every value of the type its field declares."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from .errors import UserError

T = TypeVar("T")
_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list",
    dict: "a mapping",
}


def build(config: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Make the dataclass `config` from plain values, nested ones included; its own checks run as it is made.

    prefix: the dotted key of this level, for messages. Raises UserError for an unknown key, one without a value, and a
    value of another type (a whole number passes for a number, nothing else is converted).
    """
    fields = {item.name: item for item in dataclasses.fields(typing.cast(Any, config))}
    hints = typing.get_type_hints(config)
    for key in values:
        if key not in fields:
            raise unknown_key(f"{prefix}{key}", [f"{prefix}{name}" for name in fields])
    for name, item in fields.items():
        if name not in values and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise UserError(f"{prefix}{name} has no value; give {prefix}{name}=…")
    return config(**{key: _convert(hints[key], value, f"{prefix}{key}") for key, value in values.items()})


def unknown_key(key: str, known: typing.Iterable[str]) -> UserError:
    """The error for a key that does not exist, with the most similar one that does."""
    near = difflib.get_close_matches(key, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists the keys"
    return UserError(f"there is no key {key}; {hint}")


def one_of(key: str, value: str, options: typing.Sequence[str]) -> None:
    """Raises UserError unless `value` is one of `options`."""
    if value not in options:
        raise UserError(f"{key} must be one of {', '.join(options)}, got {value}")


def at_least(key: str, value: float, lowest: float) -> None:
    """Raises UserError unless `value` is `lowest` or more."""
    if value < lowest:
        raise UserError(f"{key} must be at least {lowest}, got {value}")


def _convert(hint: Any, value: Any, key: str) -> Any:
    """`value` as the type `hint`: a dataclass, a plain type, `tuple[X, ...]`, `dict[str, X]`, a union of these."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        hint = next((option for option in options if _takes(option, value)), options[0])
    kind = typing.get_origin(hint) or hint
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(typing.cast(type, hint), value, f"{key}.")
    if kind is tuple and isinstance(value, list | tuple):
        return tuple(_convert(typing.get_args(hint)[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if kind is dict and isinstance(value, Mapping):
        return {name: _convert(typing.get_args(hint)[1], item, f"{key}.{name}") for name, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is kind:
        return value
    expected = "a group of keys" if dataclasses.is_dataclass(hint) else _NAMES.get(kind, str(kind))
    raise UserError(f"{key} must be {expected}, got {'null' if value is None else repr(value)}")


def _takes(hint: Any, value: Any) -> bool:
    """Whether, of a union, this is the type meant by `value`."""
    return isinstance(value, Mapping) if dataclasses.is_dataclass(hint) else type(value) is hint
