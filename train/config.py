"""Settings of `train/main.py`, checked as they are made; `conf/train.yaml` explains the keys."""

from __future__ import annotations

from dataclasses import dataclass

from data.models import DraftChoice, TargetChoice
from data.tracking import TrackingConfig
from dominotree.checked import at_least, one_of
from dominotree.errors import UserError

ATTENTIONS = ("dense", "grouped", "flex")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW over the trainable weights; everything counts optimizer updates."""

    learning_rate: float
    beta1: float
    beta2: float
    weight_decay: float
    clip_norm: float
    schedule: str
    warmup_ratio: float
    batch_size: int  # samples an update, over all processes
    micro_batch_size: int  # samples a forward and backward pass, of one process
    updates: int | None  # how long to train, or
    epochs: int | None

    def __post_init__(self) -> None:
        one_of("optim.schedule", self.schedule, ("cosine", "linear", "constant"))
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise UserError(f"optim.{name} must be positive, got {getattr(self, name)}")
        for name in ("beta1", "beta2", "warmup_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optim.{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.weight_decay < 0:
            raise UserError(f"optim.weight_decay must not be negative, got {self.weight_decay}")
        for name in ("batch_size", "micro_batch_size"):
            at_least(f"optim.{name}", getattr(self, name), 1)
        if (self.updates is None) == (self.epochs is None):
            raise UserError(f"give optim.updates or optim.epochs, one of the two; got {self.updates} and {self.epochs}")
        at_least("optim.updates or optim.epochs", self.updates if self.updates is not None else self.epochs or 0, 1)


@dataclass(frozen=True)
class NewHeadConfig:
    """Sizes of the Domino head that a drafter without one is given; None takes what the drafter's settings say."""

    gru_hidden_dim: int | None = None
    emb_dim: int | None = None
    pure_draft_prefix_len: int | None = None

    def __post_init__(self) -> None:
        for name, lowest in (("gru_hidden_dim", 1), ("emb_dim", 1), ("pure_draft_prefix_len", 0)):
            value = getattr(self, name)
            if value is not None:
                at_least(f"head.{name}", value, lowest)


@dataclass(frozen=True)
class ValidationConfig:
    """Real decoding of held-out prompts, every so many updates."""

    every: int  # updates; the last one is always followed by a validation
    samples: int  # held out of the data, never trained on
    max_new_tokens: int
    node_budget: int

    def __post_init__(self) -> None:
        for name in ("every", "samples", "max_new_tokens", "node_budget"):
            at_least(f"validation.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class TrainConfig:
    target: TargetChoice
    draft: DraftChoice
    optim: OptimConfig
    head: NewHeadConfig
    validation: ValidationConfig
    tracking: TrackingConfig
    stage: str
    backbone: str
    prefixes: str
    correction: str
    lambda_start: float
    lambda_decay_ratio: float
    decay_gamma: float | None
    num_anchors: int
    max_length: int
    pack_length: int | None
    vocab_subset: int | None
    data_dir: str
    features: str
    features_device: str | None
    output: str
    resume: str
    checkpoint_every: int
    keep_last: int
    gradient_checkpointing: bool
    compile: bool
    attention: str
    logits_mib: int
    loss_kernel: str
    profile: bool
    precision: str
    device: str
    seed: int
    debug: bool

    def __post_init__(self) -> None:
        one_of("stage", self.stage, ("dflash", "domino"))
        one_of("backbone", self.backbone, ("frozen", "trained"))
        one_of("prefixes", self.prefixes, ("teacher_forced", "self_generated"))
        one_of("correction", self.correction, ("gru", "hidden_only"))
        one_of("loss_kernel", self.loss_kernel, ("torch", "liger"))
        one_of("attention", self.attention, ("auto", *ATTENTIONS))
        one_of("features", self.features, ("online", "ahead", "cached"))
        if self.features_device is not None and self.features != "ahead":
            raise UserError(f"features_device={self.features_device} goes with features=ahead, got {self.features}")
        one_of("resume", self.resume, ("auto", "never"))
        one_of("precision", self.precision, ("float32", "bfloat16"))
        for name in ("num_anchors", "checkpoint_every", "keep_last", "logits_mib"):
            at_least(name, getattr(self, name), 1)
        at_least("max_length", self.max_length, 2)
        if self.pack_length is not None:
            at_least("pack_length", self.pack_length, 2)
        for name in ("lambda_start", "lambda_decay_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must lie in 0..1, got {getattr(self, name)}")
        if self.decay_gamma is not None and not self.decay_gamma > 0:
            raise UserError(f"decay_gamma must be positive, or null for none, got {self.decay_gamma}")
        if self.vocab_subset is not None:
            at_least("vocab_subset", self.vocab_subset, 1)
        if self.stage == "dflash" and self.backbone == "frozen":
            raise UserError("stage=dflash trains a backbone, so backbone=frozen leaves nothing to train; say trained")
        if self.stage == "domino" and self.backbone == "frozen" and self.draft.source == "fresh":
            raise UserError(
                "backbone=frozen keeps a trained backbone, got draft=fresh; name a checkpoint with draft=, or train "
                "the backbone with backbone=trained or stage=dflash"
            )
