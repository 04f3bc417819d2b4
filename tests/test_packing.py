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

from data.features import write_features
from data.models import TargetChoice, load_target
from data.samples import load_samples
from dominotree.draft.checkpoint import load_draft
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


@pytest.mark.parametrize("attention", ["dense", "grouped", "flex"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_draft_does_not_look_across_samples(kind: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # else seconds of tracing
    draft = small_draft(**KINDS[kind])
    draft.attention = attention
    features, table = drawn(1, STARTS.shape[1], 96), drawn(13, 32)
    # Many blocks, so that groups reach into one sample, two or three; the first of a sample sees no context.
    anchors = torch.cat([torch.arange(9), torch.arange(9, 14), torch.arange(14, 28)]).repeat_interleave(2)[None]
    keep = torch.ones_like(anchors, dtype=torch.bool)
    ids = tokens(*anchors.shape)
    together = draft.train_hidden(ids, anchors, keep, features, table.__getitem__, STARTS)
    for start, length in zip((0, 9, 14), LENGTHS, strict=True):
        own = (anchors >= start) & (anchors < start + length)
        places, own_ids = (anchors[own] - start)[None], ids[own][None]
        alone = draft.train_hidden(
            own_ids, places, keep[own][None], features[:, start : start + length], table.__getitem__
        )
        torch.testing.assert_close(together[own], alone[0], rtol=1e-4, atol=1e-5)


def test_a_block_is_not_asked_for_the_words_of_the_next_sample() -> None:
    ids, mask = torch.arange(50, 80)[None], torch.ones(1, 30, dtype=torch.bool)
    anchors, keep = torch.tensor([[6, 9, 12, 25]]), torch.tensor([[True, True, True, True]])
    targets = block_targets(ids, mask, anchors, keep, 4, None, STARTS)
    assert targets.weights[0].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert targets.labels[0, 0, :2].tolist() == [57, 58] and targets.prefix_ids[0, 0, :2].tolist() == [56, 57]


@pytest.mark.parametrize("features", ["online", "ahead", "cached"])
def test_training_learns_the_same_from_rows_that_samples_share(features: str, tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    if features == "cached":
        target = load_target(TargetChoice("path", str(home / "target"), "float32"), dtype="float32", device="cpu")
        assert target.tokenizer is not None
        samples = load_samples(home / "data", target.tokenizer, max_length=80)
        layers = load_draft(home / "dflash_draft").config.target_layer_ids
        write_features(target, samples, home / "data" / "features", layers)
    run = (f"features={features}", "backbone=trained", "profile=true")
    for name, length in (("alone", "null"), ("shared", "1000")):
        assert train(words(home, tmp_path / name, *run, f"pack_length={length}")) == 0
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
    alone, shared = (records(tmp_path / name)[0] for name in ("alone", "shared"))
    assert shared["supervised_tokens"] == alone["supervised_tokens"]
    assert shared["profile/padding"] == 0 < alone["profile/padding"]  # all four in one row
    assert shared["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-4)
