"""Training by several processes: the same run as by one, whatever the engine, and whatever happens to one of them.

Every file of conf/accelerate is launched here, with two processes on the CPU; GPUs and NCCL are not.
"""

from __future__ import annotations

import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from tiny_training import finish, free_port, launch, losses, make_home, records, stopping_at, words

from dominotree.command import compose_config
from dominotree.draft.checkpoint import load_draft
from dominotree.errors import UserError
from train import setup
from train.main import TRAIN
from train.main import main as train
from train.tracking import Tracker

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
# Three samples an update: one process has one fewer, and in its second step none at all.
UNEVEN = ("optim.batch_size=3", "optim.micro_batch_size=1", "backbone=trained")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def alone(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uneven run as one process trains it."""
    output = tmp_path_factory.mktemp("alone") / "run"
    assert train(words(home, output, *UNEVEN)) == 0
    return output


def assert_same_run(output: Path, other: Path, tolerance: float = 1e-4) -> None:
    for figure in ("loss", "gradient_norm", "lambda", "learning_rate", "supervised_tokens"):
        ours, theirs = ([record[figure] for record in records(run) if figure in record] for run in (output, other))
        assert ours == pytest.approx(theirs, rel=tolerance), figure
    ours, theirs = (load_draft(run / "last").state_dict() for run in (output, other))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=10 * tolerance, atol=tolerance)


def test_two_processes_train_as_one_does(home: Path, alone: Path, tmp_path: Path) -> None:
    finish(launch("cpu", words(home, tmp_path / "run", *UNEVEN)))
    assert_same_run(tmp_path / "run", alone)
    assert records(tmp_path / "run")[-1]["tau/domino"] == pytest.approx(records(alone)[-1]["tau/domino"])


def test_two_machines_train_as_one_process_does(home: Path, alone: Path, tmp_path: Path) -> None:
    port, run = free_port(), words(home, tmp_path / "run", *UNEVEN)
    machines = [
        launch("multinode", run, "--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", port=port)
        for rank in (0, 1)
    ]
    for machine in machines:
        finish(machine)
    assert_same_run(tmp_path / "run", alone)


@NEEDS_DEEPSPEED
@pytest.mark.parametrize(
    ("engine", "precision", "tolerance"), [("zero2", "bfloat16", 1e-2), ("zero3", "float32", 1e-4)]
)
def test_zero_continues_what_one_process_began_and_one_process_continues_it(
    engine: str, precision: str, tolerance: float, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # one process trains in several precisions here
    more = (*UNEVEN, f"precision={precision}", "checkpoint_every=2", "keep_last=9")
    run = words(home, tmp_path / "run", *more)
    assert train(words(home, tmp_path / "alone", *more)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "log", stopping_at(3))
        assert train(run) == 130
    finish(launch(engine, run), timeout=900)  # the first launch on a machine compiles for minutes
    assert_same_run(tmp_path / "run", tmp_path / "alone", tolerance)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "update-00000006")
    assert train(run) == 0
    assert_same_run(tmp_path / "run", tmp_path / "alone", tolerance)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_death_of_one_process_ends_the_launch_and_another_number_of_processes_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("optim.updates=5000", "optim.learning_rate=1e-4", "checkpoint_every=5", "validation.every=5000")
    run = words(home, tmp_path / "run", *more)
    launched = launch("ddp", run)
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(losses(tmp_path / "run")) > 7)
    rank_1 = next(
        child for child in psutil.Process(launched.pid).children(recursive=True) if child.environ().get("RANK") == "1"
    )
    rank_1.kill()
    launched.communicate(timeout=60)
    assert launched.returncode != 0
    saved = max(int(path.name[-8:]) for path in (tmp_path / "run" / "checkpoints").glob("update-*"))
    assert saved >= 5 and saved > max(record["update"] for record in records(tmp_path / "run")) - 6
    monkeypatch.setattr(Tracker, "log", stopping_at(saved + 4))
    assert train(run) == 130
    assert train(words(home, tmp_path / "alone", *more)) == 130
    assert [record["update"] for record in records(tmp_path / "run")] == list(range(1, saved + 4))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


def test_a_mistake_is_told_once(home: Path, tmp_path: Path) -> None:
    launched = launch("ddp", words(home, tmp_path / "run", "data_dir=nowhere"))
    output, _ = launched.communicate(timeout=120)
    assert launched.returncode != 0
    assert output.count("error: ") == 1 and "nowhere" in output


def test_deepspeed_is_told_the_update_that_the_settings_describe(home: Path, tmp_path: Path) -> None:
    config = compose_config(TRAIN, words(home, tmp_path, "optim.batch_size=16", "optim.micro_batch_size=2"))
    settings = setup.deepspeed_settings(config, world_size=3)  # at most six samples a process
    assert settings["train_micro_batch_size_per_gpu"] == 2 and settings["gradient_accumulation_steps"] == 3
    assert settings["gradient_clipping"] == 1.0 and not settings["torch_autocast"]["enabled"]


@pytest.mark.parametrize(
    ("environment", "installed", "message"),
    [
        ({}, False, "pip install -e '.[deepspeed]'"),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, True, "got stage 1"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, True, "optimizer on cpu"),
    ],
)
def test_a_launch_with_deepspeed_that_cannot_run_is_refused(
    environment: dict[str, str],
    installed: bool,
    message: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if installed and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    for name, value in ({"ACCELERATE_USE_DEEPSPEED": "true"} | environment).items():
        monkeypatch.setenv(name, value)
    if not installed:
        monkeypatch.setattr(setup, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        setup.make_accelerator(compose_config(TRAIN, words(home, tmp_path)))


def test_machines_that_see_different_checkpoints_are_refused() -> None:
    accelerator: Any = SimpleNamespace(device="cpu", gather=lambda mine: torch.cat([mine, torch.tensor([0])]))
    with pytest.raises(UserError, match=r"different updates, \[0, 200\]"):
        setup.check_same_everywhere(accelerator, 200)


def wait_for(condition: Any, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
