"""Draft trees as arrays. Shapes: B batch, N tree nodes (the root is not stored)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """N draft nodes a sequence, parents before children; everything else (mask, positions, walk) follows from these.

    Node indices count from 0; the root, the last committed token, is parent -1. A node's depth is its distance from
    the root, 1 for the root's children; depth 0 marks padding in a batch of unequal trees. No two children of a
    parent carry the same token. Builders give their nodes in order of selection, path log-probabilities never rising
    along it, so that the first n nodes are the tree of budget n.
    """

    token_ids: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64
    depths: Tensor  # [B, N] int64
    path_log_probs: Tensor | None  # [B, N] float32 scores, sums from the root; None where the builder scores nothing
    linear: bool = False  # one single path, whose ancestor mask is plain causal attention

    @property
    def size(self) -> int:
        """N, the drafted nodes to verify, padding included."""
        return self.token_ids.shape[1]

    def first(self, count: int) -> DraftTree:
        """The first `count` nodes of every sequence: the tree that the same builder gives for that budget."""
        if count < 0:
            raise ValueError(f"a tree keeps 0 nodes or more, got {count}")
        scores = None if self.path_log_probs is None else self.path_log_probs[:, :count]
        return DraftTree(
            self.token_ids[:, :count], self.parents[:, :count], self.depths[:, :count], scores, self.linear
        )

    def clone(self) -> DraftTree:
        """The same nodes in memory of their own."""
        scores = None if self.path_log_probs is None else self.path_log_probs.clone()
        return DraftTree(self.token_ids.clone(), self.parents.clone(), self.depths.clone(), scores, self.linear)

    @classmethod
    def batch(cls, trees: Sequence[DraftTree]) -> DraftTree:
        """Single trees as one batch, the smaller ones padded; all must be scored."""
        size = max(tree.size for tree in trees)

        def stacked(name: str, filler: int) -> Tensor:  # [B, N]
            rows = [torch.nn.functional.pad(getattr(tree, name), (0, size - tree.size), value=filler) for tree in trees]
            return torch.cat(rows)

        scores = stacked("path_log_probs", 0).masked_fill(stacked("depths", 0) == 0, -torch.inf)
        return cls(stacked("token_ids", 0), stacked("parents", -1), stacked("depths", 0), scores)

    @classmethod
    def chain(cls, token_ids: Tensor) -> DraftTree:  # [B, N]
        """Each token the only child of the one before it."""
        order = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        return cls(token_ids, order - 1, order + 1, None, linear=True)

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[int],
        parents: Sequence[int],
        depths: Sequence[int],
        path_log_probs: Sequence[float],
        device: torch.device,
    ) -> DraftTree:
        """One tree, B = 1, from what a host-side builder selected, in order of selection."""
        integers = torch.tensor([token_ids, parents, depths], dtype=torch.int64, device=device)
        scores = torch.tensor([path_log_probs], dtype=torch.float32, device=device)
        return cls(integers[0:1], integers[1:2], integers[2:3], scores)
