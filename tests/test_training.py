"""Training as a user runs it, on models so small that an update takes milliseconds."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny_training import losses, make_home, records, stopping_at, words
from torch._dynamo.utils import counters

from data.samples import load_samples
from dominotree.draft.checkpoint import load_draft
from dominotree.target import Target
from infer.generate import main as generate
from train.main import main as train
from train.tracking import Tracker
from train.updates import split_held_out
from train.validation import ValidationFigures, Validator


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("training"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_draft(folder).state_dict()


def test_the_head_is_trained_on_a_frozen_backbone_and_generate_reads_it(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(words(home, tmp_path / "run")) == 0
    before, after = weights(home / "dflash_draft"), weights(tmp_path / "run" / "last")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(name.startswith("head.") for name in after)
    trace = [record for record in records(tmp_path / "run") if "loss" in record]
    assert [record["lambda"] for record in trace] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])
    final = [record["final_loss"] for record in trace]
    assert final[-1] < final[0]
    last = records(tmp_path / "run")[-1]
    methods = ("dflash", "ddtree", "domino", "static_corrected", "dominotree")
    assert {*(f"tau/{name}" for name in methods), "accepted/domino/1", "held_out/accuracy"} <= last.keys()
    assert last["tau/domino"] >= 1
    provenance = json.loads((tmp_path / "run" / "last" / "provenance.json").read_text(encoding="utf-8"))
    assert provenance["update"] == 6 and provenance["config"]["stage"] == "domino"
    assert provenance["versions"]["torch"] and provenance["data_fingerprint"]
    capsys.readouterr()
    asked = [f"target={home / 'target'}", f"draft={tmp_path / 'run' / 'best'}", "prompt=Who is Ada?", "compare=true"]
    assert generate([*asked, "max_new_tokens=12"]) == 0
    assert "tokens identical (12 of 12)" in capsys.readouterr().err


def test_the_held_out_loss_is_the_plain_one_of_samples_that_are_never_trained_on(home: Path, tmp_path: Path) -> None:
    assert train(words(home, tmp_path / "run", "num_anchors=100", "decay_gamma=null")) == 0
    target = Target.load(str(home / "target"), dtype="float32")
    draft = load_draft(tmp_path / "run" / "last", dtype="float32")
    assert target.tokenizer is not None
    samples = load_samples(home / "data", target.tokenizer, max_length=80)
    found = {True: torch.zeros(()), False: torch.zeros(())}
    count = 0
    for index in split_held_out(len(samples), 2, seed=42)[1]:
        ids, mask = torch.tensor([samples[index].token_ids]), list(samples[index].loss_mask)
        features = target.features(ids, draft.config.target_layer_ids)
        for anchor in (place for place in range(len(mask) - 1) if mask[place] and mask[place + 1]):
            labels = [place for place in range(anchor + 1, anchor + 1 + draft.config.draft_length) if place < len(mask)]
            labels = [place for place in labels if mask[place]]
            anchors, keep = torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool)
            hidden = draft.train_hidden(ids[:, anchor : anchor + 1], anchors, keep, features, target.embed)[:, 0]
            hidden = hidden[:, hidden.shape[1] - draft.config.draft_length :][:, : len(labels)]
            base = target.lm_head(hidden)
            final = draft.teacher_forced_logits(hidden, base, ids[:, anchor : anchor + len(labels)], target.embed)
            for is_final, logits in ((True, final), (False, base)):
                found[is_final] += torch.nn.functional.cross_entropy(logits[0], ids[0, labels], reduction="sum")
            count += len(labels)
    last = records(tmp_path / "run")[-1]
    assert last["held_out/final_loss"] == pytest.approx(float(found[True] / count), rel=1e-4)
    assert last["held_out/base_loss"] == pytest.approx(float(found[False] / count), rel=1e-4)
    assert last["held_out/supervised_tokens"] == count


def test_backbone_and_head_are_trained_together_and_a_backbone_alone(home: Path, tmp_path: Path) -> None:
    together = words(home, tmp_path / "both", "backbone=trained", "gradient_checkpointing=true")
    assert train(together) == 0
    assert not torch.equal(
        weights(home / "dflash_draft")["backbone.fc.weight"], weights(tmp_path / "both" / "last")["backbone.fc.weight"]
    )
    alone = words(home, tmp_path / "alone", "stage=dflash", "backbone=trained", "draft=fresh", "draft.num_features=3")
    assert train(alone) == 0
    assert load_draft(tmp_path / "alone" / "last").head is None
    assert losses(tmp_path / "alone")[-1] < losses(tmp_path / "alone")[0]


def test_features_made_ahead_of_an_update_are_those_made_when_it_is_due(home: Path, tmp_path: Path) -> None:
    for name, more in {
        "due": ["features=online"],
        "ahead": ["features=ahead"],
        "elsewhere": ["features=ahead", "features_device=cpu"],
    }.items():
        run = words(home, tmp_path / name, "backbone=trained", "validation.every=2", "optim.micro_batch_size=2", *more)
        assert train(run) == 0
    assert losses(tmp_path / "ahead") == losses(tmp_path / "elsewhere") == losses(tmp_path / "due")


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiling_changes_no_loss(home: Path, tmp_path: Path) -> None:
    counters.clear()
    graphs = []
    for name in ("false", "true"):
        assert train(words(home, tmp_path / name, "backbone=trained", f"compile={name}", "optim.updates=2")) == 0
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == 0 < graphs[1]
    assert losses(tmp_path / "true") == pytest.approx(losses(tmp_path / "false"), rel=1e-5)


def test_gradient_checkpointing_changes_no_loss(home: Path, tmp_path: Path) -> None:
    for name in ("true", "false"):
        assert train(words(home, tmp_path / name, "backbone=trained", f"gradient_checkpointing={name}")) == 0
    assert losses(tmp_path / "true") == pytest.approx(losses(tmp_path / "false"), rel=1e-6)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(words(home, tmp_path / "whole", "backbone=trained")) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "log", stopping_at(5))
        assert train(words(home, tmp_path / "halted", "backbone=trained")) == 130
    assert train(words(home, tmp_path / "halted", "backbone=trained")) == 0
    by_update = {record["update"]: record["loss"] for record in records(tmp_path / "halted") if "loss" in record}
    assert [by_update[update] for update in range(1, 7)] == losses(tmp_path / "whole")
    ours, theirs = weights(tmp_path / "halted" / "last"), weights(tmp_path / "whole" / "last")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_micro_batches_change_nothing_but_the_memory(home: Path, tmp_path: Path) -> None:
    for size in (1, 4):
        assert train(words(home, tmp_path / str(size), f"optim.micro_batch_size={size}")) == 0
    one, four = records(tmp_path / "1"), records(tmp_path / "4")
    assert [r["loss"] for r in one[:6]] == pytest.approx([r["loss"] for r in four[:6]], rel=1e-4)
    assert [r["lambda"] for r in one[:6]] == [r["lambda"] for r in four[:6]]


def test_without_a_prefix_the_gru_stays_silent(home: Path, tmp_path: Path) -> None:
    assert train(words(home, tmp_path / "run", "correction=hidden_only")) == 0
    after = weights(tmp_path / "run" / "last")
    assert not any(after[name].any() for name in after if "prefix_gru" in name)
    assert after["head.embed_proj.2.weight"].any()


def test_the_ablations_train(home: Path, tmp_path: Path) -> None:
    for name in ("no_curriculum", "training_time_test"):
        assert train(words(home, tmp_path / name, f"experiment={name}")) == 0
    assert all(record["lambda"] == 0 for record in records(tmp_path / "no_curriculum") if "lambda" in record)
    assert losses(tmp_path / "no_curriculum") != losses(tmp_path / "training_time_test")


def test_a_loss_over_the_frequent_tokens_still_learns(home: Path, tmp_path: Path) -> None:
    assert train(words(home, tmp_path / "run", "vocab_subset=20", "optim.updates=15", "backbone=trained")) == 0
    trace = losses(tmp_path / "run")
    assert sum(trace[-3:]) < sum(trace[:3])


def test_only_the_newest_checkpoints_are_kept(home: Path, tmp_path: Path) -> None:
    assert train(words(home, tmp_path / "run", "checkpoint_every=1", "keep_last=2")) == 0
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["update-00000005", "update-00000006"]


def test_a_full_disk_leaves_the_checkpoint_before_whole(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = torch.save

    def fill_up(state: Any, path: Path) -> None:
        if state["update"] > 2:
            # A real limit on the size of files stands for the disk.
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            try:
                save(state, path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        save(state, path)

    monkeypatch.setattr(signal, "SIGXFSZ", signal.signal(signal.SIGXFSZ, signal.SIG_IGN), raising=False)
    monkeypatch.setattr(torch, "save", fill_up)
    assert train(words(home, tmp_path / "run", "checkpoint_every=2")) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "cannot save the checkpoint of update 4" in lines[0]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["update-00000002"]
    assert load_draft(tmp_path / "run" / "last").head is not None
    monkeypatch.undo()
    assert train(words(home, tmp_path / "run", "checkpoint_every=2")) == 0


def test_best_is_the_drafter_that_decoded_best_also_across_a_stop(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([3.0, 2.0, 2.5])

    def pretend(self: Validator, *_: Any) -> ValidationFigures:
        tau = next(taus)
        return ValidationFigures({"ddtree": 9.0, "dominotree": tau}, {"dominotree": [tau - 1]})

    monkeypatch.setattr(Validator, "run", pretend)
    run = words(home, tmp_path / "run", "validation.every=2", "checkpoint_every=2")
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "log", stopping_at(3))
        assert train(run) == 130
    assert train(run) == 0
    best = json.loads((tmp_path / "run" / "best" / "provenance.json").read_text(encoding="utf-8"))
    assert best["update"] == 2


def test_figures_are_written_once_however_often_a_run_is_stopped(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = words(home, tmp_path / "run", "checkpoint_every=2")
    for last in (2, 4, 6):
        with monkeypatch.context() as patch:
            patch.setattr(Tracker, "log", stopping_at(last))
            assert train(run) == 130
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"update": 9, "lo')
    assert train(run) == 0
    assert [record["update"] for record in records(tmp_path / "run") if "loss" in record] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("backbone", ["frozen", "trained"])
@pytest.mark.parametrize("prefixes", ["teacher_forced", "self_generated"])
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_half_precision_learns_nearly_the_same(
    precision: str, dtype: str, prefixes: str, backbone: str, home: Path, tmp_path: Path, exact_losses: list[float]
) -> None:
    more = [f"precision={precision}", f"target.dtype={dtype}", f"prefixes={prefixes}", f"backbone={backbone}"]
    AcceleratorState._reset_state(reset_partial_state=True)  # one process trains in several precisions here
    assert train(words(home, tmp_path / "run", *more, "optim.updates=2")) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    assert losses(tmp_path / "run")[0] == pytest.approx(exact_losses[0], rel=0.02)


@pytest.fixture(scope="module")
def exact_losses(home: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("exact")
    assert train(words(home, folder / "run", "optim.updates=2")) == 0
    return losses(folder / "run")


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["draft=fresh"], ["backbone=frozen", "draft=fresh"]),
        (["stage=dflash"], ["stage=dflash", "backbone=frozen"]),
        (["stage=both"], ["stage", "both"]),
        (["optim.learning_rate=0"], ["optim.learning_rate", "0"]),
        (["optim.epochs=2"], ["optim.updates or optim.epochs"]),
        (["optim.lr=1"], ["optim=adamw has no lr"]),
        (["+typo=1"], ["typo"]),
        (["lambda_start=1.5"], ["lambda_start", "1.5"]),
        (["validation.samples=12"], ["12 samples are too few"]),
        (["max_length=8"], ["too_long 12"]),
        (["data_dir=nowhere"], ["nowhere"]),
        (["features=cached"], ["features"]),
        (["features_device=cpu"], ["features_device=cpu goes with features=ahead"]),
        (["features=ahead", "features_device=cuda:7"], ["cuda:7"]),
        (["draft=DIR/other_draft"], ["does not fit"]),
        (["target=DIR/base"], ["chat template"]),
        (["max_length=300"], ["max_length=300", "256"]),
        (["validation.max_new_tokens=250"], ["validation.max_new_tokens=250", "256"]),
        (["device=cuda:7"], ["cuda"]),
        (["device=banana"], ["banana"]),
        (["stage=dflash", "backbone=trained", "draft=DIR/draft"], ["has a Domino head"]),
        (["draft=DIR/draft", "head.emb_dim=9"], ["head.* cannot change"]),
        (["optim.learning_rate=1e30", "optim.warmup_ratio=0"], ["the gradient is", "optim.learning_rate"]),
    ],
)
def test_a_mistake_is_one_line(
    more: list[str], parts: list[str], home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(home, tmp_path / "run", *(word.replace("DIR", str(home)) for word in more))
    assert train(given) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and all(part in lines[0] for part in parts)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_directory_of_another_recipe_is_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(words(home, tmp_path / "run")) == 0
    assert train(words(home, tmp_path / "run", "seed=7")) == 2
    assert "seed=42" in capsys.readouterr().err
    assert train(words(home, tmp_path / "run", "resume=never")) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_weights_and_biases_offline_continues_the_same_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    for _ in range(2):
        assert train(words(home, tmp_path / "run", "tracking.wandb=offline")) == 0
    stored = (tmp_path / "run" / "wandb_run_id").read_text(encoding="utf-8").strip()
    runs = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert runs and all(run.name.endswith(stored) for run in runs)
    assert (tmp_path / "run" / "acceptance.png").stat().st_size > 1000
