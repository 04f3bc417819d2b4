"""What an update trains on, made ahead of it on the CPU: samples side by side, their anchors, their stored features.

Everything follows from the seed, the update and the samples, so that it does not matter when or by which thread it is
made. Shapes: B batch, S tokens, A anchors, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from data.anchors import draw_anchors
from data.batches import collate
from data.features import FeatureCache
from data.samples import Sample

from .updates import anchor_seed, own_share, update_samples


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass of one process reads."""

    input_ids: Tensor  # [B, S]
    loss_mask: Tensor  # [B, S]
    anchors: Tensor  # [B, A]
    keep: Tensor  # [B, A]
    features: Tensor | None  # [B, S, F], None where the target is to compute them
    lengths: tuple[int, ...]  # [B] tokens of each sample

    def to(self, device: torch.device) -> MicroBatch:
        if self.features is not None and self.features.is_cuda:
            # Made in another stream: that one must not reuse the memory before this one has read it.
            self.features.record_stream(torch.cuda.current_stream(self.features.device))
        features = None if self.features is None else self.features.to(device)
        return MicroBatch(
            self.input_ids.to(device),
            self.loss_mask.to(device),
            self.anchors.to(device),
            self.keep.to(device),
            features,
            self.lengths,
        )


class Feed:
    """The micro-batches of one process."""

    def __init__(
        self,
        samples: Sequence[Sample],
        cache: FeatureCache | None,
        *,
        batch_size: int,  # samples an update, over all processes
        micro_batch_size: int,
        num_anchors: int,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._samples = samples
        self._cache = cache
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._num_anchors = num_anchors
        self._seed = seed
        self._rank = rank
        self._world_size = world_size

    def micro_batches(self, update: int) -> list[MicroBatch]:
        """Of one update (the first is 1); every process gets equally many. Samples of like lengths go together, which
        leaves less padding and changes nothing else."""
        indices = update_samples(update, self._batch_size, len(self._samples), self._seed)
        share = own_share(indices, self._rank, self._world_size, self._micro_batch_size)
        mine = iter(sorted((self._samples[index] for part in share for index in part), key=_length, reverse=True))
        idle = self._samples[indices[0]]
        return [self._micro_batch(list(islice(mine, len(part))), idle, update) for part in share]

    def _micro_batch(self, samples: list[Sample], idle: Sample, update: int) -> MicroBatch:
        """Without samples it is one that teaches nothing, so that all processes take equal steps."""
        batch = collate(samples or [idle], pad_id=0)
        mask = batch.loss_mask if samples else torch.zeros_like(batch.loss_mask)
        seeds = [anchor_seed(self._seed, update, sample_id) for sample_id in batch.sample_ids]
        anchors, keep = draw_anchors(mask, self._num_anchors, seeds)
        most = max(1, int(keep.sum(dim=1).max()))  # blocks in the sample that has room for most
        features = None if self._cache is None else self._cache.get_batch(batch.sample_ids)
        lengths = tuple(len(sample.token_ids) for sample in samples or [idle])
        return MicroBatch(batch.input_ids, mask, anchors[:, :most], keep[:, :most], features, lengths)


def _length(sample: Sample) -> int:
    return len(sample.token_ids)
