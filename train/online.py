"""features=ahead: the target runs on the next samples while the drafter trains on the present ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from dominotree.target import Target

from .feed import Feed, MicroBatch


class FeedAhead:
    """A feed whose micro-batches come with features, made by the thread that takes them.

    On a GPU in a stream of its own, so that the draft's work does not wait for the target's; it is done when a
    micro-batch is handed out. The features stay where the target is.
    """

    def __init__(self, feed: Feed, target: Target, layer_ids: Sequence[int]) -> None:
        self._feed = feed
        self._target = target
        self._layer_ids = layer_ids
        self._stream = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None

    def micro_batches(self, update: int) -> list[MicroBatch]:
        batches = self._feed.micro_batches(update)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            made = [replace(batch, features=self._features(batch)) for batch in batches]
        if self._stream is not None:
            self._stream.synchronize()
        return made

    def _features(self, batch: MicroBatch) -> torch.Tensor:  # [B, S, F]
        moved = batch.to(self._target.device)
        return self._target.features(moved.input_ids, self._layer_ids, moved.starts)
