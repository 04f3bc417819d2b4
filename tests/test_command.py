"""Settings on the command line: text arrives byte for byte, and every mistake is one clear line."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st

from dominotree.checked import build
from dominotree.command import Command, compose_config, help_text, run_command
from dominotree.errors import UserError
from dominotree.overrides import looks_like_hub_id, parse_string_list


@dataclass(frozen=True)
class Engine:
    kind: str
    power: int = 0
    path: str | None = None


@dataclass(frozen=True)
class Settings:
    engine: Engine
    text: str | None
    steps: int
    rate: float
    fast: bool
    stop: tuple[str, ...]
    sizes: tuple[int, ...]
    debug: bool

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise UserError(f"steps must be 0 or more, got {self.steps}")


ROOT = """# a comment on top
defaults:
  - engine: petrol
  - _self_
# How it reads.
text: null
steps: 3
rate: 1.0
fast: false
stop: []
sizes: [1, 2]
debug: false
"""
ENGINES = {
    "petrol": "kind: petrol\npower: 5\n",
    "pedals": "kind: pedals\n",
    "custom": "kind: custom\npath: ???\n",
}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command[Settings]:
    conf = tmp_path_factory.mktemp("conf")
    (conf / "drive.yaml").write_text(ROOT)
    (conf / "engine").mkdir()
    for name, text in ENGINES.items():
        (conf / "engine" / f"{name}.yaml").write_text(text)
    return Command("drive", Settings, "drive KEY=VALUE", ("text",), ("stop",), ("engine",), conf)


def test_defaults_come_from_the_files(command: Command[Settings]) -> None:
    engine = Engine("petrol", 5)
    assert compose_config(command, []) == Settings(engine, None, 3, 1.0, False, (), (1, 2), False)


def test_values_are_converted_to_their_field(command: Command[Settings]) -> None:
    made = compose_config(command, ["steps=7", "rate=2", "fast=true", "sizes=[4]", "engine=pedals", "engine=petrol"])
    assert made == Settings(Engine("petrol", 5), None, 7, 2.0, True, (), (4,), False)
    assert isinstance(made.rate, float)


NASTY = st.text(alphabet=" ,=()[]{}'\"\\$#:;!&|<>`~*?@%^\n\t\u00e9\U0001f980abn1e3", max_size=12)


@dataclass(frozen=True)
class Texts:
    texts: dict[str, str | None]


@pytest.fixture(scope="module")
def many_texts(tmp_path_factory: pytest.TempPathFactory) -> Command[Texts]:
    """Twenty texts at once: composing takes much longer than a text does."""
    conf = tmp_path_factory.mktemp("texts")
    keys = [f"key{index}" for index in range(20)]
    (conf / "texts.yaml").write_text("texts:\n" + "".join(f"  {key}: null\n" for key in keys))
    return Command("texts", Texts, "", tuple(f"texts.{key}" for key in keys), conf=conf)


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.one_of(NASTY, st.text(max_size=20)), min_size=20, max_size=20))
def test_any_text_arrives_byte_for_byte(many_texts: Command[Texts], texts: list[str]) -> None:
    made = compose_config(many_texts, [f"texts.key{index}={text}" for index, text in enumerate(texts)])
    assert list(made.texts.values()) == texts


@settings(max_examples=50, deadline=None)
@given(text=NASTY, path=NASTY)
def test_paths_of_models_arrive_byte_for_byte(command: Command[Settings], text: str, path: str) -> None:
    made = compose_config(command, [f"text={text}", "engine=custom", f"engine.path={path}"])
    assert (made.text, made.engine.path) == (text, path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " a ",
        "a=b",
        "null",
        "true",
        "1e3",
        "???",
        "${steps}",
        "$x",
        "\\${x}",
        "a\n",
        "{a: 1}",
        "[1,2]",
        "'q'",
        '"',
        "\\",
    ],
)
def test_texts_that_mean_something_to_hydra_arrive_too(command: Command[Settings], text: str) -> None:
    assert compose_config(command, [f"text={text}"]).text == text
    assert compose_config(command, [f"++text={text}"]).text == text


@pytest.mark.parametrize(
    ("value", "strings"),
    [
        ('["###","\\n\\n"]', ("###", "\n\n")),
        ("['a,b']", ("a,b",)),
        ("['it''s', \"]\"]", ("it's", "]")),
        ("[###]", ("###",)),
        ("[a, b]", ("a", "b")),
        ("END", ("END",)),
        (" x", (" x",)),
        ("a,b", ("a,b",)),
        ("]", ("]",)),
        ("[]", ()),
        ("", ()),
        ("[1, true, null]", ("1", "true", "null")),
        ('["\\ud83e\\udd80", "${x}", "{}"]', ("🦀", "${x}", "{}")),
        ('["two\nlines"]', ("two\nlines",)),
        ('[""]', ("",)),
    ],
)
def test_lists_of_strings_take_any_character(command: Command[Settings], value: str, strings: tuple[str, ...]) -> None:
    assert compose_config(command, [f"stop={value}"]).stop == strings


@given(strings=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=5))
def test_json_and_yaml_quotes_hold_anything(strings: list[str]) -> None:
    import json

    for ascii_only in (True, False):
        assert parse_string_list("stop", json.dumps(strings, ensure_ascii=ascii_only)) == tuple(strings)
    quoted = ", ".join("'" + text.replace("'", "''") + "'" for text in strings)
    assert parse_string_list("stop", f"[{quoted}]") == tuple(strings)


@pytest.mark.parametrize("value", ["[a", '["a"b]', "['a'b]", '["\\x"]', "['a]", '["a, "b"]'])
def test_unreadable_lists_are_refused(value: str) -> None:
    with pytest.raises(UserError, match="stop"):
        parse_string_list("stop", value)


def test_a_model_group_takes_a_directory_or_a_hub_id(command: Command[Settings], tmp_path: Path) -> None:
    folder = tmp_path / "run, step=3 {x}"
    folder.mkdir()
    assert compose_config(command, [f"engine={folder}"]).engine == Engine("custom", 0, str(folder))
    assert compose_config(command, ["engine=Owner-1/na.me_2"]).engine == Engine("custom", 0, "Owner-1/na.me_2")
    assert compose_config(command, ["engine=a/b", "engine=pedals"]).engine == Engine("pedals")
    assert compose_config(command, ["engine=a/b", "engine.path=c/d"]).engine.path == "c/d"


@pytest.mark.parametrize(
    ("word", "is_hub_id"),
    [("a/b", True), ("a/b/c", False), ("/a/b", False), ("./a", False), ("../a", False), ("a", False), ("a b/c", False)],
)
def test_the_form_of_a_hub_id(word: str, is_hub_id: bool) -> None:
    assert looks_like_hub_id(word) is is_hub_id


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["setps=1"], "there is no key setps; did you mean steps?"),
        (["+setps=1"], "there is no key setps; did you mean steps?"),
        (["+engine.pwoer=1"], "there is no key engine.pwoer; did you mean engine.power?"),
        (["engine=pedals", "engine.power=1"], "engine=pedals has no power; it belongs to engine=petrol"),
        (["engine.path=x"], "engine=petrol has no path; it belongs to engine=custom"),
        (["engine.wings=2"], "engine=petrol has no wings; no option of that group has it"),
        (["text.x=1"], "there is no key text.x; did you mean text?"),
        (
            ["engine=steam"],
            "engine=steam is neither one of pedals, petrol, custom, nor a directory, nor a hub id (owner/name)",
        ),
        (["engine=custom"], "engine.path has no value; give engine.path=…"),
        (["steps=???"], "steps has no value; give steps=…"),
        (["~steps"], "steps has no value; give steps=…"),
        (["steps=x"], "steps must be a whole number, got 'x'"),
        (["steps=1.5"], "steps must be a whole number, got 1.5"),
        (["steps=true"], "steps must be a whole number, got True"),
        (["steps=null"], "steps must be a whole number, got null"),
        (["steps="], "steps must be a whole number, got ''"),
        (["rate=fast"], "rate must be a number, got 'fast'"),
        (["fast=1"], "fast must be true or false, got 1"),
        (["sizes=3"], "sizes must be a list, got 3"),
        (["sizes=[1,x]"], "sizes[1] must be a whole number, got 'x'"),
        (["steps=1,2"], "steps=1,2 gives several values; give one, or a list as key=[a,b]"),
        (["sizes=[1"], "cannot read the setting sizes=[1: no viable alternative at input '[1'"),
        (["steps=${nothing}"], "Interpolation key 'nothing' not found"),
        (["steps"], "settings are written key=value, got 'steps'; --help lists the keys"),
        (["--steps=3"], "settings are written key=value, got '--steps=3'; --help lists the keys"),
        (["=3"], "settings are written key=value, got '=3'; --help lists the keys"),
        (["hydra.run.dir=x"], "hydra.run.dir would set nothing: this command does not run under Hydra's own launcher"),
        (["steps=-1"], "steps must be 0 or more, got -1"),
    ],
)
def test_each_mistake_has_its_line(
    command: Command[Settings], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command, lambda config: pytest.fail(f"ran with {config}"), words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {message}\n"


@pytest.mark.parametrize("words", [["+engine=pedals"], ["engine@other=pedals"], ["+engine.kind.x=1"], ["steps={a:1}"]])
def test_other_grammar_gives_one_line_as_well(
    command: Command[Settings], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command, lambda config: 0, words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_composing_leaves_nothing_behind(command: Command[Settings]) -> None:
    compose_config(command, [])
    with pytest.raises(UserError):
        compose_config(command, ["nothing=1"])
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("two\n  lines"), 2, "error: two lines\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 1, "error: No space left on device: /x\n"),
        (MemoryError(), 1, "error: out of memory; a smaller model, a shorter prompt or dtype=bfloat16 needs less\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
    ],
)
def test_errors_are_one_line_and_a_code(
    command: Command[Settings], error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Settings) -> int:
        raise error

    assert run_command(command, fail, []) == code
    assert capsys.readouterr().err == line


def test_debug_shows_the_traceback_too(command: Command[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: Settings) -> int:
        raise UserError("wrong")

    assert run_command(command, fail, ["debug=true"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("\nerror: wrong\n")


def test_a_fault_of_the_program_is_not_hidden(command: Command[Settings]) -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(command, lambda config: 1 // 0, [])


def test_help_lists_keys_with_defaults_and_options(
    command: Command[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command, lambda config: pytest.fail("ran"), ["--help"]) == 0
    out = capsys.readouterr().out
    assert out == help_text(command) + "\n"
    for expected in ("drive KEY=VALUE", "steps: 3", "# How it reads.", "engine=…", "default petrol", "engine.power=5"):
        assert expected in out
    assert "_self_" not in out


@dataclass(frozen=True)
class Nested:
    table: dict[str, int]
    engines: tuple[Engine, ...] = ()


def test_plain_values_become_nested_dataclasses() -> None:
    made = build(Nested, {"table": {"a": 1}, "engines": [{"kind": "x"}]})
    assert made == Nested({"a": 1}, (Engine("x"),))
    with pytest.raises(UserError, match=r"table\.a must be a whole number"):
        build(Nested, {"table": {"a": "1"}})
    with pytest.raises(UserError, match=r"there is no key engines\[0\]\.x"):
        build(Nested, {"table": {}, "engines": [{"kind": "x", "x": 1}]})
    with pytest.raises(UserError, match="table has no value"):
        build(Nested, {})
