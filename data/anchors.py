"""Drawing anchors: the known tokens that open training blocks. Shapes: B batch, S tokens, A anchors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dominotree.errors import UserError


def draw_anchors(
    loss_mask: Tensor,  # [B, S] bool, True on tokens the target wrote
    num_anchors: int,
    seeds: Sequence[int],  # one a sample
) -> tuple[Tensor, Tensor]:  # [B, A] positions ascending, [B, A] bool False for padding
    """Up to `num_anchors` positions a sample, uniformly without replacement (Domino, section 4).

    A position serves where it and its successor are both supervised. Each sample draws from a generator of its own,
    so that the draw does not depend on which samples share a batch or a process.
    """
    if num_anchors < 1:
        raise UserError(f"num_anchors must be at least 1, got {num_anchors}")
    mask = loss_mask.bool().cpu()
    valid = torch.nn.functional.pad(mask[:, :-1] & mask[:, 1:], (0, 1))
    anchors = torch.zeros(len(mask), num_anchors, dtype=torch.int64)
    keep = torch.zeros(len(mask), num_anchors, dtype=torch.bool)
    for row, seed in enumerate(seeds):
        places = valid[row].nonzero()[:, 0]
        generator = torch.Generator().manual_seed(seed)
        chosen = places[torch.randperm(len(places), generator=generator)[:num_anchors]].sort().values
        anchors[row, : len(chosen)] = chosen
        keep[row, : len(chosen)] = True
    return anchors.to(loss_mask.device), keep.to(loss_mask.device)
