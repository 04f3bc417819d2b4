"""Following the target's choices down a verified tree. Shapes: B batch, N tree nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from .mask import ancestor_closure
from .nodes import DraftTree


def walk(
    tree: DraftTree,
    posterior: Tensor,  # [B, 1 + N] the target's token after the root and after every node
) -> tuple[Tensor, Tensor]:  # [B, N] bool, [B]
    """The accepted nodes, and the bonus token: the target's own after the last of them.

    A node is accepted when it and all its ancestors carry the token that the target chose after their parent (DDTree,
    section 4). Siblings differ, so the accepted nodes form one path. Each choice is one exact draw from the target,
    made for all nodes at once and independent of the tree; whichever is followed, the output keeps the target's law.
    """
    agrees = (tree.token_ids == posterior.gather(1, tree.parents + 1)) & (tree.depths > 0)
    accepted = ~(ancestor_closure(tree) & ~agrees[:, None]).any(dim=-1)
    # Parents come before children, so the last accepted node is the deepest; row 0 is the root.
    order = torch.arange(1, tree.size + 1, device=posterior.device)
    last = (accepted * order).max(dim=-1, keepdim=True).values if tree.size else posterior.new_zeros(len(posterior), 1)
    return accepted, posterior.gather(1, last)[:, 0]
