"""What an update trains on, made ahead of it on the CPU: samples in rows, their anchors, their stored features.

Everything follows from the seed, the update and the samples, so that it does not matter when or by which thread it is
made. Shapes: B rows, S tokens, A anchors, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from data.anchors import draw_anchors
from data.batches import collate, pack
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
    starts: Tensor | None  # [B, S] where in its row each token's sample begins; None where no two share a row
    features: Tensor | None  # [B, S, F], None where the target is to compute them
    lengths: tuple[int, ...]  # tokens of each sample

    def to(self, device: torch.device) -> MicroBatch:
        if self.features is not None and self.features.is_cuda:
            # Made in another stream: that one must not reuse the memory before this one has read it.
            self.features.record_stream(torch.cuda.current_stream(self.features.device))
        return MicroBatch(
            self.input_ids.to(device),
            self.loss_mask.to(device),
            self.anchors.to(device),
            self.keep.to(device),
            None if self.starts is None else self.starts.to(device),
            None if self.features is None else self.features.to(device),
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
        pack_length: int | None,  # tokens of a row that samples may share; None: one sample a row
        num_anchors: int,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._samples = samples
        self._cache = cache
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._pack_length = pack_length
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
        silent = replace(idle, loss_mask=[False] * _length(idle))
        rows = pack(samples or [silent], self._pack_length)
        batch = collate(rows, pad_id=0)
        anchors, keep = self._anchors(rows, update)
        shared = any(len(row) > 1 for row in rows)
        features = None
        if self._cache is not None:
            features = self._cache.get_batch([[sample.sample_id for sample in row] for row in rows])
        return MicroBatch(
            batch.input_ids,
            batch.loss_mask,
            anchors,
            keep,
            batch.starts if shared else None,
            features,
            tuple(_length(sample) for row in rows for sample in row),
        )

    def _anchors(self, rows: Sequence[Sequence[Sample]], update: int) -> tuple[Tensor, Tensor]:  # [B, A], [B, A] bool
        """The anchors of every row's samples, ascending, and which of them are padding."""
        drawn = [self._drawn(row, update) for row in rows]
        most = max(1, *map(len, drawn))
        anchors, keep = torch.zeros(len(rows), most, dtype=torch.int64), torch.zeros(len(rows), most, dtype=torch.bool)
        for index, places in enumerate(drawn):
            anchors[index, : len(places)] = places
            keep[index, : len(places)] = True
        return anchors, keep

    def _drawn(self, row: Sequence[Sample], update: int) -> Tensor:  # [a] places in the row
        places, start = [], 0
        for sample in row:
            seed = anchor_seed(self._seed, update, sample.sample_id)
            places.append(draw_anchors(torch.tensor(sample.loss_mask), self._num_anchors, seed) + start)
            start += _length(sample)
        return torch.cat(places)


def _length(sample: Sample) -> int:
    return len(sample.token_ids)
