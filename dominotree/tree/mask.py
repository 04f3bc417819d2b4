"""What verification needs to know of a tree's shape. Shapes: B batch, N tree nodes; row 0 stands for the root."""

from __future__ import annotations

import torch
from torch import Tensor

from .nodes import DraftTree


def ancestor_closure(tree: DraftTree) -> Tensor:  # [B, N, N] bool
    """Entry (i, j): node j is node i itself or one of its ancestors below the root."""
    size = tree.size
    columns = torch.arange(size, device=tree.parents.device)
    self_or_parent = (tree.parents[..., None] == columns) | (columns[:, None] == columns)
    closure = self_or_parent.float()
    # Squaring doubles the hops covered, so ceil(log2 N) products reach every ancestor of a chain of N.
    for _ in range(max(0, size - 1).bit_length()):
        closure = (closure @ closure).clamp_(max=1)
    return closure.bool()


def ancestor_mask(tree: DraftTree) -> Tensor:  # [B, 1 + N, 1 + N] bool
    """Who sees whom in a verification of root and nodes: each node sees the root, its ancestors and itself."""
    closure = ancestor_closure(tree)
    mask = torch.nn.functional.pad(closure, (1, 0, 1, 0))
    mask[:, :, 0] = True
    return mask


def node_positions(tree: DraftTree, root_position: int) -> Tensor:  # [B, 1 + N]
    """Absolute positions of root and nodes: siblings share theirs."""
    return torch.nn.functional.pad(tree.depths, (1, 0)) + root_position
