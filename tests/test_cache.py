"""The caches: what was kept, and nothing else, is what the next forward sees; appending copies no history."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import FAMILIES, make_target, small_draft
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dominotree.decode.cache import DraftCache, GrowingBuffer, TargetCache, VisibilityBuffer
from dominotree.draft.backbone import FixedContext
from dominotree.target import Target


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_tree(size: int, rng: random.Random) -> tuple[list[int], Tensor, Tensor]:
    """Parents (-1 the root), depths [1, 1 + N] and visibility [1, 1 + N, 1 + N] of a root and N nodes."""
    parents = [rng.randint(-1, node - 1) for node in range(size)]
    visible, depths = torch.eye(1 + size, dtype=torch.bool), [0]
    for node, parent in enumerate(parents):
        visible[1 + node] |= visible[1 + parent]
        depths.append(depths[1 + parent] + 1)
    return parents, torch.tensor([depths]), visible[None]


def path_to(node: int, parents: list[int]) -> list[int]:
    """Rows of the window from the root to `node`, -1 being the root."""
    rows = [0]
    while node >= 0:
        rows.insert(1, 1 + node)
        node = parents[node]
    return rows


def plain_logits(target: Target, token_ids: list[int]) -> Tensor:  # [T, V]
    """Transformers' own forward without any cache."""
    with torch.no_grad():
        return target.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_rows_are_as_if_only_they_had_been_fed(family: str) -> None:
    """Thirty rounds of a tree, of which a random path is kept, from a cache that must grow five times."""
    target, rng = make_target(family), random.Random(5)
    committed = [rng.randrange(13) for _ in range(5)]
    cache = TargetCache(reserve=4)
    target.forward(torch.tensor([committed]), cache)
    for _ in range(30):
        size = rng.randint(0, 8)
        parents, depths, visible = random_tree(size, rng)
        tokens = [rng.randrange(13) for _ in range(1 + size)]
        length = cache.length
        output = target.forward(
            torch.tensor([tokens]), cache, positions=depths + length, visible=visible if size else None
        )
        rows = path_to(rng.randint(-1, size - 1), parents)
        cache.keep(length, torch.tensor(rows))
        committed += [tokens[row] for row in rows]
        assert cache.length == len(committed)
        expected = plain_logits(target, committed)[-len(rows) :]
        torch.testing.assert_close(output.logits[0, rows], expected, rtol=1e-4, atol=1e-4)
    assert len(committed) > 64


def test_nothing_of_a_rejected_window_remains() -> None:
    target = make_target()
    prompt, after = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[9, 2]])
    cache, clean = TargetCache(reserve=64), TargetCache(reserve=64)
    for held in (cache, clean):
        target.forward(prompt, held)
    target.forward(torch.tensor([[7, 7, 7, 7]]), cache)
    cache.keep(5, torch.tensor([], dtype=torch.int64))
    assert cache.length == 5
    torch.testing.assert_close(
        target.forward(after, cache).logits, target.forward(after, clean).logits, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [0, 1, 3], [0, 2, 3], [0, 3]])
def test_rows_in_place_are_kept_without_being_copied(rows: list[int]) -> None:
    target = make_target()
    prompt, window, after = (torch.tensor([ids]) for ids in ([3, 1, 4, 1], [5, 9, 2, 6], [7, 8]))
    in_place = sum(place == row for place, row in enumerate(rows))
    logits = []
    for said in (0, in_place):
        cache = TargetCache(reserve=64)
        target.forward(prompt, cache)
        target.forward(window, cache)
        cache.keep(4, torch.tensor(rows), said)
        assert cache.length == 4 + len(rows)
        logits.append(target.forward(after, cache).logits)
    assert torch.equal(*logits)


@given(
    rounds=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 10**6)), min_size=1, max_size=8),
    batch=st.integers(1, 2),
)
@settings(deadline=None)
def test_everyone_sees_what_is_committed_and_of_the_window_what_is_visible(
    rounds: list[tuple[int, int, int]], batch: int
) -> None:
    """Windows of any size behind a context that grows by less than the window, as rejected tokens leave it."""
    buffer, past = VisibilityBuffer(), 0
    for grown, size, seed in rounds:
        past += grown
        visible = torch.rand(batch, size, size, generator=torch.Generator().manual_seed(seed)) < 0.5
        seen = buffer.over(visible, past)
        assert torch.equal(seen, torch.cat([torch.ones(batch, size, past, dtype=torch.bool), visible], dim=-1))


def test_the_visibility_stays_in_one_buffer() -> None:
    buffer = VisibilityBuffer()
    places = {buffer.over(torch.ones(1, 5, 5, dtype=torch.bool), past).data_ptr() for past in range(40, 80)}
    assert len(places) == 1


def test_an_empty_cache_has_no_length() -> None:
    assert TargetCache(reserve=10).length == 0
    assert DraftCache(small_draft().backbone, reserve=10).length == 0


def addresses(cache: TargetCache) -> list[int]:
    layers: list[Any] = list(cache.layers)
    return [tensor.data_ptr() for layer in layers for tensor in (layer.keys, layer.values)]


def test_the_target_s_buffers_stay_where_they_are_within_the_reserve() -> None:
    target, cache = make_target(), TargetCache(reserve=60)
    target.forward(torch.tensor([[3, 1, 4]]), cache)
    before = addresses(cache)
    for _ in range(10):
        length = cache.length
        target.forward(torch.tensor([[5, 9, 2, 6]]), cache)
        cache.keep(length, torch.tensor([0, 2]))
        assert addresses(cache) == before
    assert cache.length == 23


def test_a_full_buffer_at_least_doubles() -> None:
    buffer, moves, last = GrowingBuffer(reserve=4), 0, 0
    for _ in range(500):
        keys, values = buffer.write(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
        buffer.length += 1
        moves += (keys.untyped_storage().nbytes(), values.untyped_storage().nbytes()) != (last, last)
        last = keys.untyped_storage().nbytes()
    assert moves == 8  # 4, 8, 16, ..., 512


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 2**7 - 1)), min_size=1, max_size=12),
    reserve=st.integers(1, 40),
)
def test_a_buffer_holds_what_a_list_would(steps: list[tuple[int, int]], reserve: int) -> None:
    buffer, number = GrowingBuffer(reserve), 0
    held: list[int] = []
    for count, chosen in steps:
        fresh = list(range(number, number + count))
        number += count
        new = torch.tensor(fresh, dtype=torch.float32).view(1, 1, count, 1).expand(1, 2, count, 3)
        keys, values = buffer.write(new, -new)
        assert keys[0, 1, :, 2].tolist() == held + fresh
        rows = [row for row in range(count) if chosen >> row & 1]
        buffer.keep(len(held), torch.tensor(rows, dtype=torch.int64))
        held += [fresh[row] for row in rows]
        assert buffer.length == len(held)
    keys, values = buffer.write(torch.zeros(1, 2, 0, 3), torch.zeros(1, 2, 0, 3))
    assert keys[0, 0, :, 0].tolist() == held
    assert values[0, 1, :, 1].tolist() == [-number for number in held]


def context_of(cache: DraftCache, layers: int) -> list[tuple[Tensor, Tensor]]:
    """The context's keys and values, by asking for a block of no slots."""
    nothing = torch.zeros(1, 2, 0, 8)
    return [cache.with_block(layer, nothing, nothing) for layer in range(layers)]


@pytest.mark.parametrize("pieces", [[11], [1] * 11, [3, 1, 7], [10, 1]])
@pytest.mark.parametrize("reserve", [1, 64])
def test_features_in_pieces_are_features_at_once(pieces: list[int], reserve: int) -> None:
    backbone = small_draft().backbone
    features = noise(1, 11, 96)
    cache, start = DraftCache(backbone, reserve), 0
    for count in pieces:
        cache.append(features[:, start : start + count])
        start += count
        assert cache.length == start
    expected = backbone.project_context(features, torch.arange(11)[None])
    for (keys, values), (expected_keys, expected_values) in zip(context_of(cache, 2), expected, strict=True):
        torch.testing.assert_close(keys, expected_keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(values, expected_values, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"layer_types": ("sliding_attention",) * 2, "sliding_window": 5}, {"is_causal": True}]
)
def test_drafting_round_by_round_is_drafting_from_the_whole_context(options: dict[str, Any]) -> None:
    draft, table = small_draft(**options), noise(13, 32, seed=4)
    features, anchor_id = noise(1, 20, 96), torch.tensor([7])
    cache = DraftCache(draft.backbone, reserve=2)
    for start, end in ((0, 4), (4, 5), (5, 12), (12, 20)):
        cache.append(features[:, start:end])
        fresh = FixedContext(draft.backbone.project_context(features[:, :end], torch.arange(end)[None]))
        position = torch.tensor([end])
        ours, expected = (
            draft.draft_hidden(anchor_id, position, lambda ids: table[ids], context, end) for context in (cache, fresh)
        )
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_a_block_never_becomes_part_of_the_context() -> None:
    draft, table = small_draft(), noise(13, 32, seed=4)
    cache, features = DraftCache(draft.backbone, reserve=32), noise(1, 6, 96)
    cache.append(features)
    before = [(keys.clone(), values.clone()) for keys, values in context_of(cache, 2)]

    def drafted(anchor: int) -> Tensor:
        return draft.draft_hidden(torch.tensor([anchor]), torch.tensor([6]), lambda ids: table[ids], cache, 6)

    first = drafted(7)
    assert not torch.equal(drafted(3), first)
    assert cache.length == 6
    assert torch.equal(drafted(7), first)
    for (keys, values), (expected_keys, expected_values) in zip(context_of(cache, 2), before, strict=True):
        assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


def test_the_drafter_s_buffers_stay_where_they_are_within_the_reserve() -> None:
    draft, table = small_draft(), noise(13, 32, seed=4)
    cache = DraftCache(draft.backbone, reserve=40)
    places = set()
    for length in range(3, 33, 3):
        cache.append(noise(1, 3, 96))
        draft.draft_hidden(torch.tensor([7]), torch.tensor([length]), lambda ids: table[ids], cache, length)
        places.add(tuple(tensor.data_ptr() for pair in context_of(cache, 2) for tensor in pair))
    assert len(places) == 1
