"""Who sees whom when blocks are drafted: the training mask is what decoding sees, and nothing leaks into a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import small_draft
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.functional import embedding

from dominotree.draft.backbone import FixedContext
from dominotree.draft.masks import AnchorBlocks, anchor_block_rule, dense_mask
from dominotree.draft.model import DraftModel

TABLE = torch.linspace(0, 60, 13 * 32).cos().view(13, 32)
CONTEXT = 14
SLIDING: dict[str, dict[str, Any]] = {
    f"sliding_{window}_{causal}": {
        "layer_types": ("sliding_attention",) * 2,
        "sliding_window": window,
        "is_causal": causal,
    }
    for window in (1, 3, 4, 9, 30)  # below and above the block of 4 and the context
    for causal in (None, False)
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "same_position": {"shift_label": False},
    "headless": {"head": None, "shift_label": False},
    "half_sliding": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5},
    **SLIDING,
}


def embed(token_ids: Tensor) -> Tensor:
    return embedding(token_ids, TABLE)


def wave(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 2),
    blocks=st.integers(1, 4),
    context=st.integers(1, 12),
    size=st.integers(2, 5),
    window=st.none() | st.integers(1, 15),
    causal=st.booleans(),
    data=st.data(),
)
def test_the_mask_is_its_definition(
    batch: int, blocks: int, context: int, size: int, window: int | None, causal: bool, data: st.DataObject
) -> None:
    """A slot sees its sample's context before its anchor and its own block; a window and causality take from that."""
    rows = st.lists(st.lists(st.integers(0, context), min_size=blocks, max_size=blocks), min_size=batch, max_size=batch)
    flags = st.lists(st.lists(st.booleans(), min_size=blocks, max_size=blocks), min_size=batch, max_size=batch)
    anchors, keep = data.draw(rows), data.draw(flags)
    starts = [[data.draw(st.integers(0, anchor)) for anchor in row] for row in anchors]
    placed = AnchorBlocks(torch.tensor(anchors), torch.tensor(starts), torch.tensor(keep), context, size)
    rule = anchor_block_rule(placed, window=window, causal=causal)
    mask = dense_mask(rule, batch, torch.arange(blocks * size), torch.arange(context + blocks * size))
    assert mask.shape == (batch, 1, blocks * size, context + blocks * size)
    for row in range(batch):
        for query in range(blocks * size):
            block, offset = divmod(query, size)
            anchor = anchors[row][block]
            for key in range(context + blocks * size):
                if key < context:
                    sees, position = starts[row][block] <= key < anchor, key
                else:
                    other, key_offset = divmod(key - context, size)
                    sees, position = other == block and (not causal or key_offset <= offset), anchor + key_offset
                if window is not None:
                    sees = sees and anchor + offset - position < window
                assert mask[row, 0, query, key].item() is (sees and keep[row][block])


def trained_on(draft: DraftModel, attention: str, blocks: int, context: int) -> Tensor:
    """Hidden states of random blocks, some of them padding, by one of the ways to attend."""
    generator = torch.Generator().manual_seed(5)
    anchors = torch.randint(1, context, (2, blocks), generator=generator).sort().values
    keep = torch.rand(2, blocks, generator=generator) < 0.8
    draft.attention = attention
    features = torch.randn(2, context, 96, generator=generator)
    hidden = draft.train_hidden(torch.randint(13, (2, blocks), generator=generator), anchors, keep, features, embed)
    return hidden[keep]


@pytest.mark.parametrize("blocks", [2, 5, 40])  # of 4 slots: below and above a group
@pytest.mark.parametrize("kind", ["full", "causal", "half_sliding", "sliding_9_None", "sliding_3_False"])
def test_groups_of_blocks_give_what_one_mask_gives(kind: str, blocks: int) -> None:
    draft = small_draft(**KINDS[kind])
    expected = trained_on(draft, "dense", blocks, 60)
    assert len(expected)
    torch.testing.assert_close(trained_on(draft, "grouped", blocks, 60), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["full", "half_sliding", "sliding_3_False"])
def test_flex_attention_gives_what_one_mask_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # else seconds of tracing
    draft = small_draft(**KINDS[kind])
    expected = trained_on(draft, "dense", 40, 150)  # of 160 slots and 310 keys, beyond a tile of 128
    torch.testing.assert_close(trained_on(draft, "flex", 40, 150), expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        half = trained_on(draft, "flex", 40, 150)
    assert (half - expected).norm() < 0.05 * expected.norm()


def test_attention_is_chosen_by_the_device_or_by_name() -> None:
    draft = small_draft()
    assert draft.training_attention == "grouped"
    draft.attention = "dense"
    assert draft.training_attention == "dense"


@pytest.mark.parametrize("kind", ["full", "half_sliding"])
def test_groups_of_blocks_give_the_gradients_of_one_mask(kind: str) -> None:
    found: list[dict[str, Tensor]] = []
    for attention in ("dense", "grouped"):
        draft = small_draft(**KINDS[kind]).requires_grad_(True)
        trained_on(draft, attention, 40, 60).square().sum().backward()
        found.append(
            {name: weight.grad for name, weight in draft.backbone.named_parameters() if weight.grad is not None}
        )
    assert len(found[0]) == len(list(small_draft(**KINDS[kind]).backbone.parameters()))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


def drafted(draft: DraftModel, anchor_id: Tensor, anchor: int, features: Tensor) -> Tensor:
    """One decoding block behind the features of the tokens before the anchor, all there is at that time."""
    context = FixedContext(draft.backbone.project_context(features[:, :anchor], torch.arange(anchor)[None]))
    return draft.draft_hidden(anchor_id, torch.tensor([anchor]), embed, context, anchor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_block_is_the_block_that_decoding_drafts(kind: str) -> None:
    draft = small_draft(**KINDS[kind])
    features = wave(2, CONTEXT, 96)
    anchors = torch.tensor([[1, 6, 7, 13], [2, 12, 5, 0]])
    keep = torch.tensor([[True, True, True, True], [True, True, True, False]])
    anchor_ids = torch.tensor([[3, 9, 0, 4], [11, 2, 9, 0]])
    hidden = draft.train_hidden(anchor_ids, anchors, keep, features, embed)
    assert hidden.shape == (2, 4, 4, 32) and hidden.isfinite().all()
    for row, block in keep.nonzero().tolist():
        decoded = drafted(draft, anchor_ids[row, block][None], int(anchors[row, block]), features[row : row + 1])
        predicting = hidden[row, block, 4 - draft.config.draft_length :]
        torch.testing.assert_close(predicting, decoded[0], rtol=1e-4, atol=1e-5)


def test_the_kinds_of_attention_draft_differently() -> None:
    """Or the comparisons of this file would compare nothing."""
    features = wave(1, CONTEXT, 96)
    outputs = [drafted(small_draft(**KINDS[kind]), torch.tensor([3]), 13, features) for kind in KINDS]
    longest = [output for output in outputs if output.shape[1] == 4]
    distinct = {round(output.sum().item(), 3) for output in longest}
    assert len(distinct) == len(longest) - 2  # a window of 30 hides nothing: it is plain or causal full attention


@pytest.mark.parametrize("kind", ["full", "causal", "half_sliding", "sliding_9_None"])
def test_features_at_or_after_the_anchor_do_not_leak_into_its_block(kind: str) -> None:
    draft = small_draft(**KINDS[kind])
    features, anchor_ids, keep = wave(1, CONTEXT, 96), torch.tensor([[3, 9]]), torch.ones(1, 2, dtype=torch.bool)
    anchors = torch.tensor([[4, 9]])
    before = draft.train_hidden(anchor_ids, anchors, keep, features, embed)
    later, last = features.clone(), features.clone()
    later[:, 4:] += 5.0
    last[:, 3] += 5.0
    after = draft.train_hidden(anchor_ids, anchors, keep, later, embed)
    torch.testing.assert_close(after[0, 0], before[0, 0], rtol=0, atol=1e-6)
    assert (after[0, 1] - before[0, 1]).abs().max() > 1e-3
    assert (draft.train_hidden(anchor_ids, anchors, keep, last, embed)[0, 0] - before[0, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["full", "causal", "half_sliding", "sliding_9_False"])
def test_another_block_s_anchor_changes_nothing(kind: str) -> None:
    draft = small_draft(**KINDS[kind])
    features, keep = wave(1, CONTEXT, 96), torch.ones(1, 3, dtype=torch.bool)
    before = draft.train_hidden(torch.tensor([[3, 9, 4]]), torch.tensor([[4, 5, 9]]), keep, features, embed)
    for other_ids, other_anchors, other_keep in (
        ([3, 1, 4], [4, 5, 9], [True, True, True]),
        ([3, 9, 4], [4, 8, 9], [True, True, True]),
        ([3, 9, 4], [4, 5, 9], [True, False, True]),
    ):
        after = draft.train_hidden(
            torch.tensor([other_ids]), torch.tensor([other_anchors]), torch.tensor([other_keep]), features, embed
        )
        torch.testing.assert_close(after[0, [0, 2]], before[0, [0, 2]], rtol=0, atol=1e-6)
        assert (after[0, 1] - before[0, 1]).abs().max() > 1e-3


def test_a_padded_block_harms_no_gradient() -> None:
    draft = small_draft().requires_grad_(True)
    keep = torch.tensor([[True, False]])
    hidden = draft.train_hidden(torch.tensor([[3, 0]]), torch.tensor([[4, 0]]), keep, wave(1, CONTEXT, 96), embed)
    hidden[keep].square().sum().backward()
    gradients = [weight.grad for weight in draft.backbone.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
