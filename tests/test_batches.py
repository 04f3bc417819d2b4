"""Padding teaches nothing, and the order of an epoch follows from its number alone."""

from __future__ import annotations

import pytest
import torch

from data.batches import collate, epoch_order
from data.samples import Sample
from dominotree.errors import UserError

SHORT = Sample(7, [1, 2, 3], [False, True, True])
LONG = Sample(3, [4, 5, 6, 7, 8], [False, False, True, True, False])


def test_samples_are_padded_on_the_right_with_nothing_to_learn() -> None:
    batch = collate([SHORT, LONG], pad_id=9)
    assert batch.input_ids.tolist() == [[1, 2, 3, 9, 9], [4, 5, 6, 7, 8]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, False], LONG.loss_mask]
    assert (batch.input_ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.bool)
    assert batch.sample_ids == [7, 3]


def test_one_sample_is_a_batch() -> None:
    assert collate([SHORT], pad_id=0).input_ids.tolist() == [SHORT.token_ids]
    with pytest.raises(UserError, match="at least one sample"):
        collate([], pad_id=0)


def test_an_epoch_holds_every_sample_once_in_an_order_of_its_own() -> None:
    orders = [epoch_order(20, seed, epoch) for seed in (0, 1) for epoch in (-1, 0, 1)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    assert epoch_order(20, 0, 1) == orders[2]
    assert epoch_order(0, 0, 0) == []
