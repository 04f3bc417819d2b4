"""Cached features are the target's own, of the size foretold, and never another target's or other tokens'."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_templates import STRIPPING, said, talking_target
from tiny_templates import tokenizer as any_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from data.batches import collate
from data.conversations import ConversationStore
from data.features import FeatureCache, dequantise, feature_key, predict_bytes, quantise, write_features
from data.samples import SampleSet, load_samples
from dominotree.errors import UserError
from dominotree.target import Target

LAYERS = [0, 2, 3]


def tokenizer(*template: str) -> PreTrainedTokenizerFast:
    return any_tokenizer(*template, ascii_only=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return talking_target()


@pytest.fixture
def samples(tmp_path: Path) -> SampleSet:
    store = ConversationStore(tmp_path / "conversations.jsonl")
    texts = ["short", "a longer answer " * 6, "middle sized", "x" * 90, "end"]
    store.append([{"id": 10 + i, "messages": said("q", text), "source": "t"} for i, text in enumerate(texts)])
    store.close()
    return load_samples(tmp_path, tokenizer(), max_length=200)


def test_the_cache_gives_what_the_target_computes(target: Target, samples: SampleSet, tmp_path: Path) -> None:
    write_features(target, samples, tmp_path / "f", LAYERS)
    cache = FeatureCache.open(tmp_path / "f", feature_key(target, LAYERS))
    assert len(cache) == len(samples)
    for sample in samples:
        expected = target.features(torch.tensor([sample.token_ids]), LAYERS)[0]
        found = cache.get(sample.sample_id, sample.token_ids)
        assert (found.shape, found.dtype) == (expected.shape, torch.bfloat16)
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def test_a_batch_carries_the_features_of_its_samples(target: Target, samples: SampleSet, tmp_path: Path) -> None:
    write_features(target, samples, tmp_path / "f", LAYERS)
    cache = FeatureCache.open(tmp_path / "f", feature_key(target, LAYERS))
    batch = collate([[samples[0]], [samples[1]]], pad_id=0)
    features = cache.get_batch([[10], [11]])
    assert features.shape == (*batch.input_ids.shape, 3 * target.hidden_size)
    assert torch.equal(features[1], cache.get(11))
    assert torch.equal(features[0, : samples.lengths[0]], cache.get(10))
    assert not features[0, samples.lengths[0] :].any()
    assert torch.equal(cache.get_batch([[11, 10]])[0], torch.cat([cache.get(11), cache.get(10)]))


def test_a_sample_that_the_cache_lacks_is_named(target: Target, samples: SampleSet, tmp_path: Path) -> None:
    write_features(target, samples, tmp_path / "f", LAYERS)
    cache = FeatureCache.open(tmp_path / "f", feature_key(target, LAYERS))
    for ask in (lambda: cache.get(999), lambda: cache.check(999, [1, 2]), lambda: cache.get_batch([[10, 999]])):
        with pytest.raises(UserError, match="lack sample 999"):
            ask()


def test_eight_bits_are_off_by_half_a_step_at_most() -> None:
    features = torch.randn(6, 8) * torch.tensor([1.0] * 4 + [100.0] * 4)
    features[2] = 0
    values, scales = quantise(features, 2)
    assert (values.dtype, scales.shape) == (torch.int8, (6, 2))
    error = (dequantise(values, scales).float() - features).abs()
    step = scales.repeat_interleave(4, dim=1)
    assert bool((error <= 0.5 * step + 0.005 * features.abs()).all())  # and bfloat16's own rounding


def test_eight_bit_features_stay_close(target: Target, samples: SampleSet, tmp_path: Path) -> None:
    write_features(target, samples, tmp_path / "f", LAYERS, storage="int8")
    cache = FeatureCache.open(tmp_path / "f", feature_key(target, LAYERS))
    for sample in samples:
        expected = target.features(torch.tensor([sample.token_ids]), LAYERS)[0]
        off = (cache.get(sample.sample_id).float() - expected).norm() / expected.norm()
        assert off < 0.02


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_the_size_is_foretold(
    target: Target, samples: SampleSet, tmp_path: Path, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_features(target, samples, tmp_path / "f", LAYERS, storage=storage)
    real = sum(path.stat().st_size for path in (tmp_path / "f").iterdir())
    predicted = predict_bytes(samples.lengths, target.hidden_size, len(LAYERS), storage)
    assert abs(real / predicted - 1) < 0.05
    said_so = capsys.readouterr().err
    assert f"5 samples, {sum(samples.lengths)} tokens, {storage}: {predicted / 1e6:.1f} MB to write" in said_so


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def killed_after(target: Target, batches: int) -> Target:
    """A target that works for so many batches and then dies."""
    dying = Target(target.model, target.tokenizer)
    compute = target.features
    left: Iterator[int] = iter(range(batches))

    def features(ids: Tensor, layers: Sequence[int]) -> Tensor:
        if next(left, None) is None:
            raise Killed
        return compute(ids, layers)

    dying.features = features  # type: ignore[method-assign]
    return dying


@pytest.mark.parametrize("batches", [0, 1, 2, 4])
def test_a_killed_run_goes_on_behind_its_finished_shards(
    target: Target, samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    monkeypatch.setattr("data.features.BATCH_TOKENS", 1)
    monkeypatch.setattr("data.features.SHARD_BYTES", 1)
    with pytest.raises(Killed):
        write_features(killed_after(target, batches), samples, tmp_path / "f", LAYERS)
    write_features(killed_after(target, 5 - batches), samples, tmp_path / "f", LAYERS)
    cache = FeatureCache.open(tmp_path / "f", feature_key(target, LAYERS))
    index = json.loads((tmp_path / "f" / "index.json").read_text())
    stored = [entry[0] for shard in index["shards"] for entry in shard["samples"]]
    assert sorted(stored) == [10, 11, 12, 13, 14]
    for sample in samples:
        expected = target.features(torch.tensor([sample.token_ids]), LAYERS)[0]
        torch.testing.assert_close(cache.get(sample.sample_id).float(), expected, rtol=1e-2, atol=1e-2)


def test_new_conversations_add_to_the_features(target: Target, samples: SampleSet, tmp_path: Path) -> None:
    write_features(target, samples, tmp_path / "f", LAYERS)
    store = ConversationStore(tmp_path / "conversations.jsonl")
    store.append([{"id": 99, "messages": said("q", "more"), "source": "t"}])
    store.close()
    grown = load_samples(tmp_path, tokenizer(), max_length=200)
    key = feature_key(target, LAYERS)
    with pytest.raises(UserError, match=r"lack sample 99; run data\.prepare"):
        FeatureCache.open(tmp_path / "f", key).get(99)
    write_features(killed_after(target, 1), grown, tmp_path / "f", LAYERS)
    assert len(FeatureCache.open(tmp_path / "f", key)) == 6


def test_features_of_anything_else_are_refused(target: Target, samples: SampleSet, tmp_path: Path) -> None:
    write_features(target, samples, tmp_path / "f", LAYERS)
    retemplated = Target(target.model, tokenizer(STRIPPING))
    others: list[tuple[Target, list[int], str]] = [
        (target, [0, 2], "layer_ids"),
        (talking_target(seed=1), LAYERS, "target"),
        (retemplated, LAYERS, "template"),
    ]
    for other, layers, what in others:
        with pytest.raises(UserError, match=f"are of another {what} "):
            FeatureCache.open(tmp_path / "f", feature_key(other, layers))
        with pytest.raises(UserError, match=f"are of another {what} "):
            write_features(other, samples, tmp_path / "f", layers)
    with pytest.raises(UserError, match="are of bfloat16, not int8; remove"):
        write_features(target, samples, tmp_path / "f", LAYERS, storage="int8")


def test_another_mask_version_is_refused(
    target: Target, samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_features(target, samples, tmp_path / "f", LAYERS)
    monkeypatch.setattr("data.features.MASK_VERSION", 99)
    with pytest.raises(UserError, match="are of another mask_version"):
        FeatureCache.open(tmp_path / "f", feature_key(target, LAYERS))


def test_features_of_other_tokens_are_refused(target: Target, samples: SampleSet, tmp_path: Path) -> None:
    write_features(target, samples, tmp_path / "f", LAYERS)
    cache = FeatureCache.open(tmp_path / "f", feature_key(target, LAYERS))
    changed = [*samples[0].token_ids[:-1], 9]
    for tokens in (changed, samples[0].token_ids[:-1]):
        with pytest.raises(UserError, match="are of other tokens for sample 10"):
            cache.get(10, tokens)
    shorter = load_samples(tmp_path, tokenizer(), max_length=60)
    with pytest.raises(UserError, match="are of other tokens for sample 11"):
        write_features(target, shorter, tmp_path / "f", LAYERS)


def test_the_same_target_in_another_dtype_has_the_same_key(target: Target) -> None:
    half = talking_target()
    half.model.to(torch.bfloat16)
    full = Target(half.model.float(), half.tokenizer)
    assert feature_key(full, LAYERS)["target"] == feature_key(half, LAYERS)["target"]
    assert feature_key(talking_target(), LAYERS) == feature_key(target, LAYERS)


def test_a_disk_without_room_is_refused_before_writing(
    target: Target, samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("data.features.shutil.disk_usage", lambda _: usage(10**9, 9 * 10**8, 60_000_000))
    with pytest.raises(UserError, match="has 60 MB free, the features need 0 MB; make room, use features=int8"):
        write_features(target, samples, tmp_path / "f", LAYERS)
    assert not list((tmp_path / "f").glob("*.safetensors"))


def test_a_disk_that_fills_up_leaves_no_half_shard(
    target: Target, samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("data.features.save_file", full)
        with pytest.raises(UserError, match="No space left on device; make room and run again"):
            write_features(target, samples, tmp_path / "f", LAYERS)
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["lock"]
    write_features(target, samples, tmp_path / "f", LAYERS)


@pytest.mark.parametrize(("layers", "shown"), [([], r"\[\]"), ([0, 4], r"\[0, 4\]"), ([-1], r"\[-1\]")])
def test_layers_that_the_target_has_not_are_refused(target: Target, layers: list[int], shown: str) -> None:
    with pytest.raises(UserError, match=rf"layer_ids must lie in 0..3, got {shown}"):
        feature_key(target, layers)


def test_a_missing_or_broken_cache_is_named(target: Target, samples: SampleSet, tmp_path: Path) -> None:
    key = feature_key(target, LAYERS)
    with pytest.raises(UserError, match="there are no features in"):
        FeatureCache.open(tmp_path / "f", key)
    with pytest.raises(UserError, match="stored as bfloat16 or int8, got float32"):
        write_features(target, samples, tmp_path / "f", LAYERS, storage="float32")
    write_features(target, samples, tmp_path / "f", LAYERS)
    (tmp_path / "f" / "features-00000.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"cannot read .*features-00000.safetensors"):
        FeatureCache.open(tmp_path / "f", key).get(10)
    (tmp_path / "f" / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot read .*index.json"):
        FeatureCache.open(tmp_path / "f", key)
