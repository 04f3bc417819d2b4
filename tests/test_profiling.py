"""The profile of training: parts that add up to the whole, and operations counted as torch counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import make_draft, make_target
from tiny_training import make_home, records, words
from torch.utils.flop_counter import FlopCounterMode

from dominotree.draft.masks import ATTENTIONS
from train import config as train_config
from train import profiling
from train.flops import TargetSize, update_flops, work_of
from train.main import main as train
from train.objective import LossVocabulary
from train.profiling import PARTS, Profile, Timeline
from train.setup import target_size
from train.step import StepInput, TrainStep
from train.targets import block_targets


def test_the_parts_of_a_timeline_are_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 3.5, 7.0, 8.0, 8.0])
    monkeypatch.setattr(profiling, "perf_counter", lambda: next(clock))
    timeline = Timeline(torch.device("cpu"), active=True)
    timeline.switch("data")
    timeline.switch("backbone")
    timeline.switch("data")
    timeline.switch("optimizer")
    taken = timeline.take()
    assert set(taken) == set(PARTS)
    assert {part: seconds for part, seconds in taken.items() if seconds} == {
        "other": 1.0,
        "data": 2.0 + 3.5,
        "backbone": 0.5,
        "optimizer": 1.0,
    }
    assert not any(timeline.take().values())


def test_the_backward_pass_switches_where_the_gradient_arrives() -> None:
    timeline = Timeline(torch.device("cpu"), active=True)
    seen: list[str] = []
    timeline.switch = seen.append  # type: ignore[method-assign]
    first = torch.ones(3, requires_grad=True)
    first.register_hook(lambda gradient: seen.append("first"))
    hidden = first * 2
    timeline.switch_when_gradient_arrives(hidden, "backbone")
    head = hidden * 3
    head.register_hook(lambda gradient: seen.append("head"))
    head.sum().backward()
    assert seen == ["head", "backbone", "first"]


def test_an_idle_timeline_leaves_tensors_alone() -> None:
    timeline = Timeline(torch.device("cpu"), active=False)
    tensor = torch.ones(1, requires_grad=True) * 2
    timeline.switch_when_gradient_arrives(tensor, "backbone")
    assert not tensor._backward_hooks
    assert not any(timeline.take().values())


@pytest.mark.parametrize(("with_head", "backbone_trains"), [(True, True), (True, False), (False, True)])
def test_operations_are_those_that_torch_counts(with_head: bool, backbone_trains: bool) -> None:
    """Everything but attention, which torch counts dense and we where it is visible."""
    target = make_target()
    draft = make_draft(target, with_head=with_head).requires_grad_(True)
    draft.backbone.requires_grad_(backbone_trains)
    ids = torch.randint(13, (2, 30), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[3, 8, 15], [2, 9, 20]])
    keep, mask = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 30, dtype=torch.bool)
    targets = block_targets(ids, mask, anchors, keep, draft.config.draft_length, 7.0)
    step = TrainStep(
        draft,
        target.embed,
        target.model.get_output_embeddings().weight,
        LossVocabulary(target.model.get_output_embeddings().weight),
        self_generated=False,
    )
    features = target.features(ids, draft.config.target_layer_ids)
    with FlopCounterMode(display=False) as counter:
        step(StepInput(ids.gather(1, anchors), anchors, keep, features, targets), 0.5).loss.backward()
    counted = sum(value for name, value in counter.get_flop_counts()["Global"].items() if "attention" not in str(name))
    work = work_of([30, 30], anchors.flatten().tolist(), draft.config.block_size, int((targets.weights > 0).sum()))
    flops = update_flops(work, draft.config, None, target.vocab_size, backbone_trains=backbone_trains)
    attention = (3 if backbone_trains else 1) * draft.config.num_hidden_layers * work.seen
    attention *= 4 * draft.config.num_attention_heads * draft.config.head_dim
    assert flops["target"] == 0 and (flops["head"] > 0) == with_head
    # The context gets no gradient of its own, the base logits of a sample are formed once more.
    assert sum(flops.values()) - attention == pytest.approx(counted, rel=0.15)


def test_the_target_s_operations_are_two_a_weight_and_token() -> None:
    target = make_target()
    ids = torch.randint(13, (2, 30), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        target.features(ids, (1,))
    counted = sum(value for name, value in counter.get_flop_counts()["Global"].items() if "attention" not in str(name))
    size = target_size(target)
    assert 2 * size.weights * 60 == pytest.approx(counted, rel=0.02)
    work = work_of([30, 30], [3], 6, 4)
    flops = update_flops(work, make_draft(target).config, size, 13, backbone_trains=False)
    assert flops["target"] > counted
    assert isinstance(size, TargetSize) and size.attention_size == 32


def test_rates_are_of_the_time_of_all_parts() -> None:
    profile = Profile(peak_flops=1e9)
    work = work_of([10, 20], [4, 5], 8, 12)
    figures = profile.add(dict.fromkeys(PARTS, 0.5), work, {"backbone": 7e8}, places=40, slots=64)
    assert figures["profile/samples_per_second"] == pytest.approx(2 / 3.5)
    assert figures["profile/supervised_tokens_per_second"] == pytest.approx(12 / 3.5)
    assert figures["profile/flop_utilisation"] == pytest.approx(0.2)
    assert figures["profile/padding"] == 0.25 and figures["profile/block_padding"] == 0.75
    assert figures["profile/seconds/data"] == 0.5


def test_profile_true_is_logged_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = make_home(tmp_path / "home")
    for backbone in ("frozen", "trained"):
        output = tmp_path / backbone
        assert train(words(home, output, f"backbone={backbone}", "profile=true", "optim.updates=3")) == 0
        trace = [record for record in records(output) if "loss" in record]
        assert len(trace) == 3
        for record in trace:
            parts = sum(record[f"profile/seconds/{part}"] for part in PARTS)
            assert 0.5 * record["seconds"] < parts <= record["seconds"]
            assert record["profile/seconds/backbone"] > 0 and record["profile/seconds/lm_head"] > 0
            assert record["profile/seconds/target"] > 0 and record["profile/flop_utilisation"] > 0
        shown = capsys.readouterr().err
        assert "mean of 2 updates" in shown and "supervised tokens/s" in shown and "peak memory" in shown


def test_the_ways_to_attend_that_can_be_asked_for_are_those_there_are() -> None:
    assert set(train_config.ATTENTIONS) == set(ATTENTIONS)
