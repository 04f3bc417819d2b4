"""The benchmark as a user meets it: every cell measured once, whatever stops it, and compared with plain decoding."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench_records import PUBLISHED_SETS
from measured_files import write_measured
from tiny_chat import ids_of, records, scripted

import infer.benchmark_run
import infer.measuring
import infer.records
from data.models import DraftChoice
from data.prompts import Prompt
from dominotree import generate, load
from dominotree.command import CONF, Command, help_text
from dominotree.decode.stopping import Stopping
from infer.benchmark import BENCHMARK, main
from infer.benchmark_config import dataset_label
from infer.measurements import STAGES, Key, Measurement, read_measurements
from infer.processes import Processes, share_out
from infer.prompt_sets import NamedPrompt
from infer.report import REPORT
from infer.report import main as main_report

Capture = pytest.CaptureFixture[str]
METHODS = ("ar", "domino", "dominotree")
EVERYTHING = 12  # generations: 3 prompts, one of two turns, 3 methods


@pytest.fixture
def line(folder: Path, tmp_path: Path) -> list[str]:
    """Two data sets, the second with a prompt of two turns; greedy."""
    (tmp_path / "one, x.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bc"}\n', encoding="utf-8")
    (tmp_path / "chat.jsonl").write_text('{"turns": ["hi", "and?"]}\n', encoding="utf-8")
    return [
        f"output={tmp_path / 'run'}",
        f"target={folder / 'target'}",
        f"draft={folder / 'draft'}",
        f'datasets=["{tmp_path / "one, x.jsonl"}",{tmp_path / "chat.jsonl"}]',
        f"methods=[{','.join(METHODS)}]",
        "max_new_tokens=5",
    ]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "run" / "records.jsonl"


def keys(path: Path) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(record[name] for name in Key._fields) for record in records(path))


def token_ids_of(one: Measurement, found: dict[Key, Measurement]) -> tuple[int, ...] | None:
    """Left out of a record where they are plain decoding's."""
    return one.token_ids or found[one.key._replace(method="ar")].token_ids


def test_budgets_that_a_method_chose_are_recorded(line: list[str], output: Path, folder: Path, tmp_path: Path) -> None:
    target, draft = load(str(folder / "target"), str(folder / "draft"))
    assert draft is not None
    profile = write_measured(target, draft, tmp_path).folder / "profile.json"
    row = f"{{name: condadaptive, cap: 3, profile: {profile}, label: chosen}}"
    assert main([*line[:-2], "max_new_tokens=5", f"methods=[ar,dominotree,{row}]"]) == 0
    for one in records(output):
        if one["method"] == "chosen":
            assert len(one["tree_sizes"]) == len(one["accepted_lengths"]) and max(one["tree_sizes"]) <= 3
        else:
            assert "tree_sizes" not in one
    assert main_report([f"run={output.parent}", "resamples=5"]) == 0
    report = (output.parent / "report" / "report.md").read_text(encoding="utf-8")
    assert "### Budgets chosen round by round" in report and "| chosen, T=0 | 3 |" in report
    assert (output.parent / "report" / "sizes_t0.png").exists()


def test_every_cell_is_measured_once_and_holds_what_the_library_gives(
    line: list[str], output: Path, folder: Path, capsys: Capture
) -> None:
    assert main([*line, "temperatures=[0,1]"]) == 0
    assert len(keys(output)) == 2 * EVERYTHING and set(keys(output).values()) == {1}
    found = read_measurements(output.parent)
    target, draft = load(str(folder / "target"), str(folder / "draft"))
    for method in METHODS:
        expected = generate(target, draft, "bc", method=method, max_new_tokens=5)
        (one,) = [
            one
            for one in found.values()
            if (one.key.dataset, one.key.method, one.key.temperature) == ("one, x", method, 0)
            and token_ids_of(one, found) == tuple(expected.token_ids)
        ]
        assert one.accepted_lengths == tuple(expected.accepted_lengths)
        assert (one.tokens, one.finish_reason) == (5, "length")
    for one in found.values():
        assert sum(one.accepted_lengths) == one.tokens - 1
        assert list(one.seconds) == list(STAGES) and one.seconds["verify"] > 0 and one.first_token_seconds > 0
    for record in records(output):  # greedy token ids are stored once
        assert ("token_ids" in record) == (record["method"] == "ar" or record["temperature"] > 0)
    err = capsys.readouterr().err
    assert "tokens identical to plain decoding in 8 of 8 greedy generations" in err
    assert "24/24 generations" in err and "T=1 dominotree: τ " in err
    info = json.loads((output.parent / "run.json").read_text(encoding="utf-8"))
    assert info["identity"]["methods"]["dominotree"]["node_budget"] == 16
    assert info["sessions"][0]["versions"]["torch"] and info["datasets"]["chat"]["prompts"] == 1


def test_later_turns_follow_plain_decoding_s_answer(line: list[str], output: Path, folder: Path) -> None:
    assert main(line) == 0
    target, _ = load(str(folder / "target"))
    assert target.tokenizer is not None
    chat = [record for record in records(output) if record["dataset"] == "chat" and record["method"] == "ar"]
    first, second = (record["token_ids"] for record in sorted(chat, key=lambda record: record["turn"]))
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": target.tokenizer.decode(first, skip_special_tokens=True)},
        {"role": "user", "content": "and?"},
    ]
    assert second == generate(target, None, messages, method="ar", max_new_tokens=5).token_ids


def test_plain_decoding_comes_first_and_the_others_take_turns(line: list[str], output: Path) -> None:
    assert main(line) == 0
    written = [record["method"] for record in records(output)]
    orders = [tuple(written[start : start + 3]) for start in range(0, EVERYTHING, 3)]
    assert {order[0] for order in orders} == {"ar"}
    assert len(set(orders)) == 2 and all(set(order) == set(METHODS) for order in orders)


def test_a_finished_run_measures_nothing_again(line: list[str], output: Path, capsys: Capture) -> None:
    assert main(line) == 0
    before = output.read_bytes()
    assert main(line) == 0
    assert output.read_bytes() == before
    assert f"{EVERYTHING} of {EVERYTHING} generations are there already" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [0, 7])
def test_a_half_written_line_is_redone_and_nothing_is_doubled(
    kept: int, line: list[str], output: Path, capsys: Capture
) -> None:
    assert main(line) == 0
    lines = output.read_bytes().splitlines(keepends=True)
    whole = b"".join(lines[:kept])
    output.write_bytes(whole + lines[kept][:-9])
    assert main(line) == 0
    assert output.read_bytes().startswith(whole)
    assert len(keys(output)) == EVERYTHING and set(keys(output).values()) == {1}
    assert "the last line was unfinished" in capsys.readouterr().err


def test_a_killed_run_goes_on(line: list[str], output: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=main, args=(line,))
    process.start()
    assert process.pid is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not output.exists() or output.read_bytes().count(b"\n") < 3):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    before = output.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert whole.count(b"\n") >= 3
    assert main(line) == 0
    assert output.read_bytes().startswith(whole)
    assert len(keys(output)) == EVERYTHING and set(keys(output).values()) == {1}


def test_a_full_disk_keeps_what_is_finished(
    line: list[str], output: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.write, []

    def full(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) < 6:
            return real(descriptor, data)
        if len(calls) == 6:
            return real(descriptor, data[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(infer.records.os, "write", full)
        assert main(line) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert len(records(output)) == 5
    assert main(line) == 0
    assert len(keys(output)) == EVERYTHING and set(keys(output).values()) == {1}


def test_ctrl_c_keeps_what_is_finished(line: list[str], output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = infer.measuring.decode_rounds
    started: list[str] = []

    def interrupted(target: Any, draft: Any, method: Any, *rest: Any, **options: Any) -> Iterator[Any]:
        started.append(method.name)
        for index, round_ in enumerate(real(target, draft, method, *rest, **options)):
            if len(started) == 9 and index == 1:
                raise KeyboardInterrupt
            yield round_

    with monkeypatch.context() as patch:
        patch.setattr(infer.measuring, "decode_rounds", interrupted)
        assert main(line) == 130
    assert len(records(output)) == 8 - 3  # the first 3 generations warm up
    assert main(line) == 0
    assert set(keys(output).values()) == {1}


def test_records_of_other_settings_are_not_mixed_in(line: list[str], output: Path, capsys: Capture) -> None:
    short = [*line, "limit=1"]
    assert main(short) == 0
    before = output.read_bytes()
    for change, named in (
        ("max_new_tokens=9", "max_new_tokens=5, this run has 9"),
        ("seed=1", "seed=0, this run has 1"),
        ("methods=[ar,dflash]", "made with methods="),
        ("dtype=bfloat16", "dtype="),
    ):
        assert main([*short, change]) == 2
        assert named in capsys.readouterr().err
    assert output.read_bytes() == before


def test_prompts_and_temperatures_may_be_added(line: list[str], output: Path) -> None:
    assert main([*line, "limit=1"]) == 0
    before = output.read_bytes()
    assert main([*line, "temperatures=[0,1]"]) == 0
    assert output.read_bytes().startswith(before)
    assert len(keys(output)) == 2 * EVERYTHING and set(keys(output).values()) == {1}


def test_two_prompts_alike_are_two(line: list[str], output: Path, tmp_path: Path) -> None:
    (tmp_path / "one, x.jsonl").write_text('{"prompt": "a"}\n' * 2, encoding="utf-8")
    assert main(line) == 0
    assert len(keys(output)) == EVERYTHING


def test_two_runs_do_not_share_a_folder(
    line: list[str], output: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer.benchmark_run.FileLock, "acquire", _taken)
    assert main(line) == 2
    assert "another process is writing to" in capsys.readouterr().err


def _taken(*_: Any, **__: Any) -> None:
    raise infer.benchmark_run.Timeout("lock")


def test_work_is_shared_out_evenly_however_it_comes() -> None:
    assert share_out([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    loads = [1, 1, 1, 2] * 10  # a set of chats with two turns in every fourth place
    for count in (2, 3):
        takers = share_out(loads, count)
        sums = [sum(load for load, taker in zip(loads, takers, strict=True) if taker == one) for one in range(count)]
        assert max(sums) - min(sums) <= max(loads)


def test_every_process_takes_its_share(line: list[str], output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in (1, 0):
        monkeypatch.setattr(
            infer.benchmark_run, "find_processes", lambda device, index=index: Processes(index, 2, device, lambda: None)
        )
        assert main(line) == 0
    shares = [keys(output), keys(output.with_name("records-1.jsonl"))]
    assert not shares[0].keys() & shares[1].keys() and all(shares)
    assert len(read_measurements(output.parent)) == EVERYTHING
    monkeypatch.undo()
    assert main(line) == 0  # one process finds everything done
    assert len(records(output)) == sum(shares[0].values())


# The lossless check


def scripted_methods(target: Any, draft: Any, method: Any, prompt_ids: list[int], **options: Any) -> Iterator[Any]:
    """A stand-in for the decoding loop in which one method's third token is another."""
    tokens = ids_of("abXdefgh" if method.name == "domino" else "abcdefgh")
    return scripted([[token] for token in tokens])(stopping=Stopping(options["max_new_tokens"]))


@pytest.mark.parametrize(("dtype", "near"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_a_difference_is_recorded_and_judged_by_the_number_format(
    dtype: str, near: bool, line: list[str], output: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer.measuring, "decode_rounds", scripted_methods)
    monkeypatch.setattr("infer.compare.NEAR_TIE_STEPS", 1e9 if near else 0)
    allowed = dtype == "bfloat16" and near
    assert main([*line, f"dtype={dtype}"]) == (0 if allowed else 1)
    different = [record for record in records(output) if "difference" in record]
    assert {record["method"] for record in different} == {"domino"} and len(different) == 4
    for record in different:
        assert (record["difference"]["first"], record["difference"]["tokens"]) == (2, 1)
        assert record["difference"]["allowed"] is allowed
        assert record["token_ids"][2] == ids_of("X")[0]
    err = capsys.readouterr().err
    assert "tokens identical to plain decoding in 4 of 8 greedy generations" in err
    assert ("NOT LOSSLESS" in err) is not allowed


# Rows


def test_a_row_has_options_a_label_and_a_drafter_of_its_own(line: list[str], output: Path, folder: Path) -> None:
    rows = (
        "methods=[dominotree,{name: dominotree, node_budget: 2},{name: ddtree, label: small, node_budget: 1},"
        f'{{name: dflash, draft: "{folder / "dflash_draft"}"}}]'
    )
    assert main([*line, rows, "limit=1"]) == 0
    methods = Counter(record["method"] for record in records(output))
    assert methods == dict.fromkeys(["ar", "dominotree", "dominotree@2", "small", "dflash"], 3)
    drafters = json.loads((output.parent / "run.json").read_text(encoding="utf-8"))["identity"]["drafters"]
    assert drafters["dominotree"] == drafters["small"] != drafters["dflash"]
    assert "ar" not in drafters


def test_budgets_multiply_the_trees_that_have_none_of_their_own(line: list[str], output: Path) -> None:
    rows = "methods=[ar,domino,ddtree,{name: dominotree, node_budget: 3}]"
    assert main([*line, rows, "node_budgets=[2,4]", "limit=1"]) == 0
    assert {record["method"] for record in records(output)} == {"ar", "domino", "ddtree@2", "ddtree@4", "dominotree@3"}


# Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["datasets=[]"], "datasets= names no prompts"),
        (["datasets=[nowhere]"], "nowhere, which is neither one of gsm8k"),
        (["datasets=[missing.jsonl]"], "cannot read the prompt file"),
        (["methods=[ar,nothing]"], "unknown method 'nothing'"),
        (["methods=[{name: dominotree, node_budgets: 3}]"], "there is no key methods[0].node_budgets"),
        (["methods=[3]"], "methods[0] must be"),
        (["methods=[dominotree,dominotree]"], "methods must differ, got dominotree twice"),
        (["methods=[ddtree,{name: dflash, label: ddtree}]"], "labels must differ, got ddtree twice"),
        (["methods=[{name: ar, label: plain}]"], "plain decoding once, labelled ar"),
        (["methods=[domino]", "draft=none"], "method=domino needs a drafter"),
        (["temperatures=[-1]"], "temperature must be 0"),
        (["max_new_tokens=300"], "may exceed the target's context of 256"),
        (["limit=0"], "limit must be at least 1, got 0"),
        (["output="], "output= needs a directory"),
    ],
)
def test_mistakes_are_one_line_and_write_no_record(
    words: list[str], message: str, line: list[str], output: Path, capsys: Capture
) -> None:
    assert main([*line, *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not output.exists()


def test_a_head_is_needed_where_a_method_corrects(line: list[str], folder: Path, capsys: Capture) -> None:
    assert main([*line, f"draft={folder / 'dflash_draft'}"]) == 2
    assert "needs a drafter with a Domino head" in capsys.readouterr().err


@pytest.mark.parametrize("command", [BENCHMARK, REPORT])
def test_help_explains_every_key(command: Command[Any]) -> None:
    text = help_text(command)
    for key in yaml.safe_load((CONF / f"{command.name}.yaml").read_text(encoding="utf-8")):
        assert key == "defaults" or f"  {key}: " in text


# Tracking, and the recipes


def test_a_tracker_gets_every_generation(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []

    class Tracked:
        def log(self, figures: dict[str, float]) -> None:
            logged.append(figures)

        def finish(self) -> None:
            logged.append({})

    monkeypatch.setattr(infer.benchmark_run, "start_wandb", lambda config, folder, info: Tracked())
    assert main([*line, "limit=1"]) == 0
    assert len(logged) == 10 and logged[-1] == {}
    assert logged[0].keys() == {"tau/one, x/T=0/ar", "seconds_per_token/one, x/T=0/ar"}


RECIPES = sorted(path.stem for path in (CONF / "experiment").glob("bench_*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs(
    recipe: str,
    line: list[str],
    output: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it stands but for the models, what was measured on them, and the prompts, which are tiny here."""
    measured = tmp_path_factory.mktemp("measured")
    real, asked, named = infer.benchmark_run.load_drafter, [], []

    def load_drafter(choice: DraftChoice, target: Any, **options: Any) -> Any:
        asked.append(str(choice.path))
        path = folder / ("dflash_draft" if "DFlash" in str(choice.path) else "draft")
        draft = real(DraftChoice("path", str(path)), target, **options)
        draft.directory = write_measured(target, draft, measured).folder
        return draft

    def load_prompt_sets(names: tuple[str, ...], limit: int | None) -> dict[str, list[NamedPrompt]]:
        named.extend(map(dataset_label, names))
        return {name: [NamedPrompt(name, "0", Prompt(("a",), name))] for name in named[:1]}

    monkeypatch.setattr(infer.benchmark_run, "load_drafter", load_drafter)
    monkeypatch.setattr(infer.benchmark_run, "load_prompt_sets", load_prompt_sets)
    prompts = [] if "paper" in recipe else ["datasets=[p.jsonl]"]
    assert main([f"experiment={recipe}", *line[:3], *prompts, "max_new_tokens=2", "dtype=float32"]) == 0
    found = keys(output)
    assert len(found) >= 6 and set(found.values()) == {1}
    if "paper" in recipe:
        assert any("z-lab" in path for path in asked)
        assert tuple(named) == PUBLISHED_SETS
        assert sorted({key[3] for key in found}) == ([0.0, 1.0] if "domino_" in recipe else [0.0, 0.5, 1.0])
