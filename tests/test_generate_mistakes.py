"""When something is wrong or comes in between: one line, a code, whole records, and nothing half-written."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_chat import ids_of, records, scripted

import dominotree.decode.stream
import infer.records
from infer.generate import main

Capture = pytest.CaptureFixture[str]


# Ctrl-C, full disks, terminals


def test_ctrl_c_keeps_what_was_produced(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(index: int) -> None:
        if index == 0:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(
        dominotree.decode.stream, "decode_rounds", scripted([ids_of("ab"), ids_of("é")[:1], ids_of("d")], interrupt)
    )
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    assert main([*words, f"prompt_file={prompts}", f"output={output}"]) == 130
    (record,) = records(output)
    assert (record["text"], record["finish_reason"]) == ("ab\ufffd", "interrupted")
    assert record["token_ids"] == ids_of("abé")[:3]
    captured = capsys.readouterr()
    assert captured.out == "[1/2] a\nab\ufffd\n"
    assert "(interrupted)" in captured.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_cuts_through(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def insist(index: int) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(dominotree.decode.stream, "decode_rounds", scripted([[5], [6]], insist))
    assert main([*words, "prompt=a"]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_disk_that_fills_up_leaves_whole_records(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    write, calls = os.write, []

    def filling_up(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:50] if len(calls) == 2 else data)

    monkeypatch.setattr(infer.records.os, "write", filling_up)
    assert main([*words, f"prompt_file={prompts}", f"output={output}"]) == 2
    assert len(records(output)) == 1
    assert output.read_bytes().endswith(b"\n")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: cannot write record 2 to {output}: No space left on device; the 1 before it are whole"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_device_is_one_line(words: list[str], capsys: Capture) -> None:
    assert main([*words, "prompt=a", "output=/dev/full"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: cannot write record 1 to /dev/full: No space left on device")


def test_records_are_added_to_a_file_that_ends_in_a_whole_line(
    words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text('{"old": 1}\n', encoding="utf-8")
    assert main([*words, "prompt=a", f"output={output}"]) == 0
    assert ["text" in record for record in records(output)] == [False, True]
    output.write_text('{"old": 1', encoding="utf-8")
    assert main([*words, "prompt=a", f"output={output}"]) == 2
    assert output.read_text(encoding="utf-8") == '{"old": 1'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_drawn_on_a_terminal_only(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    assert main([*words, f"prompt_file={prompts}"]) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.err + captured.out
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert main([*words, f"prompt_file={prompts}"]) == 0
    assert "loading the target" in screen.getvalue()
    assert "2/2" in screen.getvalue()
    assert capsys.readouterr().out == captured.out
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main([*words, f"prompt_file={prompts}"]) == 0
    assert sys.stdout.getvalue() == captured.out


# Mistakes


MISTAKES = [
    (["method=magic"], "method=magic: there is no such method; choose one of adaptive, ar, caddtree"),
    (["method.node_budget=0"], "node_budget"),
    (["temperature=-1"], "temperature"),
    (["top_p=0"], "top_p"),
    (["top_k=-1"], "top_k"),
    (["dtype=float8"], "dtype must be auto, float32, bfloat16, float16; got float8"),
    (["device=abacus"], "device must be auto, cpu, cuda"),
    (["draft=none"], "method=dominotree needs a drafter"),
    (["draft={folder}/other_draft"], "does not fit the target"),
    (["draft=smollm2"], "draft=smollm2, the default, is for SmolLM2: the drafter does not fit the target"),
    (["draft={folder}/dflash_draft"], "Domino head"),
    (["draft={folder}/target"], "error: "),
    (["target={folder}"], "cannot load the target"),
    (["target=missing"], "target=missing is neither one of"),
    (["target={folder}/base"], "raw=true"),
    (["max_new_tokens=999"], "context"),
    (["prompt="], "the prompt is empty"),
    (["prompt=\udcff"], "not valid Unicode"),
    (["output=/no/such/folder/out.jsonl"], "there is no directory /no/such/folder"),
    (["output={folder}"], "is a directory"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    mistake: list[str], message: str, words: list[str], folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out.jsonl"
    filled = [word.format(folder=folder) for word in mistake]
    assert main([*words, "prompt=a", f"output={output}", *filled]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not output.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_gpu_is_named_before_a_model_is_loaded(capsys: Capture) -> None:
    assert main(["target=nobody/not-there", "prompt=a", "device=cuda"]) == 2
    assert "device cuda is not available" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "a"}\nnot json\n', "p.jsonl line 2 is not JSON"),
        ('{"prompt": "a"}\n{"messages": [{"role": "user", "content": 3}]}\n', "p.jsonl line 2: messages[0].content"),
        ('{"prompt": "a"}\n{"prompt": "' + "b" * 300 + '"}\n', "p.jsonl line 2: the prompt's"),
        ("", "p.jsonl holds no prompt"),
    ],
)
def test_a_bad_line_stops_everything_before_the_first_answer(
    lines: str, message: str, words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "p.jsonl").write_text(lines, encoding="utf-8")
    assert main([*words, f"prompt_file={tmp_path / 'p.jsonl'}", f"output={tmp_path / 'out.jsonl'}"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert message in captured.err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_chat_line_that_is_not_text_is_one_line(
    words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main([*words, "chat=true"]) == 2
    assert capsys.readouterr().err.endswith("error: standard input is not utf-8 text: invalid start byte\n")


def test_messages_need_the_template(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": messages}), encoding="utf-8")
    for word, message in (
        ("raw=true", "messages need the chat template"),
        ("system=x", "begin with a system text already"),
    ):
        assert main([*words, f"prompt_file={tmp_path / 'p.jsonl'}", word]) == 2
        assert message in capsys.readouterr().err


# Through the shell, once


def test_the_shell_s_words_arrive_and_a_closed_pipe_is_quiet(words: list[str], tmp_path: Path) -> None:
    root, output = Path(__file__).resolve().parents[1], tmp_path / "out, {x}.jsonl"
    command = [sys.executable, "-m", "infer.generate", *words, "method=domino", f"output={output}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    prompt = ' It\'s (1, 2)="x" \\${y} [z] {a: b}\n# 🦀 \\'
    done = subprocess.run([*command, f"prompt={prompt}"], cwd=root, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    (record,) = records(output)
    assert record["prompt"] == prompt
    assert done.stdout.decode() == record["text"] + "\n"
    reading, writing = os.pipe()
    os.close(reading)
    closed = subprocess.run(
        [*command, "prompt=a"], cwd=root, env=environment, stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (closed.returncode, closed.stderr) == (141, b"")
