"""Who may attend to whom inside and across anchor blocks (DFlash, section 3), and attention that keeps to it.

Shapes: B batch, A anchors, S context positions, Q = A * block queries, D head dimension. Keys and values hold the
context first and the slots of all blocks behind it.
"""

from __future__ import annotations

from collections.abc import Callable
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


def anchor_block_rule(
    anchors: Tensor,  # [B, A] positions of the anchors
    keep: Tensor,  # [B, A] bool, False for a padded block
    context_length: int,
    block_size: int,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Visible:
    """The rule for A anchor blocks laid side by side behind S context positions.

    A slot sees the context strictly before its anchor, since the anchor's own target feature does not exist yet when
    the block is drafted, and the slots of its own block, never another block. `window` also bounds the distance to
    the left; `causal` hides later slots of the block. A padded block sees nothing.
    """
    # A tensor, for a compiled rule must not depend on a number that changes from batch to batch.
    length = torch.tensor(context_length, device=anchors.device)

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        block, offset = query // block_size, query % block_size
        anchor = anchors[batch, block]
        slot = (key - length).clamp(min=0)
        in_context = key < length
        sees = torch.where(in_context, key < anchor, slot // block_size == block)
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


def attend_densely(visible: Visible, anchors: Tensor, block_size: int, context_length: int) -> Attend:  # anchors [B, A]
    """Attention with one mask over all blocks: the plainest, which the others must equal."""
    slots = anchors.shape[1] * block_size
    queries, keys = (torch.arange(count, device=anchors.device) for count in (slots, context_length + slots))
    return attend_by_mask(dense_mask(visible, len(anchors), queries, keys))


def attend_in_groups(visible: Visible, anchors: Tensor, block_size: int, context_length: int) -> Attend:
    """Attention of some blocks at a time: with ascending anchors [B, A] a group reaches only so far into the context,
    and needs no slots but its own. Most of what one mask over everything hides is never formed."""
    per_group = max(1, GROUP_SLOTS // block_size)
    groups: list[tuple[slice, int, Tensor]] = []  # queries, positions of the context in reach, mask
    for first in range(0, anchors.shape[1], per_group):
        members = anchors[:, first : first + per_group]
        own = torch.arange(first * block_size, (first + members.shape[1]) * block_size, device=anchors.device)
        reach = min(context_length, int(members.max()))
        keys = torch.cat([torch.arange(reach, device=anchors.device), context_length + own])
        groups.append((slice(int(own[0]), int(own[-1]) + 1), reach, dense_mask(visible, len(anchors), own, keys)))

    def seen(rows: Tensor, own: slice, reach: int) -> Tensor:  # [B, g, S + Q, D] -> [B, g, reach + q, D]
        return torch.cat([rows[:, :, :reach], rows[:, :, context_length:][:, :, own]], dim=2)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mixed = [
            attend_by_mask(mask)(queries[:, :, own], seen(keys, own, reach), seen(values, own, reach))
            for own, reach, mask in groups
        ]
        return torch.cat(mixed, dim=2)

    return attend


def attend_by_flex(visible: Visible, anchors: Tensor, block_size: int, context_length: int) -> Attend:
    """Flex attention: stretches of the mask that hide everything are skipped, and its entries are never written out.

    Compiled on CUDA; elsewhere torch's plain version runs, which has no backward pass.
    """
    compiled = anchors.is_cuda
    make = _compiled_create_block_mask() if compiled else create_block_mask
    attention = _compiled_flex_attention() if compiled else flex_attention
    slots = anchors.shape[1] * block_size
    blocks = make(visible, len(anchors), None, slots, context_length + slots, device=str(anchors.device))

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        kind = queries.device.type
        if torch.is_autocast_enabled(kind):  # which does not reach flex attention
            queries, keys, values = (part.to(torch.get_autocast_dtype(kind)) for part in (queries, keys, values))
        return attention(queries, keys, values, block_mask=blocks, enable_gqa=True)

    return attend


ATTENTIONS = {"dense": attend_densely, "grouped": attend_in_groups, "flex": attend_by_flex}


@cache
def _compiled_create_block_mask() -> Any:
    return torch.compile(create_block_mask)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention)
