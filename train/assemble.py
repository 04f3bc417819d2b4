"""From settings to a trainer that is ready to run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from .setup import make_accelerator, make_draft
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
    "features",
    "seed",
    "precision",
)


def assemble(config: TrainConfig, output: Path) -> tuple[Trainer, Tracker]:
    """Load target, draft and data, and hold samples out. Raises UserError for whatever does not go together."""
    accelerator = make_accelerator(config)
    target = load_target(config.target, dtype=config.target.dtype, device=str(accelerator.device))
    if target.tokenizer is None:
        raise UserError("training needs the target's tokenizer and chat template, this target has none")
    if target.context_length is not None and config.max_length > target.context_length:
        raise UserError(
            f"max_length={config.max_length} exceeds the target's context of {target.context_length} tokens"
        )
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
    if config.features == "online":
        return None
    cache = FeatureCache.open(Path(config.data_dir) / "features", feature_key(target, draft.config.target_layer_ids))
    for sample in samples:
        cache.check(sample.sample_id, sample.token_ids)
    return cache


def _target_ahead(config: TrainConfig, target: Target) -> Target | None:
    """What computes features ahead. A CPU that trains has no cores to spare for it."""
    if config.features == "cached":
        return None
    if config.features_device is None:
        return target if target.device.type == "cuda" else None
    return load_target(config.target, dtype=config.target.dtype, device=config.features_device)


def _identity(config: TrainConfig, target: Target, draft: DraftModel, samples: SampleSet) -> dict[str, Any]:
    """By dotted name, as plain values."""
    optim = asdict(config.optim)
    del optim["micro_batch_size"]  # changes the memory alone
    return {
        **{name: getattr(config, name) for name in IDENTITY},
        **{f"optim.{name}": value for name, value in optim.items()},
        "validation.samples": config.validation.samples,
        "data": samples.fingerprint,
        "target": target_fingerprint(target),
        "draft": weights_fingerprint(draft),
    }
