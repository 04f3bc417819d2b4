"""Putting a training run together: processes, target, draft, data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from data.models import load_drafter
from data.samples import Sample
from dominotree.draft.config import HeadConfig
from dominotree.draft.fresh import skeleton
from dominotree.draft.model import DraftModel, initialize
from dominotree.dtypes import parse_device
from dominotree.errors import UserError
from dominotree.target import Target

from .config import NewHeadConfig, TrainConfig
from .objective import LossVocabulary


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Processes and devices. Raises UserError where several processes were launched that would not train together."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise UserError("this trainer does not run under DeepSpeed yet; launch it with conf/accelerate/ddp.yaml")
    if parse_device(config.device).index is not None:
        raise UserError(f"device must be auto, cpu or cuda, got {config.device}; choose GPUs by CUDA_VISIBLE_DEVICES")
    accelerator = Accelerator(
        cpu=parse_device(config.device).type == "cpu",
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
    """The draft to train, in float32, with gradients on what the stage trains."""
    draft = load_drafter(config.draft, target, dtype="float32", with_head=False).float()
    wanted = head_sizes(config)
    if config.stage == "dflash" and draft.head is not None:
        raise UserError("stage=dflash trains a backbone alone, but this drafter has a Domino head; say stage=domino")
    if config.stage == "domino" and draft.head is None:
        draft = _with_head(draft, wanted, config.seed)
    elif draft.head is not None and config.head != NewHeadConfig() and wanted != draft.config.head:
        raise UserError(f"the drafter comes with a head of {draft.config.head}, which head.* cannot change")
    draft.requires_grad_(True)
    draft.backbone.requires_grad_(config.backbone == "trained")
    draft.backbone.gradient_checkpointing = config.gradient_checkpointing
    if config.correction == "hidden_only":
        _silence_gru(draft)
    return draft.train()


def head_sizes(config: TrainConfig) -> HeadConfig:
    """Of a new head: what head.* says, and where it is silent what the drafter's own settings say."""
    given = {name: value for name, value in asdict(config.head).items() if value is not None}
    draft = config.draft
    return HeadConfig(
        **(
            {
                "gru_hidden_dim": draft.gru_hidden_dim,
                "emb_dim": draft.emb_dim,
                "pure_draft_prefix_len": draft.pure_draft_prefix_len,
            }
            | given
        )
    )


def loss_vocabulary(target: Target, samples: Sequence[Sample], size: int | None) -> LossVocabulary:
    """The `size` tokens that are supervised most often, and every end token; all tokens where `size` is None."""
    lm_weight = target.model.get_output_embeddings().weight
    assert isinstance(lm_weight, Tensor)
    if size is None:
        return LossVocabulary(lm_weight)
    counts = np.zeros(len(lm_weight), dtype=np.int64)
    for sample in samples:
        counts += np.bincount(np.array(sample.token_ids)[np.array(sample.loss_mask)], minlength=len(lm_weight))
    frequent = [token for token in np.argsort(-counts, kind="stable")[:size].tolist() if counts[token]]
    chosen = sorted(set(frequent) | set(target.end_token_ids))
    return LossVocabulary(lm_weight, torch.tensor(chosen, device=lm_weight.device))


def _with_head(draft: DraftModel, head: HeadConfig, seed: int) -> DraftModel:
    """The same backbone with a fresh head."""
    try:
        remade = skeleton(replace(draft.config, head=head))
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
