"""From settings to a trainer that is ready to run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from accelerate.utils import set_seed

from data.features import FeatureCache, feature_key
from data.models import load_target
from data.samples import load_samples
from dominotree.errors import UserError

from .checkpoints import Checkpoints
from .config import TrainConfig
from .loop import Trainer
from .provenance import describe_run
from .setup import make_accelerator, make_draft
from .tracking import Tracker
from .updates import split_held_out
from .validation import Validator

# What a checkpoint and the run that resumes it must have in common for the remaining losses to be the same.
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
    set_seed(config.seed)
    target = load_target(config.target, dtype=config.target.dtype, device=str(accelerator.device))
    if target.tokenizer is None:
        raise UserError("training needs the target's tokenizer and chat template, this target has none")
    draft = make_draft(config, target)
    samples = load_samples(Path(config.data_dir), target.tokenizer, max_length=config.max_length)
    trained_on, held_out = split_held_out(len(samples), config.validation.samples, config.seed)
    cache = None
    if config.features == "cached":
        key = feature_key(target, draft.config.target_layer_ids)
        cache = FeatureCache.open(Path(config.data_dir) / "features", key)
    provenance = describe_run(config, samples)
    identity = {name: getattr(config, name) for name in IDENTITY}
    identity |= {"optim": asdict(config.optim), "data_fingerprint": samples.fingerprint}
    tracker = Tracker(config.tracking, output, provenance, active=accelerator.is_main_process)
    trainer = Trainer(
        config,
        accelerator,
        target,
        draft,
        [samples[index] for index in trained_on],
        cache,
        Validator(
            [samples[index] for index in held_out],
            max_new_tokens=config.validation.max_new_tokens,
            node_budget=config.validation.node_budget,
        ),
        Checkpoints(output, keep_last=config.keep_last, provenance=provenance, identity=identity),
        tracker,
    )
    return trainer, tracker
