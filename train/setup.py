"""Putting a training run together: processes, target, draft, data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs
from torch import Tensor
from transformers.integrations import unset_hf_deepspeed_config

from data.models import load_drafter
from data.samples import Sample
from dominotree.draft.config import HeadConfig
from dominotree.draft.fresh import skeleton
from dominotree.draft.model import DraftModel, initialize
from dominotree.dtypes import parse_device
from dominotree.errors import UserError
from dominotree.target import Target

from .config import NewHeadConfig, TrainConfig
from .flops import TargetSize
from .objective import LossVocabulary
from .updates import own_share


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Processes and devices. Raises UserError where several processes were launched that would not train together, or
    DeepSpeed was asked for and cannot run."""
    device = parse_device(config.device)
    if device.index is not None:
        raise UserError(f"device must be auto, cpu or cuda, got {config.device}; choose GPUs by CUDA_VISIBLE_DEVICES")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        accelerator = _deepspeed_accelerator(config, device)
    else:
        accelerator = Accelerator(
            cpu=device.type == "cpu", mixed_precision="bf16" if config.precision == "bfloat16" else "no"
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    together = launched == 1 or accelerator.distributed_type != DistributedType.NO
    if accelerator.num_processes != launched or not together:
        raise UserError(
            f"{launched} processes were launched, but they do not train together (accelerate sees "
            f"{accelerator.num_processes}); launch them with conf/accelerate/ddp.yaml"
        )
    return accelerator


def check_features_device(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises UserError where a device of its own for the target is none, or would be shared by several processes."""
    if config.features_device is None:
        return
    device = parse_device(config.features_device)
    if device.type == "cuda" and accelerator.num_processes > 1:
        raise UserError(
            f"features_device={config.features_device} is for one process, {accelerator.num_processes} were launched; "
            "leave it out: each computes features on its own GPU"
        )
    same_kind = device.type == accelerator.device.type == "cuda"
    if same_kind and (device.index or 0) == (accelerator.device.index or 0):
        raise UserError(f"features_device={config.features_device} trains already; leave it out")


def check_same_everywhere(accelerator: Accelerator, update: int) -> None:
    """Raises UserError where processes go on from different updates: those of one machine do not see the files of
    another."""
    found = sorted(set(accelerator.gather(torch.tensor([update], device=accelerator.device)).tolist()))
    if len(found) > 1:
        raise UserError(
            f"the processes found the checkpoints of different updates, {found}; output= must be a folder that all "
            "machines share"
        )


def another_ended(error: RuntimeError) -> bool:
    """Whether this process failed because it lost another one of its run."""
    return isinstance(error, torch.distributed.DistError) or "by peer" in str(error)


def deepspeed_settings(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """What DeepSpeed's own configuration must say for an update to be the same as without it."""
    optim = config.optim
    micro_batches = own_share(range(optim.batch_size), 0, world_size, optim.micro_batch_size)
    return {
        "train_micro_batch_size_per_gpu": optim.micro_batch_size,
        "gradient_accumulation_steps": len(micro_batches),
        "train_batch_size": optim.micro_batch_size * len(micro_batches) * world_size,
        "gradient_clipping": optim.clip_norm,
        # Weights, gradients and what is exchanged stay in float32: an empty list of modules for which they need not.
        "torch_autocast": {
            "enabled": config.precision == "bfloat16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
    }


def _deepspeed_accelerator(config: TrainConfig, device: torch.device) -> Accelerator:
    """The ZeRO stage is the launcher's to say, everything else follows from the settings."""
    if find_spec("deepspeed") is None:
        raise UserError("this launch needs the deepspeed package: pip install -e '.[deepspeed]'")
    on_cpu = not torch.cuda.is_available()
    if device.type == "cpu" and not on_cpu:
        raise UserError("DeepSpeed takes the GPUs it finds, but device=cpu; hide them: CUDA_VISIBLE_DEVICES= ")
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found nothing better
    plugin = DeepSpeedPlugin(zero3_init_flag=False)
    if plugin.zero_stage not in (2, 3) or {plugin.offload_optimizer_device, plugin.offload_param_device} != {"none"}:
        raise UserError(
            "DeepSpeed runs here with ZeRO stage 2 or 3 and nothing offloaded, got stage "
            f"{plugin.zero_stage}, optimizer on {plugin.offload_optimizer_device}, weights on "
            f"{plugin.offload_param_device}; launch with conf/accelerate/zero2.yaml or zero3.yaml"
        )
    settings = deepspeed_settings(config, int(os.environ.get("WORLD_SIZE", "1")))
    plugin.deepspeed_config.update(settings)
    try:
        accelerator = Accelerator(
            mixed_precision="no",
            gradient_accumulation_steps=settings["gradient_accumulation_steps"],
            deepspeed_plugin=plugin,
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu else None,
        )
    except (RuntimeError, OSError) as error:  # On CPUs DeepSpeed compiles its communication once.
        raise UserError(
            f"DeepSpeed cannot start: {str(error).splitlines()[0]}; on CPUs it needs a C++ compiler and ninja"
        ) from error
    unset_hf_deepspeed_config()  # or transformers would share the target out too
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
    draft.attention = None if config.attention == "auto" else config.attention
    if config.compile:
        _check_compiler(draft.device)
        draft.backbone.compile_parts()
    if config.correction == "hidden_only":
        _silence_gru(draft)
    return draft.train()


def target_size(target: Target) -> TargetSize:
    """Of its layers, for counting operations."""
    config, decoder = target.config, target.model.get_decoder()
    embeddings = target.model.get_input_embeddings().weight.numel()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = sum(weight.numel() for weight in decoder.parameters()) - embeddings
    return TargetSize(weights, target.num_layers, config.num_attention_heads * head_dim)


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


def _check_compiler(device: torch.device) -> None:
    names = (os.environ.get("CXX", "g++"), "g++", "clang++", "c++")
    if device.type == "cpu" and not any(map(shutil.which, names)):
        raise UserError("compile=true needs a C++ compiler on a CPU, found none; install g++, or say compile=false")


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
