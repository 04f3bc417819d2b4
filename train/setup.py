"""Putting a training run together: processes, target, draft, data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from data.models import load_drafter
from data.samples import Sample
from dominotree.draft.config import HeadConfig
from dominotree.draft.model import DraftModel, initialize
from dominotree.errors import UserError
from dominotree.target import Target

from .config import TrainConfig
from .objective import LossVocabulary


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Processes and devices. Raises UserError where several processes were launched that would not train together."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise UserError("this trainer does not run under DeepSpeed yet; launch it with conf/accelerate/ddp.yaml")
    accelerator = Accelerator(
        cpu=config.device == "cpu" or not torch.cuda.is_available(),
        mixed_precision="bf16" if config.precision == "bfloat16" else "no",
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    together = launched == 1 or accelerator.distributed_type != DistributedType.NO
    if accelerator.num_processes != launched or not together:
        raise UserError(
            f"{launched} processes were launched, but they do not train together (accelerate sees "
            f"{accelerator.num_processes}); launch them with conf/accelerate/ddp.yaml"
        )
    return accelerator


def make_draft(config: TrainConfig, target: Target) -> DraftModel:
    """The draft to train, in float32, with gradients on what the stage trains (DESIGN: frozen or trained backbone)."""
    draft = load_drafter(config.draft, target, dtype="float32", with_head=False).float()
    if config.stage == "dflash":
        draft = _with_head(draft, None, config.seed)
    elif draft.head is None:
        draft = _with_head(draft, HeadConfig(**asdict(config.head)), config.seed)
    draft.requires_grad_(True)
    draft.backbone.requires_grad_(config.backbone == "trained")
    draft.backbone.gradient_checkpointing = config.gradient_checkpointing
    if config.correction == "hidden_only":
        _silence_gru(draft)
    return draft.train()


def loss_vocabulary(target: Target, samples: Sequence[Sample], size: int | None) -> LossVocabulary:
    """The `size` tokens that are supervised most often, and every end token; all tokens where `size` is None."""
    lm_weight = target.model.get_output_embeddings().weight
    assert isinstance(lm_weight, Tensor)
    if size is None:
        return LossVocabulary(lm_weight)
    counts = Counter(
        token for sample in samples for token, own in zip(sample.token_ids, sample.loss_mask, strict=True) if own
    )
    frequent = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:size]]
    chosen = sorted(set(frequent) | set(target.end_token_ids))
    return LossVocabulary(lm_weight, torch.tensor(chosen, device=lm_weight.device))


def _with_head(draft: DraftModel, head: HeadConfig | None, seed: int) -> DraftModel:
    """The same backbone with a fresh head, or with none."""
    try:
        remade = DraftModel(replace(draft.config, head=head))
    except ValueError as error:
        raise UserError(f"this head does not go with the drafter's backbone: {error}") from error
    initialize(remade, torch.Generator().manual_seed(seed))
    remade.to(draft.device)
    remade.backbone.load_state_dict(draft.backbone.state_dict())
    return remade


def _silence_gru(draft: DraftModel) -> None:
    """The ablation without a prefix: a GRU of zero weights keeps its state at zero, in training and in decoding, so
    that the correction follows from the slot's hidden state alone."""
    if draft.head is None:
        raise UserError("correction=hidden_only concerns the Domino head, which stage=dflash has not")
    for weight in draft.head.prefix_gru.parameters():
        weight.data.zero_()
        weight.requires_grad_(False)
