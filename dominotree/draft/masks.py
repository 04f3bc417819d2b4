"""Who may attend to whom inside and across anchor blocks (DFlash, section 3), and attention that keeps to it.

Shapes: B batch, A anchors, S context positions, Q = A * block queries, D head dimension. Keys and values hold the
context first and the slots of all blocks behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Visible = Callable[[Any, Any, Any, Any], Tensor]  # indices of batch, head, query and key that broadcast -> bool
Attend = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # queries [B, h, Q, D], keys, values [B, g, S + Q, D] -> [B, h, Q, D]

GROUP_SLOTS = 64  # queries that share a mask on the CPU, see `attend_in_groups`
FLEX_HEAD_DIM = 16  # the smallest that flex attention's kernels take


@dataclass(frozen=True)
class AnchorBlocks:
    """A anchor blocks of every row, laid side by side behind S context positions."""

    anchors: Tensor  # [B, A] places of the anchors in their row
    starts: Tensor  # [B, A] where in the row the sample of each begins: 0 but for samples that share a row
    keep: Tensor  # [B, A] bool, False for a padded block
    context_length: int
    block_size: int


def anchor_block_rule(blocks: AnchorBlocks, *, window: int | None = None, causal: bool = False) -> Visible:
    """Who sees whom.

    A slot sees the context of its own sample strictly before its anchor, since the anchor's own target feature does not
    exist yet when the block is drafted, and the slots of its own block, never another block. `window` also bounds the
    distance to the left; `causal` hides later slots of the block. A padded block sees nothing.
    """
    anchors, starts, keep, block_size = blocks.anchors, blocks.starts, blocks.keep, blocks.block_size
    # A tensor, for a compiled rule must not depend on a number that changes from batch to batch.
    length = torch.tensor(blocks.context_length, device=anchors.device)

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        block, offset = query // block_size, query % block_size
        anchor = anchors[batch, block]
        slot = (key - length).clamp(min=0)
        in_context = key < length
        own_context = (key >= starts[batch, block]) & (key < anchor)
        sees = torch.where(in_context, own_context, slot // block_size == block)
        distance = torch.where(in_context, anchor - key, -(slot % block_size)) + offset
        if window is not None:
            sees = sees & (distance < window)
        if causal:
            sees = sees & (distance >= 0)
        return sees & keep[batch, block]

    return visible


def dense_mask(visible: Visible, batch_size: int, queries: Tensor, keys: Tensor) -> Tensor:  # [q], [k] indices
    """The rule written out, [B, 1, q, k] bool, True = may attend."""
    batch = torch.arange(batch_size, device=queries.device)
    return visible(batch[:, None, None], None, queries[:, None], keys)[:, None]


def attend_by_mask(mask: Tensor | None) -> Attend:  # [B, 1, Q, S + Q] bool; None = everything visible
    """Attention with one mask over everything."""

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if mask is not None and queries.is_cuda:
            # With a mask, CUDA has no memory-efficient kernel for grouped queries: repeat the heads for it.
            groups = queries.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

    return attend


def attend_densely(visible: Visible, blocks: AnchorBlocks) -> Attend:
    """Attention with one mask over all blocks: the plainest, which the others must equal."""
    device, slots = blocks.anchors.device, blocks.anchors.shape[1] * blocks.block_size
    queries, keys = (torch.arange(count, device=device) for count in (slots, blocks.context_length + slots))
    return attend_by_mask(dense_mask(visible, len(blocks.anchors), queries, keys))


def attend_in_groups(visible: Visible, blocks: AnchorBlocks) -> Attend:
    """Attention of some blocks at a time: with ascending anchors a group needs one stretch of the context, and no slots
    but its own. Most of what one mask over everything hides is never formed."""
    anchors, block_size, context_length = blocks.anchors, blocks.block_size, blocks.context_length
    ends = torch.where(blocks.keep, anchors, 0).clamp(max=context_length)  # padded blocks need no context
    begins = torch.where(blocks.keep, blocks.starts, context_length)
    per_group = max(1, GROUP_SLOTS // block_size)
    groups: list[tuple[slice, slice, Tensor]] = []  # queries, the stretch of the context, mask
    for first in range(0, anchors.shape[1], per_group):
        members = slice(first, min(first + per_group, anchors.shape[1]))
        own = torch.arange(first * block_size, members.stop * block_size, device=anchors.device)
        end = int(ends[:, members].max())
        stretch = slice(min(end, int(begins[:, members].min())), end)
        keys = torch.cat([torch.arange(stretch.start, end, device=anchors.device), context_length + own])
        groups.append((slice(int(own[0]), int(own[-1]) + 1), stretch, dense_mask(visible, len(anchors), own, keys)))

    def seen(rows: Tensor, own: slice, stretch: slice) -> Tensor:  # [B, g, S + Q, D] -> [B, g, s + q, D]
        return torch.cat([rows[:, :, stretch], rows[:, :, context_length:][:, :, own]], dim=2)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mixed = [
            attend_by_mask(mask)(queries[:, :, own], seen(keys, own, stretch), seen(values, own, stretch))
            for own, stretch, mask in groups
        ]
        return torch.cat(mixed, dim=2)

    return attend


def attend_by_flex(visible: Visible, blocks: AnchorBlocks) -> Attend:
    """Flex attention: stretches of the mask that hide everything are skipped, and its entries are never written out.

    Compiled on CUDA; elsewhere torch's plain version runs, which has no backward pass.
    """
    anchors, compiled = blocks.anchors, blocks.anchors.is_cuda
    make = _compiled_create_block_mask() if compiled else create_block_mask
    attention = _compiled_flex_attention() if compiled else flex_attention
    slots = anchors.shape[1] * blocks.block_size
    mask = make(visible, len(anchors), None, slots, blocks.context_length + slots, device=str(anchors.device))

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        kind = queries.device.type
        if torch.is_autocast_enabled(kind):  # which does not reach flex attention
            queries, keys, values = (part.to(torch.get_autocast_dtype(kind)) for part in (queries, keys, values))
        return attention(queries, keys, values, block_mask=mask, enable_gqa=True)

    return attend


ATTENTIONS = {"dense": attend_densely, "grouped": attend_in_groups, "flex": attend_by_flex}


@cache
def _compiled_create_block_mask() -> Any:
    return torch.compile(create_block_mask)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention)
