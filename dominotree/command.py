"""What every command shares: its settings composed by Hydra into a checked dataclass, its help, its one-line errors.

Hydra stays inside this file: a command receives a plain frozen dataclass.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .checked import build, unknown_key
from .errors import UserError
from .overrides import CUSTOM, sort_words

CONF = Path(__file__).resolve().parents[1] / "conf"
T = TypeVar("T")


@dataclass(frozen=True)
class Command(Generic[T]):
    """One command: `conf/<name>.yaml`, the dataclass it fills, and the keys whose values Hydra must not read."""

    name: str
    config: type[T]
    usage: str  # how it is called, the first lines of its help
    free_text: tuple[str, ...] = ()  # dotted keys taken byte for byte
    string_lists: tuple[str, ...] = ()  # dotted keys that hold a list of strings
    models: tuple[str, ...] = ()  # groups that take a directory or a hub id besides a config name
    conf: Path = CONF


def compose_config(command: Command[T], argv: Sequence[str]) -> T:
    """The command's settings from its config files and `key=value` words.

    Raises UserError, in one line, for an unknown key or option, a value of the wrong type, a missing one, and whatever
    the dataclass refuses. May be called any number of times in one process.
    """
    words = sort_words(
        argv,
        groups=_groups(command.conf),
        models=command.models,
        free_text=(*command.free_text, *(f"{group}.path" for group in command.models)),
        string_lists=command.string_lists,
    )
    values, missing = _compose(command, words.overrides, words.choices)
    for key in missing - set(words.values):
        raise UserError(f"{key} has no value; give {key}=…")
    for key, value in words.values.items():
        _place(command, values, key, value, words.choices)
    return build(command.config, values)


def run_command(command: Command[T], run: Callable[[T], int], argv: Sequence[str] | None = None) -> int:
    """Run a command with the settings that `argv` gives and return its exit code, see `reporting`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & set(words):
        return reporting(lambda: _print_help(command))
    return reporting(lambda: run(compose_config(command, words)), debug="debug=true" in [w.lower() for w in words])


def _print_help(command: Command[Any]) -> int:
    print(help_text(command), flush=True)
    return 0


def reporting(run: Callable[[], int], *, debug: bool = False) -> int:
    """Call `run` and return its exit code, turning what stops it into one line on standard error.

    0 is success, 1 the machine's refusal (a full disk, memory), 2 something the user can put right, 130 Ctrl-C, 141 a
    reader of standard output that has gone. `debug` shows a traceback before the line.
    """
    _open_missing_streams()
    try:
        return run()
    except UserError as error:
        return _report(str(error), 2, debug)
    except BrokenPipeError:
        _drop_output()  # whoever read standard output has seen enough
        return 141
    except OSError as error:
        _drop_output()
        where = f": {error.filename}" if error.filename else ""
        return _report(f"{error.strerror or error}{where}", 1, debug)
    except MemoryError:
        return _report("out of memory; a smaller model, a shorter prompt or dtype=bfloat16 needs less", 1, debug)
    except KeyboardInterrupt:
        return _report("interrupted", 130, debug)


def help_text(command: Command[Any]) -> str:
    """Usage, the keys with their defaults as the config file explains them, and the options of each group."""
    lines = (command.conf / f"{command.name}.yaml").read_text(encoding="utf-8").splitlines()
    start = max((index for index, line in enumerate(lines) if line.startswith("  - ")), default=-1) + 1
    parts = [command.usage.strip(), "", "Settings (key=value) and their defaults:"]
    parts += [f"  {line}".rstrip() for line in lines[start:]]
    defaults = _defaults(command)
    for group, options in _groups(command.conf).items():
        if group in defaults:
            or_path = ", a directory or a hub id" if group in command.models else ""
            parts += ["", f"{group}=… is one of these{or_path} (default {defaults[group]}):"]
            parts += [f"  {_describe_option(command, group, option)}" for option in options]
    return "\n".join(parts)


def _describe_option(command: Command[Any], group: str, option: str) -> str:
    """An option's name with the comment on top of its file, and its keys below."""
    text = (command.conf / group / f"{option}.yaml").read_text(encoding="utf-8")
    comment = text.splitlines()[0].removeprefix("#").strip() if text.startswith("#") else ""
    keys = {key: value for key, value in (yaml.safe_load(text) or {}).items() if key != "defaults"}
    settings = " ".join(f"{group}.{key}={_shown(value)}" for key, value in keys.items() if value != "???")
    return f"{option:<18}{comment}".rstrip() + (f"\n{'':20}{settings}" if settings else "")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _groups(conf: Path) -> dict[str, list[str]]:
    """Option names by config group; `custom` last."""
    folders = sorted(path for path in conf.iterdir() if path.is_dir())
    names = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}
    return {group: sorted(options, key=CUSTOM.__eq__) for group, options in names.items()}


def _defaults(command: Command[Any]) -> dict[str, str]:
    """The option of each group that the command takes by itself."""
    content = yaml.safe_load((command.conf / f"{command.name}.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in content.get("defaults", []) if isinstance(entry, Mapping)]
    return {str(key).removeprefix("optional "): str(value) for entry in entries for key, value in entry.items()}


def _compose(
    command: Command[Any], overrides: Sequence[str], choices: Mapping[str, str]
) -> tuple[dict[str, Any], set[str]]:
    """The composed values as plain ones, and the dotted keys that have none."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(command.conf)):
            composed = compose(command.name, overrides=list(overrides))
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # Hydra raises all three kinds
        raise _readable(error, command, choices) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}, set(OmegaConf.missing_keys(composed))


def _readable(error: Exception, command: Command[Any], choices: Mapping[str, str]) -> UserError:
    """Hydra's several lines as one."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if first.startswith("Could not override '"):
        return _no_such_key(command, first.split("'")[1], choices)
    if first.startswith("Ambiguous value for argument"):
        return UserError(f"{first.split(chr(39))[1]} gives several values; give one, or a list as key=[a,b]")
    override = getattr(error, "override", None)
    return UserError(f"cannot read the setting {override}: {first}" if override else first)


def _no_such_key(command: Command[Any], key: str, choices: Mapping[str, str]) -> UserError:
    """The error for an unknown key: which option of its group has it, or which known key is meant."""
    group, dot, name = key.partition(".")
    chosen = {**_defaults(command), **choices}
    if dot and group in chosen:
        owners = [option for option in _groups(command.conf)[group] if name in _option_keys(command, group, option)]
        where = f"it belongs to {group}={', '.join(owners)}" if owners else "no option of that group has it"
        return UserError(f"{group}={chosen[group]} has no {name}; {where}")
    values, _ = _compose(command, [f"{name}={option}" for name, option in choices.items()], choices)
    return unknown_key(key, _dotted(values))


def _option_keys(command: Command[Any], group: str, option: str) -> set[str]:
    return set(yaml.safe_load((command.conf / group / f"{option}.yaml").read_text(encoding="utf-8")) or {})


def _dotted(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = [f"{prefix}{key}" for key in values]
    for key, value in values.items():
        keys += _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else []
    return keys


def _place(command: Command[Any], values: dict[str, Any], key: str, value: Any, choices: Mapping[str, str]) -> None:
    """Put a value that Hydra has not seen at its dotted key, which must exist."""
    level: Any = values
    *groups, name = key.split(".")
    for group in groups:
        level = level.get(group) if isinstance(level, dict) else None
    if not isinstance(level, dict) or name not in level:
        raise _no_such_key(command, key, choices)
    level[name] = value


def _report(message: str, code: int, debug: bool) -> int:
    """One line on standard error. Of processes that were launched together and fail alike, the first tells at once, and
    its end ends the others while they wait."""
    if place := int(os.environ.get("LOCAL_RANK", "0")):
        time.sleep(10 + place)
    if debug:
        traceback.print_exc()
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    print(f"error: {line}" if code != 130 else line, file=sys.stderr)
    return code


def _open_missing_streams() -> None:
    """Standard streams that the caller closed (`>&-`) read and write nothing instead of failing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open as long as the process


def _drop_output() -> None:
    """Where standard output takes nothing more, let nothing more be written: Python would complain again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
