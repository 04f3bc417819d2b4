"""Key-value caches that grow at the end and are compacted at the end: all cache surgery lives here.

Shapes: B batch, h key-value heads, T tokens, D head dimension.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..draft.backbone import DFlashBackbone, KeysValues


class GrowingBuffer:
    """Keys and values of one layer in buffers that at least double when full, so that appending copies no history."""

    def __init__(self, reserve: int) -> None:
        self.length = 0
        self._capacity = reserve
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> KeysValues:  # [B, h, T, D] -> [B, h, length + T, D]
        """Put T tokens behind the live ones without making them live; returns views of all of them."""
        end = self.length + keys.shape[2]
        self._keys = self._reserve(self._keys, keys, end)
        self._values = self._reserve(self._values, values, end)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        return self._keys[:, :, :end], self._values[:, :, :end]

    def keep(self, prefix_length: int, rows: Tensor) -> None:
        """Of the tokens from `prefix_length` on keep those at the offsets `rows` [R], moved up in that order."""
        assert self._keys is not None and self._values is not None
        end = prefix_length + len(rows)
        for buffer in (self._keys, self._values) if len(rows) else ():
            buffer[:, :, prefix_length:end] = buffer[:, :, prefix_length + rows]
        self.length = end

    def _reserve(self, buffer: Tensor | None, like: Tensor, end: int) -> Tensor:
        if buffer is not None and end <= buffer.shape[2]:
            return buffer
        self._capacity = max(end, self._capacity if buffer is None else 2 * buffer.shape[2])
        grown = like.new_empty(*like.shape[:2], self._capacity, like.shape[3])
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown


class _TargetLayer(DynamicLayer):
    """A transformers cache layer on a GrowingBuffer. It keeps every position, on sliding-window layers too, because
    rejected tokens must be able to leave again; the attention mask bounds the window instead."""

    def __init__(self, reserve: int) -> None:
        super().__init__()
        self.buffer = GrowingBuffer(reserve)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        self.is_initialized = True
        self.keys, self.values = self.buffer.write(key_states, value_states)
        self.buffer.length = self.keys.shape[2]
        return self.keys, self.values

    def get_seq_length(self, *args: Any) -> int:
        return self.buffer.length


class VisibilityBuffer:
    """Who of a window sees whom, over all committed tokens too, in one buffer: only the window's columns change."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._written = slice(0, 0)  # columns of the window before

    def over(self, visible: Tensor, past: int) -> Tensor:  # [B, Q, Q] bool -> [B, Q, past + Q]
        """`visible` behind `past` columns that everyone sees; the view holds until the next call."""
        batch, size, _ = visible.shape
        buffer, end = self._buffer, past + size
        if buffer is None or buffer.shape[0] != batch or buffer.shape[1] < size or buffer.shape[2] < end:
            buffer = visible.new_ones(batch, size, 2 * end)
            self._buffer, self._written = buffer, slice(0, 0)
        buffer[:, :, self._written] = True
        self._written = slice(past, end)
        buffer[:, :size, self._written] = visible
        return buffer[:, :size, :end]


class TargetCache(Cache):
    """The target's keys and values of the committed tokens.

    A verification forward appends its whole window; `keep` then leaves the accepted rows only. One copy of the cache
    is held whatever the tree.
    """

    def __init__(self, reserve: int) -> None:
        """`reserve`: tokens to make room for at first; more are taken when needed."""
        self._target_layers: list[_TargetLayer] = []
        self.visibility = VisibilityBuffer()
        super().__init__(layers=cast(Any, self._target_layers))
        self._reserve = max(1, reserve)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._target_layers[0].buffer.length if self._target_layers else 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> KeysValues:
        while len(self._target_layers) <= layer_idx:
            self._target_layers.append(_TargetLayer(self._reserve))
        return self._target_layers[layer_idx].update(key_states, value_states)

    def keep(self, prefix_length: int, rows: Tensor, in_place: int = 0) -> None:
        """Commit: of the window that starts at `prefix_length` keep the offsets `rows` [R] int64, ascending.

        `in_place`: how many of them, from the first on, are where they belong and need no copying.
        """
        moved = rows[in_place:] - in_place
        for layer in self._target_layers:
            # Layers that share another layer's keys and values stay empty.
            if layer.buffer.length:
                layer.buffer.keep(prefix_length + in_place, moved)


class DraftCache:
    """The drafter's context: keys and values projected from the features of committed tokens.

    A block's own keys and values are written behind the context for one pass and never become part of it.
    """

    def __init__(self, backbone: DFlashBackbone, reserve: int) -> None:
        self._backbone = backbone
        self._layers = [GrowingBuffer(reserve) for _ in backbone.layers]

    @property
    def length(self) -> int:
        """Committed tokens whose features have arrived."""
        return self._layers[0].length

    def append(self, features: Tensor) -> None:  # [B, C, F]
        """Project the target features of the next C committed tokens."""
        positions = torch.arange(self.length, self.length + features.shape[1], device=features.device)[None]
        for buffer, (keys, values) in zip(
            self._layers, self._backbone.project_context(features, positions), strict=True
        ):
            buffer.write(keys, values)
            buffer.length += features.shape[1]

    def with_block(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        return self._layers[layer].write(keys, values)
