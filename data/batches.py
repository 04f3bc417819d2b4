"""Samples side by side, and the order in which they come. Shapes: B samples, S tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.samples import Sample
from dominotree.errors import UserError


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] bool, False on padding
    sample_ids: list[int]


def collate(samples: Sequence[Sample], pad_id: int) -> Batch:
    """Samples padded on the right to the longest. Raises UserError for no samples."""
    if not samples:
        raise UserError("a batch needs at least one sample, got none")
    longest = max(len(sample.token_ids) for sample in samples)
    input_ids = torch.full((len(samples), longest), pad_id, dtype=torch.int64)
    loss_mask = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        loss_mask[row, : len(sample.loss_mask)] = torch.tensor(sample.loss_mask)
    return Batch(input_ids, loss_mask, [sample.sample_id for sample in samples])


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of `count` samples in an epoch, any whole number: a shuffle that follows from seed and epoch alone."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(count, generator=generator).tolist()
