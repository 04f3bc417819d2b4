"""What is made ahead of an update is what is made when it is due: cached features, anchors and all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_training import losses, make_home, stopping_at, words

from data.features import write_features
from data.models import TargetChoice, load_target
from data.prefetch import prefetching
from data.samples import Sample, load_samples
from dominotree.draft.checkpoint import load_draft
from train.feed import Feed, MicroBatch
from train.main import main as train
from train.tracking import Tracker

SAMPLES = [
    Sample(index, list(range(index, index + 8 + index)), [False] * 3 + [True] * (5 + index)) for index in range(9)
]


def feed(rank: int = 0, world_size: int = 1, micro_batch_size: int = 2, pack_length: int | None = None) -> Feed:
    return Feed(
        SAMPLES,
        None,
        batch_size=4,
        micro_batch_size=micro_batch_size,
        pack_length=pack_length,
        num_anchors=6,
        seed=1,
        rank=rank,
        world_size=world_size,
    )


def same(ours: MicroBatch, theirs: MicroBatch) -> bool:
    names: tuple[str, ...] = ("input_ids", "loss_mask", "anchors", "keep")
    if (ours.starts is None) != (theirs.starts is None):
        return False
    names += () if ours.starts is None else ("starts",)
    return ours.lengths == theirs.lengths and all(
        torch.equal(getattr(ours, name), getattr(theirs, name)) for name in names
    )


@pytest.mark.parametrize("pack_length", [None, 30])
def test_made_ahead_by_another_thread_it_is_the_same(pack_length: int | None) -> None:
    updates = range(2, 12)
    with prefetching(feed(pack_length=pack_length).micro_batches, updates) as ready:
        ahead = [ready.take() for _ in updates]
    due = [feed(pack_length=pack_length).micro_batches(update) for update in updates]
    assert all(same(a, b) for ours, theirs in zip(ahead, due, strict=True) for a, b in zip(ours, theirs, strict=True))
    assert len({tuple(part.anchors.flatten().tolist()) for parts in due for part in parts}) > 10


def test_processes_and_micro_batches_share_the_same_anchors_out() -> None:
    def drawn(feeds: list[Feed]) -> set[tuple[int, ...]]:
        parts = [part for one in feeds for part in one.micro_batches(3)]
        rows = [
            (length, *row[kept].tolist())
            for part in parts
            for length, row, kept in zip(part.lengths, part.anchors, part.keep, strict=True)
        ]
        return {row for row in rows if len(row) > 1}

    assert drawn([feed()]) == drawn([feed(rank, 2, 1) for rank in range(2)]) == drawn([feed(micro_batch_size=4)])


def test_samples_of_like_lengths_go_together_and_no_block_is_padding_throughout() -> None:
    for update in range(1, 6):
        first, second = feed().micro_batches(update)
        assert min(first.lengths) >= max(second.lengths)
        for part in (first, second):
            assert part.input_ids.shape[1] == max(part.lengths)
            assert part.anchors.shape == part.keep.shape and part.keep.any(dim=0).all()


def test_samples_that_share_a_row_keep_their_own_anchors() -> None:
    for update in range(1, 6):
        (alone,) = feed(micro_batch_size=4).micro_batches(update)
        (shared,) = feed(micro_batch_size=4, pack_length=30).micro_batches(update)
        assert len(shared.input_ids) < len(alone.input_ids) == 4 and alone.starts is None
        assert shared.starts is not None and sorted(shared.lengths) == sorted(alone.lengths)
        places = shared.anchors - shared.starts.gather(1, shared.anchors)
        tokens = shared.input_ids.gather(1, shared.anchors)
        found = sorted(zip(tokens[shared.keep].tolist(), places[shared.keep].tolist(), strict=True))
        own = alone.input_ids.gather(1, alone.anchors)
        assert found == sorted(zip(own[alone.keep].tolist(), alone.anchors[alone.keep].tolist(), strict=True))
        for row, kept in zip(shared.anchors, shared.keep, strict=True):
            assert row[kept].tolist() == sorted(set(row[kept].tolist())) and not kept[int(kept.sum()) :].any()


def test_a_process_without_samples_gets_a_batch_that_teaches_nothing() -> None:
    parts = feed(rank=3, world_size=8).micro_batches(1)
    idle = feed(rank=5, world_size=8).micro_batches(1)
    assert len(parts) == len(idle) == 1
    assert parts[0].loss_mask.any() and not idle[0].loss_mask.any() and not idle[0].keep.any()
    assert idle[0].anchors.shape == (1, 1)


def test_a_run_on_cached_features_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(tmp_path / "home")
    target = load_target(TargetChoice("path", str(home / "target"), "float32"), dtype="float32", device="cpu")
    assert target.tokenizer is not None
    samples = load_samples(home / "data", target.tokenizer, max_length=80)
    layers = load_draft(home / "dflash_draft").config.target_layer_ids
    write_features(target, samples, home / "data" / "features", layers)
    run = ["features=cached", "optim.micro_batch_size=2", "optim.updates=7", "checkpoint_every=2"]
    assert train(words(home, tmp_path / "whole", *run)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "log", stopping_at(5))
        assert train(words(home, tmp_path / "halted", *run)) == 130
    assert train(words(home, tmp_path / "halted", *run)) == 0
    assert losses(tmp_path / "halted") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 7
