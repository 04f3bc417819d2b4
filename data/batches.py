"""Samples in rows, and the order in which they come. Shapes: B rows, S tokens."""

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
    starts: Tensor  # [B, S] int64, where in its row each token's sample begins; padding begins at its own place


def pack(samples: Sequence[Sample], row_length: int | None) -> list[list[Sample]]:
    """Which samples share a row: each goes into the first row that still has room for it among `row_length` tokens.
    A longer one, and every one where `row_length` is None, gets a row of its own."""
    rows: list[list[Sample]] = []
    room: list[int] = []
    for sample in samples:
        length = len(sample.token_ids)
        row = next((row for row, left in enumerate(room) if length <= left), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(0 if row_length is None else row_length)
        rows[row].append(sample)
        room[row] -= length
    return rows


def collate(rows: Sequence[Sequence[Sample]], pad_id: int) -> Batch:
    """Samples end to end in their rows, padded on the right to the longest row. Raises UserError for no samples."""
    if not rows or not all(rows):
        raise UserError(f"a batch needs at least one sample in every row, got rows of {[len(row) for row in rows]}")
    longest = max(sum(len(sample.token_ids) for sample in row) for row in rows)
    input_ids = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    loss_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    starts = torch.arange(longest).repeat(len(rows), 1)
    for index, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + len(sample.token_ids)
            input_ids[index, start:end] = torch.tensor(sample.token_ids)
            loss_mask[index, start:end] = torch.tensor(sample.loss_mask)
            starts[index, start:end] = start
            start = end
    return Batch(input_ids, loss_mask, starts)


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of `count` samples in an epoch, any whole number: a shuffle that follows from seed and epoch alone."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(count, generator=generator).tolist()
