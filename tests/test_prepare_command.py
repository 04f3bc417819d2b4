"""The command as a user meets it: killed at any point and run again, nothing is lost and nothing doubled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_templates import PLAIN, talking_target

from data.conversations import ConversationStore, Record
from data.features import FeatureCache, feature_key
from data.prepare import PREPARE, main
from data.samples import load_samples
from dominotree.command import compose_config, help_text
from dominotree.target import Target

Capture = pytest.CaptureFixture[str]
COUNT = 14


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that talks, another one, one that has no template, and one that never ends a user turn."""
    folder = tmp_path_factory.mktemp("models")
    for name, target in {
        "talker": talking_target(),
        "other": talking_target(seed=1),
        "bare": talking_target(None),
        "endless": talking_target(PLAIN, end_every=999),
    }.items():
        target.model.save_pretrained(folder / name)
        assert target.tokenizer is not None
        target.tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def words(models: Path, tmp_path: Path) -> list[str]:
    return [
        f"target={models / 'talker'}",
        f"output={tmp_path / 'out'}",
        f"count={COUNT}",
        "data.turns=2",
        "data.max_user_tokens=30",
        'data.openers=["","What","a,b"]',
        "max_answer_tokens=20",
        "max_length=150",
        "batch_size=4",
        "dtype=float32",
        "device=cpu",
    ]


def lines(folder: Path) -> list[Record]:
    return sorted(ConversationStore(folder / "conversations.jsonl"), key=lambda record: record["id"])


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, appends: int, *, after_writing: bool) -> None:
    """Die at the so-manieth append, before or after its lines are on the disk."""
    append, left = ConversationStore.append, [appends]

    def dying(store: ConversationStore, records: Sequence[Record]) -> None:
        left[0] -= 1
        if left[0] == 0 and not after_writing:
            raise Killed
        append(store, records)
        if left[0] == 0:
            raise Killed

    monkeypatch.setattr(ConversationStore, "append", dying)


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """What an uninterrupted run of `words` writes."""
    folder = tmp_path_factory.mktemp("whole")
    words = [f"target={models / 'talker'}", f"output={folder}", f"count={COUNT}", "data.turns=2"]
    words += ["data.max_user_tokens=30", 'data.openers=["","What","a,b"]', "max_answer_tokens=20", "max_length=150"]
    assert main([*words, "batch_size=7", "dtype=float32", "device=cpu"]) == 0
    return lines(folder)


def test_a_run_writes_every_id_once(whole: list[Record]) -> None:
    assert [record["id"] for record in whole] == list(range(COUNT))
    kept = [record for record in whole if "messages" in record]
    assert len(kept) > COUNT // 2
    for record in kept:
        opener = ("", "What", "a,b")[record["id"] % 3]
        assert record["messages"][0]["content"].startswith(opener)
        assert [message["role"] for message in record["messages"]][:2] == ["user", "assistant"]


@pytest.mark.parametrize("appends", [1, 2, 5])
@pytest.mark.parametrize("after_writing", [True, False])
def test_a_killed_run_goes_on(
    words: list[str],
    whole: list[Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    appends: int,
    after_writing: bool,
) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, appends, after_writing=after_writing)
        with pytest.raises(Killed):
            main(words)
    assert 0 < len(lines(tmp_path / "out")) < COUNT or appends == 1
    assert main(words) == 0
    assert lines(tmp_path / "out") == whole


def test_a_half_written_line_is_written_again(words: list[str], whole: list[Record], tmp_path: Path) -> None:
    assert main(words) == 0
    path = tmp_path / "out" / "conversations.jsonl"
    content = path.read_bytes()
    for part in (0.3, 0.8):
        path.write_bytes(content[: int(len(content) * part)])
        assert main(words) == 0
        assert lines(tmp_path / "out") == whole


def test_a_larger_count_adds_to_what_is_there(words: list[str], whole: list[Record], tmp_path: Path) -> None:
    assert main([*words, "count=5"]) == 0
    first = (tmp_path / "out" / "conversations.jsonl").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "out" / "conversations.jsonl").read_bytes().startswith(first)
    assert lines(tmp_path / "out") == whole


def test_the_counts_are_reported_and_stored(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main(words) == 0
    captured = capsys.readouterr()
    found = lines(tmp_path / "out")
    dropped = [record["dropped"] for record in found if "dropped" in record]
    provenance = json.loads((tmp_path / "out" / "prepare.json").read_text())
    assert provenance["counts"]["kept"] == COUNT - len(dropped)
    assert sum(provenance["counts"]["dropped"].values()) == len(dropped)
    assert sum(provenance["counts"]["cut_short"].values()) == sum("cut" in record for record in found)
    assert provenance["versions"]["torch"]
    assert provenance["config"]["count"] == COUNT
    assert f"{COUNT - len(dropped)} conversations" in captured.err
    assert captured.out == ""
    assert main(words) == 0, "a finished directory is left as it is"
    assert lines(tmp_path / "out") == found


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("temperature=0.5", "temperature=0.0, this run has 0.5"),
        ("data.turns=1", "data="),
        ("max_answer_tokens=21", "max_answer_tokens=20, this run has 21"),
        ("seed=1", "seed=0, this run has 1"),
        ("target={other}", "target_fingerprint="),
    ],
)
def test_other_settings_do_not_mix(
    words: list[str], models: Path, tmp_path: Path, capsys: Capture, change: str, what: str
) -> None:
    assert main([*words, "count=2"]) == 0
    before = (tmp_path / "out" / "conversations.jsonl").read_bytes()
    capsys.readouterr()
    assert main([*words, change.format(other=models / "other")]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert "use the same settings, or another output=" in error
    assert error.count("\n") == 1
    assert (tmp_path / "out" / "conversations.jsonl").read_bytes() == before
    assert main([*words, "count=2", "batch_size=1"]) == 0


def test_prompts_of_a_file_are_answered(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "hi"}\n{"turns": ["one", "two"]}\n{"prompt": " "}\n')
    words = [word for word in words if not word.startswith(("data.", "count"))]
    assert main([*words, "data=custom", f"data.path={path}"]) == 0
    first, second, third = lines(tmp_path / "out")
    assert first["messages"][0] == {"role": "user", "content": "hi"}
    assert [message["content"] for message in second["messages"] if message["role"] == "user"][:1] == ["one"]
    assert third == {"id": 2, "dropped": "empty_user_turn", "source": str(path)}


def test_the_answers_that_a_file_has_can_be_kept(words: list[str], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "q"}) + "\n")
    words = [word for word in words if not word.startswith(("data.", "count"))]
    assert main([*words, "data=custom", f"data.path={path}", "answers=given"]) == 0
    assert [record.get("messages") for record in lines(tmp_path / "out")] == [messages, None]


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_features_are_stored_beside_the_conversations(
    words: list[str], models: Path, tmp_path: Path, capsys: Capture, storage: str
) -> None:
    assert main([*words, f"features={storage}", "layer_ids=[1,3]"]) == 0
    assert f"{storage}: " in capsys.readouterr().err
    target = Target.load(models / "talker")
    assert target.tokenizer is not None
    samples = load_samples(tmp_path / "out", target.tokenizer, max_length=150)
    cache = FeatureCache.open(tmp_path / "out" / "features", feature_key(target, [1, 3]))
    for sample in samples:
        expected = target.features(torch.tensor([sample.token_ids]), [1, 3])[0]
        off = (cache.get(sample.sample_id, sample.token_ids).float() - expected).norm() / expected.norm()
        assert off < 0.02
    assert main([*words, f"features={storage}", "layer_ids=[1,3]"]) == 0
    assert "features: 0 samples, 0 tokens" in capsys.readouterr().err


def test_nothing_kept_is_an_error_with_the_counts(words: list[str], models: Path, capsys: Capture) -> None:
    assert main([*words, f"target={models / 'endless'}", "data.max_user_tokens=1"]) == 2
    error = capsys.readouterr().err
    assert f"none of {COUNT} prompts of synthesis gave a conversation: user_turn_unfinished {COUNT}" in error


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("ouput=x", "there is no key ouput; did you mean output"),
        ("output=", "output= needs a directory"),
        ("count=null", "data=synthesis has no end of its own"),
        ("count=0", "count must be at least 1, got 0"),
        ("batch_size=0", "batch_size must be at least 1"),
        ("temperature=-1", "temperature must be 0 (greedy) or positive, got -1.0"),
        ("data.top_p=0", "top_p must lie above 0"),
        ("features=float32", "features must be one of none, bfloat16, int8, got float32"),
        ("answers=mine", "answers must be one of target, given"),
        ("answers=given", "answers=given keeps a data set's answers"),
        ("layer_ids=[-1]", "layer_ids must not be negative"),
        ("dtype=int4", "dtype must be auto, float32"),
        ("device=tpu9", "device must be"),
        ("data=nothing", "data=nothing is neither one of"),
        ("data.path=x", "data=synthesis has no path; it belongs to data="),
        ("data=custom", "data.path has no value; give data.path="),
        ("target={bare}", "no chat template"),
        ("target=/nowhere", "target=/nowhere is neither"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], models: Path, tmp_path: Path, capsys: Capture, word: str, what: str
) -> None:
    kept = [other for other in words if not other.startswith("data.") or not word.startswith("data=")]
    assert main([*kept, word.format(bare=models / "bare")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert what in captured.err
    assert not (tmp_path / "out" / "conversations.jsonl").exists()


def test_a_missing_output_is_named(capsys: Capture) -> None:
    assert main(["count=3"]) == 2
    assert "output has no value; give output=" in capsys.readouterr().err


def test_help_names_every_source(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.strip() == help_text(PREPARE)
    for name in ("synthesis", "perfectblend", "sharegpt", "ultrachat", "nemotron", "gsm8k", "custom"):
        assert name in text


@pytest.mark.parametrize("name", sorted(path.stem for path in (PREPARE.conf / "data").glob("*.yaml")))
def test_every_source_composes(name: str) -> None:
    words = ["output=x", "count=3", f"data={name}", *(["data.path=p.jsonl"] if name == "custom" else [])]
    config: Any = compose_config(PREPARE, words)
    assert config.data.source in ("synthesis", "benchmark", "dataset")


def test_a_second_run_at_the_same_time_is_refused(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    store = ConversationStore(tmp_path / "out" / "conversations.jsonl")
    store.claim()
    assert main(words) == 2
    assert "another process is writing" in capsys.readouterr().err
    store.close()
