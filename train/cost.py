"""What training would cost: GPU hours and disk by target, from counted operations. Computed, not measured.

python -m train.cost
python -m train.cost samples=1000000 tokens=1000 epochs=3 peak_tflops=989 utilisation=0.4
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dominotree.checked import at_least
from dominotree.command import Command, run_command
from dominotree.errors import UserError

if TYPE_CHECKING:
    from dominotree.draft.config import DraftConfig
    from train.flops import Work

USAGE = """python -m train.cost KEY=VALUE...

Prints GPU hours and disk for training a drafter, by target: operations as train/flops.py counts them, over the share of
the GPU's peak that is taken to be reached. It measures nothing."""


@dataclass(frozen=True)
class TargetShape:
    """Of a released target, from its published configuration."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.key_value_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


TARGETS = {
    "SmolLM2-135M": TargetShape(576, 1536, 30, 9, 3, 64, 49152),
    "Qwen3-0.6B": TargetShape(1024, 3072, 28, 16, 8, 128, 151936),
    "Qwen3-1.7B": TargetShape(2048, 6144, 28, 16, 8, 128, 151936),
    "Qwen3-4B": TargetShape(2560, 9728, 36, 32, 8, 128, 151936),
    "Qwen3-8B": TargetShape(4096, 12288, 36, 32, 8, 128, 151936),
    "Qwen3-14B": TargetShape(5120, 17408, 40, 40, 8, 128, 151936),
    "Qwen3-32B": TargetShape(5120, 25600, 64, 64, 8, 128, 151936),
}


@dataclass(frozen=True)
class CostConfig:
    """Everything `conf/cost.yaml` holds; that file explains the keys."""

    samples: int
    tokens: int
    answer_tokens: int
    epochs: int
    anchors: int
    block_size: int
    draft_layers: int
    features: int
    gru_hidden_dim: int
    emb_dim: int
    peak_tflops: float
    utilisation: float
    debug: bool

    def __post_init__(self) -> None:
        for name in ("samples", "tokens", "epochs", "anchors", "block_size", "draft_layers", "features"):
            at_least(name, getattr(self, name), 1)
        for name in ("gru_hidden_dim", "emb_dim"):
            at_least(name, getattr(self, name), 1)
        if not 1 <= self.answer_tokens <= self.tokens:
            raise UserError(f"answer_tokens must lie in 1..tokens={self.tokens}, got {self.answer_tokens}")
        if self.anchors > self.answer_tokens:
            raise UserError(
                f"anchors must be different tokens of the answer: at most {self.answer_tokens}, got {self.anchors}"
            )
        if not self.peak_tflops > 0 or not 0 < self.utilisation <= 1:
            raise UserError(
                "peak_tflops must be positive and utilisation lie above 0 and up to 1, got "
                f"{self.peak_tflops} and {self.utilisation}"
            )


COST = Command(name="cost", config=CostConfig, usage=USAGE)


def gpu_hours(shape: TargetShape, config: CostConfig, *, backbone_trains: bool, online: bool) -> float:
    """Of one GPU, for all epochs."""
    from train.flops import TargetSize, update_flops

    target = TargetSize(shape.layer_weights, shape.layers, shape.heads * shape.head_dim) if online else None
    flops = update_flops(
        sample_work(config),
        _draft(shape, config),
        target,
        shape.vocab,
        backbone_trains=backbone_trains,
    )
    seconds = config.samples * config.epochs * sum(flops.values()) / (config.peak_tflops * 1e12 * config.utilisation)
    return seconds / 3600


def sample_work(config: CostConfig) -> Work:
    """Of one sample, whose anchors lie evenly over the target's tokens at its end."""
    from train.flops import work_of

    first = config.tokens - config.answer_tokens
    anchors = [first + index * config.answer_tokens // config.anchors for index in range(config.anchors)]
    return work_of([config.tokens], anchors, config.block_size, config.anchors * config.block_size)


def disk_bytes(shape: TargetShape, config: CostConfig, storage: str) -> int:
    """Of cached features."""
    from data.features import predict_bytes

    return config.samples * predict_bytes([config.tokens], shape.hidden, config.features, storage)


def cost(config: CostConfig) -> int:
    """Print the table; returns the exit code."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "target", "trained, online", "trained, cached", "head alone, online", "head alone, cached", "bfloat16", "int8",
        title="GPU hours, and features on disk; computed, not measured",
        caption=f"{config.samples:,} samples of {config.tokens} tokens, {config.epochs} epochs, at "
        f"{100 * config.utilisation:g} % of {config.peak_tflops:g} TFLOP/s",
    )  # fmt: skip
    for name, shape in TARGETS.items():
        hours = [
            f"{gpu_hours(shape, config, backbone_trains=trains, online=online):.0f} h"
            for trains in (True, False)
            for online in (True, False)
        ]
        disks = [f"{disk_bytes(shape, config, storage) / 1e12:.1f} TB" for storage in ("bfloat16", "int8")]
        table.add_row(name, *hours, *disks)
    Console(width=110).print(table)
    return 0


def _draft(shape: TargetShape, config: CostConfig) -> DraftConfig:
    from dominotree.draft.config import DraftConfig, HeadConfig, build_target_layer_ids

    try:
        return DraftConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=config.draft_layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_value_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab,
            block_size=config.block_size,
            mask_token_id=shape.vocab - 1,
            target_layer_ids=build_target_layer_ids(shape.layers, config.features),
            num_target_layers=shape.layers,
            shift_label=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            head=HeadConfig(config.gru_hidden_dim, config.emb_dim, 1),
        )
    except ValueError as error:
        raise UserError(f"no such drafter: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(COST, cost, argv)


if __name__ == "__main__":
    sys.exit(main())
