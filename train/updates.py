"""Which samples every update trains on, and with which anchors.

Both follow from the seed, the update and the sample alone: neither the number of processes, nor the micro-batch size,
nor how often training was interrupted changes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import overload

from data.batches import epoch_order
from data.samples import Sample
from dominotree.errors import UserError


class Selection(Sequence[Sample]):
    """Some samples of a set, read when they are asked for."""

    def __init__(self, samples: Sequence[Sample], indices: Sequence[int]) -> None:
        self._samples = samples
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._samples[place] for place in self._indices[index]]
        return self._samples[self._indices[index]]


def total_updates(count: int, batch_size: int, *, updates: int | None, epochs: int | None) -> int:
    """Optimizer updates in all, of `batch_size` samples each; an epoch's last update may reach into the next one."""
    if updates is not None:
        return updates
    assert epochs is not None
    return -(-count * epochs // batch_size)


def update_samples(update: int, batch_size: int, count: int, seed: int) -> list[int]:
    """Indices of the samples of one update (the first is 1): the next `batch_size` of the epochs strung together."""
    first = (update - 1) * batch_size
    orders: dict[int, list[int]] = {}
    chosen = []
    for place in range(first, first + batch_size):
        epoch, index = divmod(place, count)
        if epoch not in orders:
            orders[epoch] = epoch_order(count, seed, epoch)
        chosen.append(orders[epoch][index])
    return chosen


def own_share(samples: Sequence[int], rank: int, world_size: int, micro_batch_size: int) -> list[list[int]]:
    """The micro-batches of one process. Every process gets equally many; one without samples left gets empty ones."""
    shares = [list(samples[other::world_size]) for other in range(world_size)]
    longest = -(-len(shares[0]) // micro_batch_size)
    mine = shares[rank]
    return [mine[start * micro_batch_size : (start + 1) * micro_batch_size] for start in range(longest)]


def anchor_seed(seed: int, update: int, sample_id: int) -> int:
    """A seed for the anchors of one sample in one update: redrawn each time, and the same when resumed."""
    digest = hashlib.blake2b(f"{seed}/{update}/{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def split_held_out(count: int, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on and to validate on. Raises UserError where nothing would be left to train on."""
    if count <= held_out:
        raise UserError(
            f"{count} samples are too few to hold out validation.samples={held_out}; prepare more or hold out fewer"
        )
    order = epoch_order(count, seed, epoch=-1)
    return sorted(order[held_out:]), sorted(order[:held_out])
