"""Drawing anchors: the known tokens that open training blocks. Shapes: S tokens, A anchors."""

from __future__ import annotations

import torch
from torch import Tensor

from dominotree.errors import UserError


def draw_anchors(
    loss_mask: Tensor,  # [S] bool, True on tokens the target wrote
    num_anchors: int,
    seed: int,
) -> Tensor:  # [A] places in ascending order
    """Up to `num_anchors` places of a sample, uniformly without replacement (Domino, section 4).

    A place serves where it and its successor are both supervised.
    """
    if num_anchors < 1:
        raise UserError(f"num_anchors must be at least 1, got {num_anchors}")
    places = (loss_mask[:-1] & loss_mask[1:]).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    return places[torch.randperm(len(places), generator=generator)[:num_anchors]].sort().values
