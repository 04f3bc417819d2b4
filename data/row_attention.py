"""Attention of one new token a row over rows of unequal length, on the CPU.

Rows of a batch are aligned on the right, so short ones begin with many hidden columns. Taking a few rows at a time
skips what all of them hide, and products without repeated heads read the cache once: half the time of plain attention.
Shapes: B rows, H query heads, h key-value heads, T tokens in the cache, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dominotree.target import Target

NAME = "dominotree_rows"
ROWS = 16  # taken at a time


@contextmanager
def row_attention(target: Target) -> Iterator[None]:
    """Let the target attend so, where it is on the CPU and uses `sdpa`; other targets are left as they are."""
    config = target.config
    before = config._attn_implementation
    if before != "sdpa" or target.device.type != "cpu":
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def attend_by_rows(
    module: torch.nn.Module,
    query: Tensor,  # [B, H, 1, D]
    key: Tensor,  # [B, h, T, D]
    value: Tensor,  # [B, h, T, D]
    attention_mask: Tensor | None,  # [B, 1, 1, T] bool, True where the row may look
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # [B, 1, H, D]
    """As transformers' own `sdpa`, to which anything but one token a row behind a mask of its own is left."""
    is_simple = query.shape[2] == 1 and attention_mask is not None and attention_mask.dtype == torch.bool
    if not is_simple or attention_mask is None or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    visible = attention_mask[:, 0]  # [B, 1, T]
    first = visible[:, 0].int().argmax(dim=-1).tolist()
    parts = []
    for start in range(0, len(first), ROWS):
        rows = slice(start, start + ROWS)
        columns = slice(min(first[rows]), None)
        part = key[rows, :, columns], value[rows, :, columns], visible[rows, :, columns]
        parts.append(_attend(query[rows] * scale, *part))
    return torch.cat(parts).transpose(1, 2), None


def _attend(
    query: Tensor,  # [B, H, 1, D]
    key: Tensor,  # [B, h, T, D]
    value: Tensor,  # [B, h, T, D]
    visible: Tensor,  # [B, 1, T]
) -> Tensor:  # [B, H, 1, D]
    batch, heads, _, size = query.shape
    groups = batch * key.shape[1]
    scores = torch.bmm(key.flatten(0, 1), query.reshape(groups, -1, size).transpose(1, 2))  # [B h, T, H / h]
    weights = scores.transpose(1, 2).reshape(batch, heads, -1).masked_fill_(~visible, float("-inf")).softmax(dim=-1)
    return torch.bmm(weights.view(groups, -1, key.shape[2]), value.flatten(0, 1)).view(batch, heads, 1, size)


AttentionInterface.register(NAME, attend_by_rows)
AttentionMaskInterface.register(NAME, sdpa_mask)
