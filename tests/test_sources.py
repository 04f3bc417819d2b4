"""Prompts arrive in the words of the papers, from chats of any common shape, under ids that stay the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from data.answers import ChatPrompt
from data.benchmarks import BENCHMARKS
from data.config import DataChoice
from data.conversations import Dropped
from data.sources import open_source, row_messages
from dominotree.errors import UserError

CONF = Path(__file__).resolve().parents[1] / "conf" / "data"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

Hub = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Serve these rows for any data set; what was asked for is in the list returned."""

    def serve(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def load(path: str, config: str | None, *, split: str, data_files: list[str] | None) -> datasets.Dataset:
            asked.append((path, config, split, data_files))
            return datasets.Dataset.from_list(rows)

        monkeypatch.setattr(datasets, "load_dataset", load)
        return asked

    return serve


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def choice(path: Path | str, **options: Any) -> DataChoice:
    return DataChoice("dataset", path=str(path), **options)


def turns(*choices: Any) -> list[tuple[str | None, ...]]:
    source = open_source(*choices)
    return [prompt.turns for prompt in source.prompts(set()) if isinstance(prompt, ChatPrompt)]


WORDS = [
    ("gsm8k", {"question": "1+{1}?", "answer": "2"}, [f"1+{{1}}?\n{BOXED}"]),
    ("math500", {"problem": "x"}, [f"x\n{BOXED}"]),
    ("aime24", {"problem": "x"}, [f"x\n{BOXED}"]),
    ("aime25", {"problem": "x"}, [f"x\n{BOXED}"]),
    (
        "humaneval",
        {"prompt": "def f():\n"},
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ],
    ),
    ("mbpp", {"prompt": "Sort."}, ["Sort."]),
    ("lbpp", {"instruction": "Sort."}, ["Sort."]),
    (
        "swe_bench",
        {"problem_statement": "It breaks."},
        ["Problem Statement:\nIt breaks.\nPlease fix the issue described above."],
    ),
    ("mt_bench", {"prompt": ["one", "two"]}, ["one", "two"]),
    ("alpaca", {"instruction": "Add.", "input": "1, 2"}, ["Add.\n\nInput:\n1, 2"]),
    ("alpaca", {"instruction": "Sing.", "input": ""}, ["Sing."]),
]
ROLE = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\nQ\n\n"
)


@pytest.mark.parametrize(("name", "row", "expected"), WORDS)
def test_benchmarks_are_asked_in_the_words_of_the_papers(
    hub: Hub, name: str, row: dict[str, Any], expected: list[str]
) -> None:
    hub([row])
    assert turns(DataChoice("benchmark", name=name), None) == [tuple(expected)]


@pytest.mark.parametrize(
    ("code", "form"),
    [
        ("class S: ...", "### Format: Use the following code structure:\n```python\nclass S: ...\n```"),
        ("", "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```"),
    ],
)
def test_livecodebench_shows_the_code_to_start_from(hub: Hub, code: str, form: str) -> None:
    asked = hub([{"question_content": "Q", "starter_code": code}])
    expected = f"{ROLE}{form}\n\n### Answer: (use the provided format with backticks)"
    assert turns(DataChoice("benchmark", name="livecodebench"), None) == [(expected,)]
    assert [file.rsplit("/")[-1] for file in asked[0][3]] == ["test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))]


def test_every_benchmark_has_a_config_file_and_a_place() -> None:
    places = {
        "gsm8k": ("openai/gsm8k", "main", "test", 128),
        "math500": ("HuggingFaceH4/MATH-500", None, "test", 128),
        "aime24": ("HuggingFaceH4/aime_2024", None, "train", 30),
        "aime25": ("MathArena/aime_2025", None, "train", 30),
        "humaneval": ("openai/openai_humaneval", None, "test", 164),
        "mbpp": ("google-research-datasets/mbpp", "sanitized", "test", 128),
        "swe_bench": ("princeton-nlp/SWE-bench_Lite", None, "test", 128),
        "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train", 80),
        "alpaca": ("tatsu-lab/alpaca", None, "train", 128),
    }
    for name, benchmark in BENCHMARKS.items():
        content = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        assert DataChoice(**content) == DataChoice("benchmark", name=name)
        if name in places:
            assert (benchmark.path, benchmark.config, benchmark.split, benchmark.count) == places[name]


def test_a_large_benchmark_is_shuffled_as_in_the_papers_and_a_small_one_is_not(hub: Hub) -> None:
    rows = [{"question": str(index)} for index in range(200)]
    hub(rows)
    expected = datasets.Dataset.from_list(rows).shuffle(seed=0).select(range(128))["question"]
    found = turns(DataChoice("benchmark", name="gsm8k"), None)
    assert [str(turn).split("\n")[0] for (turn,) in found] == list(expected)
    hub(rows[:128])
    assert [str(turn).split("\n")[0] for (turn,) in turns(DataChoice("benchmark", name="gsm8k"), None)] == [
        str(index) for index in range(128)
    ]
    assert len(turns(DataChoice("benchmark", name="gsm8k"), 5)) == 5
    with pytest.raises(UserError, match=r"there is no benchmark gsm9k; choose data\.name= of gsm8k, "):
        open_source(DataChoice("benchmark", name="gsm9k"), None)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("perfectblend", ("mlabonne/open-perfectblend", None, "train", None)),
        ("sharegpt", ("Aeala/ShareGPT_Vicuna_unfiltered", None, "train", None)),
        ("ultrachat", ("HuggingFaceH4/ultrachat_200k", None, "train_sft", None)),
        ("nemotron", ("nvidia/Nemotron-Post-Training-Dataset-v2", None, "chat+code+math+stem", None)),
    ],
)
def test_the_papers_training_sets_have_names(hub: Hub, name: str, place: tuple[Any, ...]) -> None:
    content = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    column = content["column"]
    message = {"from": "human", "value": "q"} if column == "conversations" else {"role": "user", "content": "q"}
    asked = hub([{column: [message]}, {column: [message]}])
    assert turns(DataChoice(**content), None) == [("q",), ("q",)]
    assert asked == [place]


def test_ids_stay_the_same_when_more_is_asked_for(hub: Hub) -> None:
    hub([{"prompt": str(index)} for index in range(50)])
    few = list(open_source(choice("owner/name"), 10).prompts({2, 5}))
    more = list(open_source(choice("owner/name"), None).prompts({2, 5}))
    assert more[:8] == few
    assert [prompt.prompt_id for prompt in few] == [0, 1, 3, 4, 6, 7, 8, 9]
    assert len(more) == 48
    assert {str(prompt.turns[0]) for prompt in more} < {str(index) for index in range(50)}


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [USER, ANSWER]),
        ({"messages": [{"role": "User", "content": "q", "name": "x"}]}, [USER]),
        ({"messages": [USER, ANSWER | {"finish_reason": None}]}, [USER, ANSWER]),
        ({"messages": [USER, ANSWER | {"finish_reason": "length"}]}, [USER, ANSWER | {"finish_reason": "length"}]),
        ({"turns": ["q", "q"]}, [USER, USER]),
        ({"prompt": "q", "turns": None}, [USER]),
        ({"instruction": "q", "input": "i"}, [{"role": "user", "content": "q\n\ni"}]),
        ({"instruction": "q", "input": "", "output": "o"}, [USER]),
        ({"text": "q"}, [USER]),
    ],
)
def test_rows_of_the_common_shapes_are_messages(row: dict[str, Any], expected: list[dict[str, str]]) -> None:
    assert row_messages(row) == expected


def test_a_named_column_is_the_one_read() -> None:
    row = {"prompt": "no", "ask": "q"}
    assert row_messages(row, "ask") == [USER]
    with pytest.raises(Dropped, match="no_prompt_column"):
        row_messages(row, "missing")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "a"}, "no_prompt_column"),
        ({"messages": []}, "no_prompt_column"),
        ({"prompt": 3}, "not_text"),
        ({"messages": [3]}, "not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not_text"),
        ({"messages": [{"role": "user", "content": None}]}, "not_text"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "unknown_role"),
        ({"messages": [USER, SYSTEM]}, "misplaced_system"),
        ({"messages": [SYSTEM, ANSWER]}, "no_user_turn"),
        ({"prompt": " \n"}, "empty_user_turn"),
        ({"prompt": "\ud800"}, "not_unicode"),
    ],
)
def test_a_row_without_a_prompt_says_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Dropped) as dropped:
        row_messages(row)
    assert dropped.value.reason == reason


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix.lower() == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        datasets.Dataset.from_list(rows).to_csv(path)
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.parquet", "p.csv", "P.JSONL"])
def test_files_are_read_in_their_own_order(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"question {index}, \u2028é"} for index in range(4)]
    path = write(tmp_path / name, rows)
    assert turns(choice(path), None) == [(row["prompt"],) for row in rows]
    assert turns(choice(path), 2) == [(row["prompt"],) for row in rows[:2]]


def test_a_conversation_gives_its_user_turns_or_all_of_itself(tmp_path: Path) -> None:
    messages = [SYSTEM, USER, ANSWER, {"role": "user", "content": "r"}, ANSWER]
    path = write(tmp_path / "p.jsonl", [{"messages": messages}, {"messages": [ANSWER]}, {"messages": [USER]}])
    source = open_source(choice(path), None)
    first, dropped, last = source.prompts(set())
    assert isinstance(first, ChatPrompt)
    assert (first.turns, first.history) == (("q", "r"), (SYSTEM,))
    assert dropped == {"id": 1, "dropped": "no_user_turn", "source": str(path)}
    assert isinstance(last, ChatPrompt)
    kept, *dropped_too = source.given(set())
    assert kept == {"id": 0, "messages": messages, "source": str(path)}
    assert [record["dropped"] for record in dropped_too] == ["no_user_turn", "no_assistant_turn"]
    assert [record["id"] for record in source.given({0})] == [1, 2]


def test_a_file_that_grows_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a"}])
    assert turns(choice(path), None) == [("a",)]
    write(path, [{"prompt": "a"}, {"prompt": "b"}])
    assert turns(choice(path), None) == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"p.jsonl line 2 is not JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n\n[1]\n', r"p.jsonl line 3 must be a JSON object, got \[1\]"),
        ("p.jsonl", b" \n", "holds no rows"),
        ("p.jsonl", b'{"prompt": "\xff"}', "is not UTF-8 text"),
        ("p.json", b"{", "cannot read the data set .*p.json"),
        ("p.parquet", b"junk", "cannot read the data set .*p.parquet"),
        ("p.txt", b"hello", r"must end in .jsonl, .json, .parquet, .csv, or be a directory or a hub id"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=what) as error:
        open_source(choice(tmp_path / name), None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'owner/name' on the Hub\nmore"),
        datasets.exceptions.DatasetNotFoundError("Dataset 'owner/name' doesn't exist on the Hub."),
        ValueError('Unknown split "train". Should be one of ["test"].'),
    ],
)
def test_a_hub_that_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"cannot read the data set owner/name \(split train\): ") as refused:
        open_source(choice("owner/name"), None)
    assert str(error).splitlines()[0] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_empty_data_set_is_refused(hub: Hub) -> None:
    hub([])
    with pytest.raises(UserError, match="owner/name holds no rows"):
        open_source(choice("owner/name"), None)


def test_synthesis_takes_its_openers_in_turn() -> None:
    asked = DataChoice("synthesis", turns=2, openers=("", "What"))
    prompts = list(open_source(asked, 3).prompts(set()))
    assert prompts == [
        ChatPrompt(0, (None, None), "synthesis"),
        ChatPrompt(1, (None, None), "synthesis", opener="What"),
        ChatPrompt(2, (None, None), "synthesis"),
    ]
    assert all(prompt.opener == "" for prompt in open_source(DataChoice("synthesis"), 3).prompts(set()))
