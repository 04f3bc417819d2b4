"""What changes over training counts optimizer updates, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dominotree.errors import UserError
from train.schedules import lambda_base, learning_rate_factor
from train.updates import anchor_seed, own_share, split_held_out, total_updates, update_samples


def test_lambda_falls_in_a_line_from_its_start_to_zero() -> None:
    trace = [lambda_base(update, 10, start=1.0, decay_ratio=1.0) for update in range(1, 11)]
    assert trace == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    assert [lambda_base(u, 10, start=0.5, decay_ratio=0.5) for u in (1, 5, 6, 10)] == pytest.approx([0.4, 0, 0, 0])
    assert lambda_base(1, 10, start=0.0, decay_ratio=1.0) == 0


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0, 1), st.floats(0, 1))
def test_lambda_stays_between_zero_and_its_start(update: int, total: int, start: float, ratio: float) -> None:
    assert 0 <= lambda_base(update, total, start=start, decay_ratio=ratio) <= start


def test_the_learning_rate_warms_up_and_falls_until_the_end() -> None:
    def factors(schedule: str) -> list[float]:
        return [learning_rate_factor(u, 100, schedule=schedule, warmup_ratio=0.04) for u in (1, 2, 4, 5, 53, 100)]

    assert factors("cosine")[:-1] == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.5])
    assert factors("linear") == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.5, 1 / 96])
    assert factors("constant") == [0.25, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert 0 < factors("cosine")[-1] < 0.001  # the last update learns too
    assert learning_rate_factor(1, 10, schedule="cosine", warmup_ratio=0.0) == 1


def test_every_epoch_visits_every_sample_once_in_an_order_of_its_own() -> None:
    seen = [index for update in range(1, 8) for index in update_samples(update, 3, 7, seed=1)]
    epochs = [seen[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4))
def test_processes_share_an_update_without_loss_in_equally_many_steps(batch: int, world: int, micro: int) -> None:
    samples = list(range(100, 100 + batch))
    shares = [own_share(samples, rank, world, micro) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(index for share in shares for part in share for index in part) == samples
    assert all(len(part) <= micro for share in shares for part in share)


def test_epochs_and_updates_are_counted_in_optimizer_updates() -> None:
    assert total_updates(100, 16, updates=None, epochs=2) == 13
    assert total_updates(100, 16, updates=5, epochs=None) == 5


def test_anchors_are_drawn_anew_each_update_and_alike_when_resumed() -> None:
    assert anchor_seed(1, 2, 3) == anchor_seed(1, 2, 3)
    assert len({anchor_seed(s, u, i) for s in range(3) for u in range(3) for i in range(3)}) == 27


def test_held_out_samples_are_never_trained_on() -> None:
    train, held = split_held_out(20, 5, seed=3)
    assert sorted(train + held) == list(range(20)) and len(held) == 5
    assert split_held_out(20, 5, seed=3) == (train, held)
    with pytest.raises(UserError, match="too few"):
        split_held_out(5, 5, seed=0)
