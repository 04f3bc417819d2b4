"""Anchors are drawn uniformly, without replacement, where an anchor and its successor are supervised."""

from __future__ import annotations

import pytest
import torch

from data.anchors import draw_anchors
from dominotree.errors import UserError

MASK = torch.tensor([[0, 1, 1, 1, 0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]]).bool()
VALID = [[1, 2, 7], [2, 3, 4, 5, 6, 7, 8]]


def test_anchors_lie_where_they_and_their_successors_are_supervised() -> None:
    anchors, keep = draw_anchors(MASK, 9, [3, 4])
    for row in range(2):
        assert anchors[row][keep[row]].tolist() == VALID[row]
        assert keep[row].tolist() == [True] * len(VALID[row]) + [False] * (9 - len(VALID[row]))


def test_fewer_anchors_than_places_are_distinct_and_ascending() -> None:
    anchors, keep = draw_anchors(MASK, 3, [3, 4])
    assert bool(keep.all())
    assert anchors[0].tolist() == VALID[0]
    chosen = anchors[1].tolist()
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(VALID[1])


def test_every_place_is_drawn_alike() -> None:
    counts = torch.zeros(10)
    for seed in range(1400):
        anchors, _ = draw_anchors(MASK[1:], 2, [seed])
        counts[anchors[0]] += 1
    assert counts[VALID[1]].tolist() == pytest.approx([400.0] * 7, abs=75)  # four standard deviations
    assert counts.sum() == 2800


def test_a_draw_follows_from_its_seed_whatever_shares_the_batch() -> None:
    together, _ = draw_anchors(MASK, 2, [3, 4])
    alone, _ = draw_anchors(MASK[1:], 2, [4])
    padded, _ = draw_anchors(torch.nn.functional.pad(MASK[1:], (0, 5)), 2, [4])
    assert together[1].tolist() == alone[0].tolist() == padded[0].tolist()
    assert len({tuple(draw_anchors(MASK[1:], 2, [seed])[0][0].tolist()) for seed in range(20)}) > 5


def test_the_last_token_is_never_an_anchor() -> None:
    anchors, keep = draw_anchors(torch.ones(1, 4).bool(), 9, [0])
    assert anchors[0][keep[0]].tolist() == [0, 1, 2]


def test_a_sample_without_a_place_has_none() -> None:
    _, keep = draw_anchors(torch.tensor([[0, 1, 0, 1]]), 2, [0])
    assert not keep.any()
    with pytest.raises(UserError, match="num_anchors must be at least 1, got 0"):
        draw_anchors(MASK, 0, [0, 0])
