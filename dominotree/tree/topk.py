"""The k best of scores in a documented order of ties, without sorting the vocabulary. Shapes: V entries, k kept."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # entries that one maximum stands for
BLOCKS_FROM = 16384  # entries from which on blocks make an argmax faster
SORTED_BELOW = 256  # shorter rows are sorted: fewer, if dearer, operations


def ordered_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:  # [..., V] -> values and ids, each [..., k]
    """The k best, descending, ties by the lowest id: torch.topk leaves the order, and the choice, of ties open.

    Long rows are cut into blocks first: every one of the k best lies in one of the k blocks whose maxima come first
    in the same order, for each of those blocks has an entry at least as early as its own best.
    """
    size = scores.shape[-1]
    k = min(k, size)
    if size < SORTED_BELOW:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], ids[..., :k]
    count = size // BLOCK
    if count < 4 * k:
        ids = _best_by_keys(scores, k)
        return scores.gather(-1, ids), ids
    held_ids = _in_best_blocks(scores, count, k)
    held = scores.gather(-1, held_ids)
    places = _best_by_keys(held, k)
    return held.gather(-1, places), held_ids.gather(-1, places)


def ordered_argmax(scores: Tensor) -> Tensor:  # [..., V] -> ids [...]
    """The best, a tie to the lowest id. On a CPU torch.argmax takes several times as long over a vocabulary."""
    if scores.device.type != "cpu" or scores.shape[-1] < BLOCKS_FROM:
        return scores.argmax(dim=-1)
    return ordered_topk(scores, 1)[1][..., 0]


def _in_best_blocks(scores: Tensor, count: int, k: int) -> Tensor:  # [..., V] -> ascending ids [..., k * BLOCK + rest]
    """The entries of the k best of `count` blocks, and those behind the last block."""
    size, device = scores.shape[-1], scores.device
    maxima = scores[..., : count * BLOCK].unflatten(-1, (count, BLOCK)).amax(dim=-1)
    blocks = _best_by_keys(maxima, k).sort(dim=-1).values
    ids = (blocks[..., None] * BLOCK + torch.arange(BLOCK, device=device)).flatten(-2)
    rest = torch.arange(count * BLOCK, size, device=device)
    return torch.cat([ids, rest.expand(*ids.shape[:-1], -1)], dim=-1)


def _best_by_keys(scores: Tensor, k: int) -> Tensor:  # [..., V] -> ids [..., k]
    """Each score, a float32, becomes an integer of the same order, with the id in the lower half."""
    size = scores.shape[-1]
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: -0.0 and 0.0 become one
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(size - 1, -1, -1, device=scores.device)
    keys = torch.topk(torch.add(ids, ordered, alpha=size), k).values
    return size - 1 - keys.remainder(size)
