"""Samples that share a row are drafted, taught and trained as if each had a row of its own: nothing leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, make_target, small_draft
from tiny_training import losses, make_home, records, words
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers import GPT2Config, GPT2LMHeadModel

from data.features import write_features
from data.models import TargetChoice, load_target
from data.samples import load_samples
from dominotree.draft.checkpoint import load_draft
from dominotree.target import Target
from train.main import main as train
from train.targets import block_targets

LENGTHS = (9, 5, 14)
STARTS = torch.tensor([[0] * 9 + [9] * 5 + [14] * 14 + [28, 29]])  # two places of padding
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "half_sliding": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5},
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def tokens(*shape: int) -> Tensor:
    return torch.randint(2, 13, shape, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_does_not_look_across_samples(family: str, eager: bool) -> None:
    target = make_target(family)
    if eager:
        target.model.set_attn_implementation("eager")
    ids = tokens(1, STARTS.shape[1])
    together = target.features(ids, (0, 3), STARTS)
    assert together.isfinite().all()
    for start, length in zip((0, 9, 14), LENGTHS, strict=True):
        alone = target.features(ids[:, start : start + length], (0, 3))
        torch.testing.assert_close(together[:, start : start + length], alone, rtol=1e-4, atol=1e-5)
    assert (together - target.features(ids, (0, 3)))[:, 9:].abs().max() > 1e-3  # or it would compare nothing


def test_positions_begin_anew_with_every_sample() -> None:
    """A target with learned positions tells, and would run out of them: rows may be longer than its context."""
    torch.manual_seed(0)
    target = Target(GPT2LMHeadModel(GPT2Config(vocab_size=13, n_embd=32, n_layer=4, n_head=4, n_positions=14)))
    ids = tokens(1, STARTS.shape[1])
    together = target.features(ids, (0, 3), STARTS)
    for start, length in zip((0, 9, 14), LENGTHS, strict=True):
        alone = target.features(ids[:, start : start + length], (0, 3))
        torch.testing.assert_close(together[:, start : start + length], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["dense", "grouped", "flex"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_draft_does_not_look_across_samples(kind: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # else seconds of tracing
    draft = small_draft(**KINDS[kind])
    draft.attention = attention
    features, table = drawn(2, STARTS.shape[1], 96), drawn(13, 32)
    starts = torch.cat([STARTS, torch.zeros_like(STARTS)])  # the second row is one sample
    # Many blocks, so that groups reach into one sample, two or three; the first of a sample sees no context.
    anchors = torch.zeros(2, 56, dtype=torch.int64)
    anchors[0], anchors[1, :11] = torch.arange(28).repeat_interleave(2), torch.arange(3, 14)
    keep = torch.tensor([[True] * 56, [True] * 11 + [False] * 45])
    ids = tokens(*anchors.shape)
    together = draft.train_hidden(ids, anchors, keep, features, table.__getitem__, starts)
    for row, start, length in ((0, 0, 9), (0, 9, 5), (0, 14, 14), (1, 0, 30)):
        own = (anchors[row] >= start) & (anchors[row] < start + length) & keep[row]
        places, context = anchors[row, own] - start, features[row, start : start + length]
        alone = draft.train_hidden(
            ids[row, own][None], places[None], keep[row, own][None], context[None], table.__getitem__
        )
        torch.testing.assert_close(together[row, own], alone[0], rtol=1e-4, atol=1e-5)


def test_a_block_is_not_asked_for_the_words_of_the_next_sample() -> None:
    ids, mask = torch.arange(50, 80)[None], torch.ones(1, 30, dtype=torch.bool)
    anchors, keep = torch.tensor([[6, 9, 12, 25]]), torch.tensor([[True, True, True, True]])
    targets = block_targets(ids, mask, anchors, keep, 4, None, STARTS)
    assert targets.weights[0].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert targets.labels[0, 0, :2].tolist() == [57, 58] and targets.prefix_ids[0, 0, :2].tolist() == [56, 57]


@pytest.mark.parametrize(("features", "rows"), [("online", 1), ("online", 2), ("ahead", 2), ("cached", 2)])
def test_training_learns_the_same_from_rows_that_samples_share(features: str, rows: int, tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    if features == "cached":
        target = load_target(TargetChoice("path", str(home / "target"), "float32"), dtype="float32", device="cpu")
        assert target.tokenizer is not None
        samples = load_samples(home / "data", target.tokenizer, max_length=80)
        layers = load_draft(home / "dflash_draft").config.target_layer_ids
        write_features(target, samples, home / "data" / "features", layers)
    run = (f"features={features}", "backbone=trained", "profile=true")
    for name, length in (("alone", "null"), ("shared", {1: "1000", 2: "200"}[rows])):  # samples of about 60 tokens
        assert train(words(home, tmp_path / name, *run, f"pack_length={length}")) == 0
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
    alone, shared = (records(tmp_path / name)[0] for name in ("alone", "shared"))
    assert shared["supervised_tokens"] == alone["supervised_tokens"]
    assert 0 < alone["profile/padding"] < 0.05
    # Four in one row, or three in one and one in another.
    assert shared["profile/padding"] == 0 if rows == 1 else shared["profile/padding"] > 0.25
    assert shared["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-4)
