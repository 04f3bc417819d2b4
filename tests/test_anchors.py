"""Anchors are drawn uniformly, without replacement, where an anchor and its successor are supervised."""

from __future__ import annotations

import pytest
import torch

from data.anchors import draw_anchors
from dominotree.errors import UserError

GAPS = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1, 1, 0]).bool()
TAIL = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 1, 1]).bool()
IN_TAIL = [2, 3, 4, 5, 6, 7, 8]


def test_anchors_lie_where_they_and_their_successors_are_supervised() -> None:
    assert draw_anchors(GAPS, 9, 3).tolist() == [1, 2, 7]
    assert draw_anchors(TAIL, 9, 4).tolist() == IN_TAIL


def test_fewer_anchors_than_places_are_distinct_and_ascending() -> None:
    assert draw_anchors(GAPS, 3, 3).tolist() == [1, 2, 7]
    chosen = draw_anchors(TAIL, 3, 4).tolist()
    assert len(chosen) == 3 and chosen == sorted(set(chosen))
    assert set(chosen) <= set(IN_TAIL)


def test_every_place_is_drawn_alike() -> None:
    counts = torch.zeros(10)
    for seed in range(1400):
        counts[draw_anchors(TAIL, 2, seed)] += 1
    assert counts[IN_TAIL].tolist() == pytest.approx([400.0] * 7, abs=75)  # four standard deviations
    assert counts.sum() == 2800


def test_a_draw_follows_from_its_seed() -> None:
    assert torch.equal(draw_anchors(TAIL, 2, 4), draw_anchors(TAIL, 2, 4))
    assert len({tuple(draw_anchors(TAIL, 2, seed).tolist()) for seed in range(20)}) > 5


def test_the_last_token_is_never_an_anchor() -> None:
    assert draw_anchors(torch.ones(4).bool(), 9, 0).tolist() == [0, 1, 2]


def test_a_sample_without_a_place_has_none() -> None:
    assert draw_anchors(torch.tensor([False, True, False, True]), 2, 0).tolist() == []
    with pytest.raises(UserError, match="num_anchors must be at least 1, got 0"):
        draw_anchors(GAPS, 0, 0)
