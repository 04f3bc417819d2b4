"""From settings to a trainer that is ready to run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType

from data.features import FeatureCache, feature_key
from data.models import load_target
from data.provenance import target_fingerprint, weights_fingerprint
from data.samples import SampleSet, load_samples
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError
from dominotree.target import Target

from .checkpoints import Checkpoints
from .config import TrainConfig
from .loop import Trainer
from .provenance import describe_run
from .setup import check_features_device, make_accelerator, make_draft
from .tracking import Tracker
from .updates import Selection, split_held_out
from .validation import Validator

# Settings that a checkpoint and the run that resumes it must share for the remaining losses to be the same.
IDENTITY = (
    "stage",
    "backbone",
    "prefixes",
    "correction",
    "lambda_start",
    "lambda_decay_ratio",
    "decay_gamma",
    "num_anchors",
    "max_length",
    "vocab_subset",
    "seed",
    "precision",
)


def assemble(config: TrainConfig, output: Path) -> tuple[Trainer, Tracker]:
    """Load target, draft and data, and hold samples out. Raises UserError for whatever does not go together."""
    accelerator = make_accelerator(config)
    check_features_device(config, accelerator)
    target = load_target(config.target, dtype=config.target.dtype, device=str(accelerator.device))
    if target.tokenizer is None:
        raise UserError("training needs the target's tokenizer and chat template, this target has none")
    if target.context_length is not None and config.max_length > target.context_length:
        raise UserError(
            f"max_length={config.max_length} exceeds the target's context of {target.context_length} tokens"
        )
    if config.compile and accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UserError("compile=true has not been tried with DeepSpeed's engines; say compile=false")
    draft = make_draft(config, target)
    samples = load_samples(Path(config.data_dir), target.tokenizer, max_length=config.max_length)
    trained_on, held_out = split_held_out(len(samples), config.validation.samples, config.seed)
    provenance = describe_run(config, samples)
    tracker = Tracker(config.tracking, output, provenance, active=accelerator.is_main_process)
    trainer = Trainer(
        config,
        accelerator,
        target,
        draft,
        Selection(samples, trained_on),
        Selection(samples, held_out),
        _open_cache(config, target, draft, samples),
        _target_ahead(config, target),
        Validator(
            Selection(samples, held_out),
            max_new_tokens=config.validation.max_new_tokens,
            node_budget=config.validation.node_budget,
            context_length=target.context_length,
        ),
        Checkpoints(
            output,
            keep_last=config.keep_last,
            provenance=provenance,
            identity=_identity(config, target, draft, samples),
        ),
        tracker,
    )
    return trainer, tracker


def _open_cache(config: TrainConfig, target: Target, draft: DraftModel, samples: SampleSet) -> FeatureCache | None:
    """The feature cache, checked to hold every sample: better now than in the middle of training."""
    if config.features != "cached":
        return None
    cache = FeatureCache.open(Path(config.data_dir) / "features", feature_key(target, draft.config.target_layer_ids))
    for sample in samples:
        cache.check(sample.sample_id, sample.token_ids)
    return cache


def _target_ahead(config: TrainConfig, target: Target) -> Target | None:
    """What computes features ahead of the updates; None where they are computed when they are due, or cached."""
    if config.features != "ahead":
        return None
    if config.features_device is None:
        return target
    return load_target(config.target, dtype=config.target.dtype, device=config.features_device)


def _identity(config: TrainConfig, target: Target, draft: DraftModel, samples: SampleSet) -> dict[str, Any]:
    """By dotted name, as plain values."""
    optim = asdict(config.optim)
    del optim["micro_batch_size"]  # changes the memory alone
    return {
        **{name: getattr(config, name) for name in IDENTITY},
        "features": "cached" if config.features == "cached" else "online",  # ahead or not: the same ones
        **{f"optim.{name}": value for name, value in optim.items()},
        "validation.samples": config.validation.samples,
        "data": samples.fingerprint,
        "target": target_fingerprint(target),
        "draft": weights_fingerprint(draft),
    }
