"""The training loop: one optimizer-update counter for data, schedules, logging, validation and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor

from data.anchors import draw_anchors
from data.batches import Batch, collate
from data.features import FeatureCache
from data.samples import Sample
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError
from dominotree.target import Target

from .checkpoints import Checkpoints
from .config import TrainConfig
from .metrics import StepSums, peak_memory_gib, teacher_forced
from .schedules import lambda_base, learning_rate_factor
from .setup import loss_vocabulary
from .step import StepInput, TrainStep
from .targets import BlockTargets, block_targets
from .tracking import Tracker
from .updates import anchor_seed, own_share, total_updates, update_samples
from .validation import Validator


class Trainer:
    """Trains the draft's trainable weights; the target is only ever run forwards."""

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        target: Target,
        draft: DraftModel,
        samples: Sequence[Sample],
        cache: FeatureCache | None,
        validator: Validator,
        checkpoints: Checkpoints,
        tracker: Tracker,
    ) -> None:
        self._config = config
        self._accelerator = accelerator
        self._target = target
        self._draft = draft
        self._samples = samples
        self._cache = cache
        self._validator = validator
        self._checkpoints = checkpoints
        self._tracker = tracker
        self._total = total_updates(
            len(samples), config.optim.batch_size, updates=config.optim.updates, epochs=config.optim.epochs
        )
        lm_weight = target.model.get_output_embeddings().weight
        self._vocabulary = loss_vocabulary(target, samples, config.vocab_subset)
        self_generated = config.prefixes == "self_generated"
        step = TrainStep(draft, target.embed, lm_weight, self._vocabulary, self_generated=self_generated)
        optim = config.optim
        optimizer = torch.optim.AdamW(
            [parameter for parameter in draft.parameters() if parameter.requires_grad],
            lr=optim.learning_rate,
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self._step, self._optimizer = accelerator.prepare(step, optimizer)

    def run(self) -> dict[str, float]:
        """Train to the end, resuming where the last checkpoint stands; returns the last validation's figures."""
        update = self._checkpoints.restore(self._draft, self._optimizer, resume=self._config.resume)
        self._tracker.start(update)
        figures: dict[str, float] = {}
        with self._tracker.progress(self._total, update) as advance:
            while update < self._total:
                update += 1
                record = self.update(update)
                self._tracker.log(update, record)
                advance(record)
                last = update == self._total
                # Validated first, so that a checkpoint knows of the best so far and nothing is lost between the two.
                if update % self._config.validation.every == 0 or last:
                    figures = self._validate(update)
                if update % self._config.checkpoint_every == 0 or last:
                    self._checkpoints.save(self._accelerator, self._draft, self._optimizer, update)
        return figures

    def update(self, update: int) -> dict[str, float]:
        """One optimizer update; returns what is logged about it."""
        start = time.perf_counter()
        weight_lambda = lambda_base(
            update, self._total, start=self._config.lambda_start, decay_ratio=self._config.lambda_decay_ratio
        )
        factor = learning_rate_factor(
            update,
            self._total,
            schedule=self._config.optim.schedule,
            warmup_ratio=self._config.optim.warmup_ratio,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.optim.learning_rate * factor
        batches = self._batches(update)
        targets = [self._targets(batch, update) for batch in batches]
        # The loss is a mean over the whole update, whichever process and micro-batch its tokens are in.
        weight = self._accelerator.reduce(torch.stack([part[2].weights.sum() for part in targets]).sum(), "sum")
        scale = self._accelerator.num_processes / (weight + 1e-6)
        sums = StepSums()
        for index, (batch, (anchors, keep, target)) in enumerate(zip(batches, targets, strict=True)):
            waits = index + 1 < len(batches)
            with self._accelerator.no_sync(self._step) if waits else nullcontext():
                output = self._step(self._inputs(batch, anchors, keep, target), weight_lambda)
                self._accelerator.backward(output.loss * scale)
            sums.add(output, target.weights)
        norm = float(self._accelerator.clip_grad_norm_(self._step.parameters(), self._config.optim.clip_norm))
        if not math.isfinite(norm):
            raise UserError(
                f"update {update}: the gradient is {norm}; lower optim.learning_rate and go on from the last checkpoint"
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        figures = teacher_forced(self._accelerator.reduce(sums.tensor(), "sum"), weight_lambda)
        seconds = time.perf_counter() - start
        return figures | {
            "lambda": weight_lambda,
            "learning_rate": self._config.optim.learning_rate * factor,
            "gradient_norm": norm,
            "memory_gib": peak_memory_gib(self._accelerator.device),
            "seconds": seconds,
            "tokens_per_second": figures["supervised_tokens"] / seconds,
        }

    def _batches(self, update: int) -> list[Batch]:
        indices = update_samples(update, self._config.optim.batch_size, len(self._samples), self._config.seed)
        share = own_share(
            indices,
            self._accelerator.process_index,
            self._accelerator.num_processes,
            self._config.optim.micro_batch_size,
        )
        return [self._collate(part, idle_index=indices[0]) for part in share]

    def _collate(self, indices: list[int], idle_index: int) -> Batch:
        """A micro-batch; without samples it is one that teaches nothing, so that all processes take equal steps."""
        chosen = [self._samples[index] for index in indices or [idle_index]]
        batch = collate(chosen, pad_id=0)
        mask = batch.loss_mask if indices else torch.zeros_like(batch.loss_mask)
        device = self._accelerator.device
        return Batch(batch.input_ids.to(device), mask.to(device), batch.sample_ids)

    def _targets(self, batch: Batch, update: int) -> tuple[Tensor, Tensor, BlockTargets]:
        seeds = [anchor_seed(self._config.seed, update, sample_id) for sample_id in batch.sample_ids]
        anchors, keep = draw_anchors(batch.loss_mask, self._config.num_anchors, seeds)
        length = self._draft.config.draft_length
        targets = block_targets(batch.input_ids, batch.loss_mask, anchors, keep, length, self._config.decay_gamma)
        return anchors, keep, self._vocabulary.restrict(targets)

    def _inputs(self, batch: Batch, anchors: Tensor, keep: Tensor, targets: BlockTargets) -> StepInput:
        if self._cache is None:
            features = self._target.features(batch.input_ids, self._draft.config.target_layer_ids)
        else:
            features = self._cache.get_batch(batch.sample_ids).to(self._accelerator.device)
        return StepInput(batch.input_ids.gather(1, anchors), anchors, keep, features, targets)

    def _validate(self, update: int) -> dict[str, float]:
        self._draft.eval()
        figures = self._validator.run(self._accelerator, self._target, self._draft)
        self._draft.train()
        self._tracker.log_validation(update, figures)
        self._checkpoints.keep_best(self._accelerator, self._draft, update, figures.score)
        return figures.flat()
