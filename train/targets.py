"""What every slot of an anchor block is asked to predict, and how much it counts.

Shapes: B batch, S tokens, A anchors, K drafted slots. Draft i of a block at anchor a predicts token a+i+1, with either
label alignment; the alignments differ in which slot of the block does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLE_EVERY = 8


@dataclass(frozen=True)
class BlockTargets:
    prefix_ids: Tensor  # [B, A, K] the anchor and the true tokens before each prediction
    labels: Tensor  # [B, A, K]
    weights: Tensor  # [B, A, K] float32, 0 where nothing is to be learnt


def block_targets(
    input_ids: Tensor,  # [B, S]
    loss_mask: Tensor,  # [B, S]
    anchors: Tensor,  # [B, A]
    keep: Tensor,  # [B, A] bool
    draft_length: int,
    decay_gamma: float | None,
    starts: Tensor | None = None,  # [B, S] where in its row each token's sample begins; None: one sample a row
) -> BlockTargets:
    """Labels and weights `keep * inside * loss_mask * exp(-i/gamma)` (Domino, section 4; DFlash, section 3).

    `decay_gamma` None weighs all positions alike. A block is not asked for the words of the sample behind its own.
    """
    length = input_ids.shape[1]
    offsets = torch.arange(draft_length, device=input_ids.device)
    places = anchors[..., None] + offsets  # [B, A, K] of what is known last
    inside = places + 1 < length
    if starts is not None:
        inside &= _gather(starts, (places + 1).clamp(max=length - 1)) == starts.gather(1, anchors)[..., None]
    labels = _gather(input_ids, (places + 1).clamp(max=length - 1))
    supervised = _gather(loss_mask, (places + 1).clamp(max=length - 1)).float()
    weights = supervised * inside * keep[..., None]
    if decay_gamma is not None:
        weights = weights * torch.exp(-offsets / decay_gamma)
    return BlockTargets(_gather(input_ids, places.clamp(max=length - 1)), labels, weights)


def sampled_blocks(counts: Tensor) -> Tensor:  # [B, A, K] bool, slots that count -> [B, A] bool
    """One in eight of the blocks of every row that count, at least one: the choice follows from each row alone."""
    blocks = counts.any(dim=-1)
    rank = blocks.cumsum(dim=1) - 1
    first = (blocks.sum(dim=1, keepdim=True).clamp(max=SAMPLE_EVERY) - 1) // 2
    return blocks & (rank % SAMPLE_EVERY == first)


def _gather(rows: Tensor, places: Tensor) -> Tensor:  # [B, S], [B, A, K] -> [B, A, K]
    return rows.gather(1, places.flatten(1)).view_as(places)
