"""The training loop: one optimizer-update counter for data, schedules, logging, validation and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from accelerate import Accelerator

from data.features import FeatureCache
from data.prefetch import Prefetch, prefetching
from data.samples import Sample
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError
from dominotree.target import Target

from .checkpoints import Checkpoints
from .config import TrainConfig
from .cross_entropy import make_cross_entropy
from .engine import make_engine
from .feed import Feed, MicroBatch
from .flops import Work, update_flops, work_of
from .metrics import StepSums, peak_memory_gib, teacher_forced
from .online import FeedAhead
from .profiling import Profile, Timeline, product_flops
from .schedules import lambda_base, learning_rate_factor
from .setup import check_same_everywhere, loss_vocabulary, target_size
from .step import StepInput, TrainStep
from .targets import BlockTargets, block_targets
from .tracking import Tracker
from .updates import total_updates
from .validation import Validator


class Trainer:
    """Trains the draft's trainable weights; the target is only ever run forwards.

    `ahead`: the target that computes the next update's features while this one trains; without one, and without a
    cache, they are computed when they are due.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        target: Target,
        draft: DraftModel,
        samples: Sequence[Sample],
        held_out: Sequence[Sample],
        cache: FeatureCache | None,
        ahead: Target | None,
        validator: Validator,
        checkpoints: Checkpoints,
        tracker: Tracker,
    ) -> None:
        self._config = config
        self._accelerator = accelerator
        self._target = target
        self._draft = draft
        self._validator = validator
        self._checkpoints = checkpoints
        self._tracker = tracker
        self._total = total_updates(
            len(samples), config.optim.batch_size, updates=config.optim.updates, epochs=config.optim.epochs
        )
        lm_weight = target.model.get_output_embeddings().weight
        self._vocabulary = loss_vocabulary(target, samples, config.vocab_subset)
        self_generated = config.prefixes == "self_generated"
        self._timeline = Timeline(accelerator.device, active=config.profile)
        cross_entropy = make_cross_entropy(config.loss_kernel, accelerator.device)

        def make_step(draft: DraftModel) -> TrainStep:
            return TrainStep(
                draft,
                target.embed,
                lm_weight,
                self._vocabulary,
                self_generated=self_generated,
                logits_bytes=config.logits_mib << 20,
                cross_entropy=cross_entropy,
                timeline=self._timeline,
            )

        self._make_step = make_step
        self._profile = None
        if config.profile:
            dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
            self._profile = Profile(product_flops(accelerator.device, dtype))

        def make_feed(samples: Sequence[Sample], batch_size: int) -> Feed:
            return Feed(
                samples,
                cache,
                batch_size=batch_size,
                micro_batch_size=config.optim.micro_batch_size,
                pack_length=config.pack_length,
                num_anchors=config.num_anchors,
                seed=config.seed,
                rank=accelerator.process_index,
                world_size=accelerator.num_processes,
            )

        feed = make_feed(samples, config.optim.batch_size)
        self._feed = feed if ahead is None else FeedAhead(feed, ahead, draft.config.target_layer_ids)
        self._held_out = make_feed(held_out, len(held_out))
        self._resumed = checkpoints.restore(draft, resume=config.resume)
        check_same_everywhere(accelerator, self._resumed.update)
        self._engine = make_engine(accelerator, draft, make_step(draft), config.optim)
        if self._resumed.optimizer_state is not None:
            self._engine.load_optimizer_state(self._resumed.optimizer_state)

    def run(self) -> dict[str, float]:
        """Train to the end, resuming where the last checkpoint stands; returns the last validation's figures."""
        update = self._resumed.update
        self._tracker.start(update)
        figures: dict[str, float] = {}
        updates = range(update + 1, self._total + 1)
        with (
            self._tracker.progress(self._total, update) as advance,
            prefetching(self._feed.micro_batches, updates) as ready,
        ):
            for update in updates:
                record = self.update(update, ready)
                self._tracker.log(update, record)
                advance(record)
                last = update == self._total
                # Validated first, so that a checkpoint knows of the best so far and nothing is lost between the two.
                if update % self._config.validation.every == 0 or last:
                    figures = self._validate(update)
                if update % self._config.checkpoint_every == 0 or last:
                    self._checkpoints.save(self._accelerator, self._engine, update)
        if self._profile is not None and self._accelerator.is_main_process:
            self._profile.show(peak_memory_gib(self._accelerator.device))
        return figures

    def update(self, update: int, ready: Prefetch[int, list[MicroBatch]]) -> dict[str, float]:
        """One optimizer update, on the micro-batches that are `ready` next; returns what is logged about it."""
        start = time.perf_counter()
        self._timeline.take()  # the time between updates is nobody's
        self._timeline.switch("data")
        weight_lambda = lambda_base(
            update, self._total, start=self._config.lambda_start, decay_ratio=self._config.lambda_decay_ratio
        )
        factor = learning_rate_factor(
            update,
            self._total,
            schedule=self._config.optim.schedule,
            warmup_ratio=self._config.optim.warmup_ratio,
        )
        batches = [batch.to(self._accelerator.device) for batch in ready.take()]
        targets = [self._targets(batch) for batch in batches]
        # The loss is a mean over the whole update, whichever process and micro-batch its tokens are in.
        weight = self._accelerator.reduce(torch.stack([part.weights.sum() for part in targets]).sum(), "sum")
        scale = self._accelerator.num_processes / (weight + 1e-6)
        sums = StepSums()
        for index, (batch, target) in enumerate(zip(batches, targets, strict=True)):
            inputs = self._inputs(batch, target)
            last = index + 1 == len(batches)
            output = self._engine.forward_backward(inputs, weight_lambda, scale, last=last)
            self._timeline.switch("other")
            sums.add(output, target.weights)
        self._timeline.switch("optimizer")
        norm = self._engine.step(self._config.optim.learning_rate * factor)
        if not math.isfinite(norm):
            raise UserError(
                f"update {update}: the gradient is {norm}; lower optim.learning_rate and go on from the last checkpoint"
            )
        self._timeline.switch("other")
        figures = teacher_forced(self._accelerator.reduce(sums.tensor(), "sum"), weight_lambda)
        figures |= self._profiled(batches, targets)
        seconds = time.perf_counter() - start
        return figures | {
            "lambda": weight_lambda,
            "learning_rate": self._config.optim.learning_rate * factor,
            "gradient_norm": norm,
            "memory_gib": peak_memory_gib(self._accelerator.device),
            "seconds": seconds,
            "tokens_per_second": figures["supervised_tokens"] / seconds,
        }

    def _targets(self, batch: MicroBatch) -> BlockTargets:
        length, gamma = self._draft.config.draft_length, self._config.decay_gamma
        targets = block_targets(
            batch.input_ids, batch.loss_mask, batch.anchors, batch.keep, length, gamma, batch.starts
        )
        return self._vocabulary.restrict(targets)

    def _inputs(self, batch: MicroBatch, targets: BlockTargets) -> StepInput:
        features = batch.features
        if features is None:
            self._timeline.switch("target")
            features = self._target.features(batch.input_ids, self._draft.config.target_layer_ids, batch.starts)
        anchor_ids = batch.input_ids.gather(1, batch.anchors)
        return StepInput(anchor_ids, batch.anchors, batch.keep, features, targets, batch.starts)

    def _profiled(self, batches: Sequence[MicroBatch], targets: Sequence[BlockTargets]) -> dict[str, float]:
        """What profile=true adds to an update's figures, of this process."""
        if self._profile is None:
            return {}
        work = Work()
        for batch, target in zip(batches, targets, strict=True):
            places = batch.anchors if batch.starts is None else batch.anchors - batch.starts.gather(1, batch.anchors)
            anchors = places[batch.keep].tolist()
            rows = int((target.weights > 0).sum())
            work += work_of(batch.lengths, anchors, self._draft.config.block_size, rows)
        flops = update_flops(
            work,
            self._draft.config,
            target_size(self._target) if self._config.features == "online" else None,
            len(self._vocabulary.lm_weight),
            backbone_trains=self._config.backbone == "trained",
        )
        all_places = sum(batch.input_ids.numel() for batch in batches)
        all_slots = sum(batch.anchors.numel() for batch in batches) * self._draft.config.block_size
        return self._profile.add(self._timeline.take(), work, flops, all_places, all_slots)

    def _validate(self, update: int) -> dict[str, float]:
        with self._engine.whole_draft() as draft:
            figures = self._validator.run(self._accelerator, self._target, draft)
            held_out = self._held_out_figures(draft)
            self._tracker.log_validation(update, figures, held_out)
            self._checkpoints.keep_best(self._accelerator, draft, update, figures.score)
        return figures.flat() | held_out

    @torch.no_grad()
    def _held_out_figures(self, draft: DraftModel) -> dict[str, float]:
        """The teacher-forced figures of samples that are never trained on, with the same anchors each time."""
        step, sums = self._make_step(draft), StepSums()
        for batch in self._held_out.micro_batches(1):
            moved = batch.to(self._accelerator.device)
            targets = self._targets(moved)
            with self._accelerator.autocast():
                # Neither loss is left out at this weight.
                sums.add(step(self._inputs(moved, targets), lambda_base=0.5), targets.weights)
        figures = teacher_forced(self._accelerator.reduce(sums.tensor(), "sum"), lambda_base=0.5)
        del figures["loss"]  # the parts tell more than their mean
        return {f"held_out/{name}": value for name, value in figures.items()}
