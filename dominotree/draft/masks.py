"""Who may attend to whom inside and across anchor blocks (DFlash, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor


def anchor_block_mask(
    anchors: Tensor,  # [B, A] positions of the anchors
    keep: Tensor,  # [B, A] bool, False for a padded block
    context_length: int,
    block_size: int,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:  # [B, 1, A*block, S + A*block] bool, True = may attend
    """Attention of A anchor blocks laid side by side behind S context positions.

    A slot sees the context strictly before its anchor, since the anchor's own target feature does not exist yet when
    the block is drafted, and the slots of its own block, never another block. `window` also bounds the distance to
    the left; `causal` hides later slots of the block. A padded block sees nothing.
    """
    device = anchors.device
    offsets = torch.arange(block_size, device=device)
    slot_positions = (anchors[:, :, None] + offsets).flatten(1)  # [B, A*block]
    block_ids = torch.arange(anchors.shape[1], device=device).repeat_interleave(block_size)
    context_positions = torch.arange(context_length, device=device)
    slot_anchors = anchors.repeat_interleave(block_size, dim=1)

    sees_context = context_positions < slot_anchors[..., None]  # [B, A*block, S]
    sees_slots = (block_ids[:, None] == block_ids[None, :]).expand(anchors.shape[0], -1, -1)
    distance = slot_positions[:, :, None] - slot_positions[:, None, :]  # [B, A*block, A*block]
    if window is not None:
        sees_context = sees_context & (slot_positions[..., None] - context_positions < window)
        sees_slots = sees_slots & (distance < window)
    if causal:
        sees_slots = sees_slots & (distance >= 0)
    visible = torch.cat([sees_context, sees_slots], dim=-1)
    return (visible & keep.repeat_interleave(block_size, dim=1)[..., None])[:, None]
