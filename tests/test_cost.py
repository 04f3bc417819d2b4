"""The computed cost of training: sizes of the real targets, and figures that follow from the settings."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dominotree.command import compose_config
from train.cost import COST, TARGETS, TargetShape, disk_bytes, gpu_hours, main, sample_work

SMALL = TargetShape(64, 128, 2, 4, 2, 16, 1000)


def test_the_weights_of_a_target_are_those_of_its_layers() -> None:
    shape = TARGETS["Qwen3-4B"]
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
    )
    with torch.device("meta"):
        layers = Qwen3ForCausalLM(config).model.layers
    assert shape.layer_weights == pytest.approx(sum(weight.numel() for weight in layers.parameters()), rel=1e-3)


def test_the_hours_are_the_operations_over_what_the_gpu_does() -> None:
    """A frozen backbone with stored features, counted by hand: draft forwards, the head and one LM-head product."""
    words = ["samples=10", "tokens=100", "answer_tokens=50", "epochs=2", "anchors=5", "block_size=4", "draft_layers=1"]
    words += ["features=2", "gru_hidden_dim=8", "emb_dim=4", "peak_tflops=1e-9", "utilisation=0.5"]
    config = compose_config(COST, words)
    slots, tokens = 5 * 4, 100
    assert (sample_work(config).slots, sample_work(config).seen) == (slots, 4 * (50 + 60 + 70 + 80 + 90) + slots * 4)
    projections = 2 * 64 * (2 * 64 + 64 + 3 * 128) * slots + 2 * 64 * 64 * tokens + 2 * 2 * 64 * 64 * tokens
    attention = 4 * 64 * sample_work(config).seen
    head = 3 * (2 * 3 * 8 * (64 + 8) + 2 * 4 * (64 + 8)) * slots
    lm_head = 2 * 64 * 1000 * slots + 3 * 2 * 4 * 1000 * slots
    seconds = 10 * 2 * (projections + attention + head + lm_head) / (1e-9 * 1e12 * 0.5)
    assert gpu_hours(SMALL, config, backbone_trains=False, online=False) == pytest.approx(seconds / 3600)
    assert disk_bytes(SMALL, config, "bfloat16") == pytest.approx(10 * 100 * 2 * 64 * 2, rel=0.3)  # and a header each


def test_every_target_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in TARGETS) and "not measured" in printed


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("answer_tokens=2000", "answer_tokens must lie in 1..tokens=1000, got 2000"),
        ("anchors=701", "at most 700, got 701"),
        ("utilisation=1.5", "utilisation lie above 0"),
        ("block_size=1", "no such drafter: block_size"),
        ("gpus=8", "gpus"),
    ],
)
def test_impossible_settings_are_refused(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert message in capsys.readouterr().err
