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
    k = min(k, scores.shape[-1])
    if scores.shape[-1] < SORTED_BELOW:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], ids[..., :k]
    ids = best_ids(scores, k)
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def best_ids(scores: Tensor, k: int) -> Tensor:  # [..., V] -> [..., k]
    """The ids of the k best, ties to the lowest id, in ascending order."""
    size = scores.shape[-1]
    k, count = min(k, size), size // BLOCK
    if count < 4 * k:
        return _chosen(scores, k)
    blocks = scores[..., : count * BLOCK].reshape(-1, BLOCK)  # of all rows, one after the other
    maxima = blocks.amax(dim=-1).view(*scores.shape[:-1], count)
    best = _chosen(maxima, k)  # [..., k] blocks
    rows = torch.arange(maxima[..., 0].numel(), device=scores.device).view(*maxima.shape[:-1], 1)
    held = blocks.index_select(0, (rows * count + best).flatten()).view(*best.shape[:-1], k * BLOCK)
    places = _chosen(torch.cat([held, scores[..., count * BLOCK :]], dim=-1), k)
    # Entries behind the last block are held behind the k best, as if they were the block after them.
    best = torch.cat([best, best.new_full((*best.shape[:-1], 1), count)], dim=-1)
    return best.gather(-1, places // BLOCK) * BLOCK + places % BLOCK


def ordered_argmax(scores: Tensor) -> Tensor:  # [..., V] -> ids [...]
    """The best, a tie to the lowest id. On a CPU torch.argmax takes several times as long over a vocabulary."""
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size < BLOCKS_FROM or size % BLOCK:
        return scores.argmax(dim=-1)
    blocks = scores.unflatten(-1, (size // BLOCK, BLOCK))
    best = blocks.amax(dim=-1).argmax(dim=-1, keepdim=True)  # [..., 1]
    within = blocks.gather(-2, best[..., None].expand(*best.shape, BLOCK)).argmax(dim=-1)
    return (best * BLOCK + within)[..., 0]


def _chosen(scores: Tensor, k: int) -> Tensor:  # [..., V] -> ids [..., k], ascending
    if scores.device.type == "cpu" and k < scores.shape[-1]:
        # Where the host may look, see whether there is a tie to settle at all.
        values, ids = torch.topk(scores, k + 1)
        if bool((values[..., k - 1] > values[..., k]).all()):
            return ids[..., :k].sort(dim=-1).values
    return _best_by_keys(scores, k).sort(dim=-1).values


def _best_by_keys(scores: Tensor, k: int) -> Tensor:  # [..., V] -> ids [..., k]
    """Each score, a float32, becomes an integer of the same order, with the id in the lower half."""
    size = scores.shape[-1]
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: -0.0 and 0.0 become one
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(size - 1, -1, -1, device=scores.device)
    keys = torch.topk(torch.add(ids, ordered, alpha=size), k).values
    return size - 1 - keys.remainder(size)
