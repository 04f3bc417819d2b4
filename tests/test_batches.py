"""Rows hold whole samples end to end, padding teaches nothing, an epoch's order follows from its number alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.batches import collate, epoch_order, pack
from data.samples import Sample
from dominotree.errors import UserError

SHORT = Sample(7, [1, 2, 3], [False, True, True])
LONG = Sample(3, [4, 5, 6, 7, 8], [False, False, True, True, False])


def test_samples_are_padded_on_the_right_with_nothing_to_learn() -> None:
    batch = collate([[SHORT], [LONG]], pad_id=9)
    assert batch.input_ids.tolist() == [[1, 2, 3, 9, 9], [4, 5, 6, 7, 8]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, False], LONG.loss_mask]
    assert (batch.input_ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.bool)
    assert batch.starts.tolist() == [[0, 0, 0, 3, 4], [0] * 5]  # padding belongs to no sample


def test_samples_of_a_row_lie_end_to_end_each_with_its_own_beginning() -> None:
    batch = collate([[SHORT, SHORT, LONG], [LONG]], pad_id=9)
    assert batch.input_ids.tolist() == [SHORT.token_ids * 2 + LONG.token_ids, LONG.token_ids + [9] * 6]
    assert batch.loss_mask.tolist() == [SHORT.loss_mask * 2 + LONG.loss_mask, LONG.loss_mask + [False] * 6]
    assert batch.starts.tolist() == [[0] * 3 + [3] * 3 + [6] * 5, [0] * 5 + [5, 6, 7, 8, 9, 10]]


def test_one_sample_is_a_batch() -> None:
    assert collate([[SHORT]], pad_id=0).input_ids.tolist() == [SHORT.token_ids]
    for nothing in ([], [[SHORT], []]):
        with pytest.raises(UserError, match=r"at least one sample in every row, got rows of \[(1, 0)?\]"):
            collate(nothing, pad_id=0)


@given(st.lists(st.integers(1, 12), max_size=12), st.none() | st.integers(1, 20))
def test_rows_hold_every_sample_once_and_no_more_than_they_may(lengths: list[int], row_length: int | None) -> None:
    samples = [Sample(index, [0] * length, [True] * length) for index, length in enumerate(lengths)]
    rows = pack(samples, row_length)
    assert sorted(sample.sample_id for row in rows for sample in row) == list(range(len(samples)))
    for row in rows:
        assert len(row) == 1 or sum(len(sample.token_ids) for sample in row) <= (row_length or 0)
    if row_length is not None:  # no sample begins a row that an earlier row had room for
        for later, row in enumerate(rows):
            for earlier in rows[:later]:
                assert sum(lengths[sample.sample_id] for sample in earlier) + lengths[row[0].sample_id] > row_length


def test_an_epoch_holds_every_sample_once_in_an_order_of_its_own() -> None:
    orders = [epoch_order(20, seed, epoch) for seed in (0, 1) for epoch in (-1, 0, 1)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    assert epoch_order(20, 0, 1) == orders[2]
    assert epoch_order(0, 0, 0) == []
