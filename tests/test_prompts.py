"""Prompts arrive as they were given, and a line that cannot be read is named."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.prompts import Prompt, read_prompts, text_prompt
from dominotree.errors import UserError


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_a_text_file_is_one_prompt_to_the_byte(tmp_path: Path) -> None:
    text = "  \ufeffone\r\ntwo,\u2028 three \n\n"
    path = write(tmp_path / "p.txt", text)
    assert read_prompts(path) == [Prompt((text,), path)]


def test_a_jsonl_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi", "name": "x"}]
    lines = [
        json.dumps({"prompt": " a\u2028b ", "category": 3}, ensure_ascii=False),
        "",
        json.dumps({"turns": ["one", "two\n"]}) + "\r",
        json.dumps({"messages": messages}),
    ]
    path = write(tmp_path / "p.jsonl", "\ufeff" + "\n".join(lines))
    assert read_prompts(path) == [
        Prompt((" a\u2028b ",), f"{path} line 1"),
        Prompt(("one", "two\n"), f"{path} line 3"),
        Prompt(("hi",), f"{path} line 4", ({"role": "system", "content": ""},)),
    ]


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5))
def test_any_text_survives_jsonl(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    lines = "".join(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n" for text in texts)
    path = write(tmp_path_factory.mktemp("prompts") / "p.JSONL", lines)
    assert [prompt.turns for prompt in read_prompts(path)] == [(text,) for text in texts]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"prompt": "a"', "not JSON"),
        ("prompt", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["a"]', r'must be a JSON object .* got \["a"\]'),
        ("{}", r"exactly one of prompt, turns, messages; got the keys \[\]"),
        ('{"text": "a"}', r"exactly one of prompt, turns, messages; got the keys \[\"text\"\]"),
        ('{"prompt": "a", "turns": ["b"]}', "got prompt and turns"),
        ('{"prompt": ["a"]}', r"prompt must be a string; got \[\"a\"\]"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ('{"turns": "a"}', "turns must be a list"),
        ('{"turns": []}', "turns must be a list with at least one entry"),
        ('{"turns": ["a", 3]}', r"turns\[1\] must be a string; got 3"),
        ('{"turns": ["a", ""]}', "prompt is empty"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\].content must be a string; got null"),
        ('{"messages": ["a"]}', r"messages\[0\] must be an object with role and content"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "last of messages must be from the user"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, what: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=what) as error:
        read_prompts(path)
    assert f"{path} line 3" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("p.txt", "", "prompt is empty"),
        ("p.jsonl", "", "holds no prompt"),
        ("p.jsonl", "\n \n", "holds no prompt"),
        ("p.txt", b"a\nb\xff", "not UTF-8 text: line 2 has the byte 0xff"),
    ],
)
def test_a_file_without_a_prompt_is_refused(name: str, content: str | bytes, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        read_prompts(write(tmp_path / name, content))


@pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl", "."])
def test_a_file_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the prompt file"):
        read_prompts(str(tmp_path / name))


def test_standard_input_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é\r\n x\n".encode())))
    assert read_prompts("-") == [Prompt(("é\r\n x\n",), "standard input")]


def test_standard_input_must_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(UserError, match="standard input is not UTF-8"):
        read_prompts("-")


def test_text_from_the_shell_must_be_unicode() -> None:
    assert text_prompt(" $x ").turns == (" $x ",)
    with pytest.raises(UserError, match="not valid Unicode"):
        text_prompt("a\udcff")
