"""Samples side by side, and the order in which they come. Shapes: B samples, S tokens, F features."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data.samples import Sample
from dominotree.errors import UserError

if TYPE_CHECKING:
    from data.features import FeatureCache


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] bool, False on padding
    sample_ids: list[int]
    features: Tensor | None  # [B, S, F], zero on padding; None where they are computed instead


def collate(samples: Sequence[Sample], pad_id: int, cache: FeatureCache | None = None) -> Batch:
    """Samples padded on the right to the longest, with their cached features where there is a cache.

    Raises UserError for no samples, and for one whose features the cache has not, or has for other tokens.
    """
    if not samples:
        raise UserError("a batch needs at least one sample, got none")
    longest = max(len(sample.token_ids) for sample in samples)
    input_ids = torch.full((len(samples), longest), pad_id, dtype=torch.int64)
    loss_mask = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        loss_mask[row, : len(sample.loss_mask)] = torch.tensor(sample.loss_mask)
    features = None
    if cache is not None:
        rows = [cache.get(sample.sample_id, sample.token_ids) for sample in samples]
        features = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Batch(input_ids, loss_mask, [sample.sample_id for sample in samples], features)


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of `count` samples in an epoch, any whole number: a shuffle that follows from seed and epoch alone."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(count, generator=generator).tolist()
