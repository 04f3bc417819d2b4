"""Floating-point operations that an update of training cannot do without, by part: padding is not counted.

A product of [a, b] by [b, c] is 2abc operations. What is trained costs three products where the forward pass has one:
the gradients of input and weight come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from dominotree.draft.config import DraftConfig

PARTS = ("target", "backbone", "head", "lm_head")


@dataclass(frozen=True)
class Work:
    """How much there is to do; sums over samples."""

    samples: int = 0
    tokens: int = 0  # of the context
    token_pairs: int = 0  # of the context, squares of the lengths
    slots: int = 0  # of all blocks
    seen: int = 0  # positions and slots that the slots attend to, together
    rows: int = 0  # slots that count in the loss

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Work)))


def work_of(lengths: Sequence[int], anchors: Sequence[int], block_size: int, rows: int) -> Work:
    """Of samples of these lengths, with blocks at these anchors (those of all samples), `rows` slots counting."""
    slots = len(anchors) * block_size
    return Work(
        samples=len(lengths),
        tokens=sum(lengths),
        token_pairs=sum(length * length for length in lengths),
        slots=slots,
        seen=sum(anchors) * block_size + slots * block_size,
        rows=rows,
    )


@dataclass(frozen=True)
class TargetSize:
    weights: int  # in its layers, embeddings and LM head not counted
    num_layers: int
    attention_size: int  # heads times head dimension


def update_flops(
    work: Work,
    draft: DraftConfig,
    target: TargetSize | None,  # None where its features are stored
    vocab_size: int,  # that the loss runs over
    *,
    backbone_trains: bool,
) -> dict[str, float]:
    """Operations by part."""
    passes = 3 if backbone_trains else 1
    flops = dict.fromkeys(PARTS, 0.0)
    if target is not None:
        attention = 4 * target.num_layers * target.attention_size * work.token_pairs / 2
        flops["target"] = 2.0 * target.weights * work.tokens + attention
    flops["backbone"] = passes * _backbone_forward(work, draft)
    hidden, lm_products = draft.hidden_size, 2 if backbone_trains else 1
    flops["lm_head"] = 2.0 * hidden * vocab_size * work.rows * lm_products
    if draft.head is not None:
        state, rank = draft.head.gru_hidden_dim, draft.head.emb_dim
        a_slot = 2 * 3 * state * (hidden + state) + 2 * rank * (hidden + state)
        flops["head"] = 3.0 * a_slot * work.slots
        flops["lm_head"] += 3 * 2 * rank * vocab_size * work.rows
    return flops


def _backbone_forward(work: Work, draft: DraftConfig) -> float:
    hidden, queries = draft.hidden_size, draft.num_attention_heads * draft.head_dim
    keys_values = 2 * draft.num_key_value_heads * draft.head_dim
    a_slot = 2 * hidden * (2 * queries + keys_values + 3 * draft.intermediate_size)
    a_token = 2 * hidden * keys_values
    layers = a_slot * work.slots + a_token * work.tokens + 4 * queries * work.seen
    fusion = 2 * len(draft.target_layer_ids) * hidden * hidden * work.tokens
    return float(draft.num_hidden_layers * layers + fusion)
