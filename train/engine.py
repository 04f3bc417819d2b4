"""What carries out an update: plain and data-parallel training through accelerate, or DeepSpeed's ZeRO.

The loop is the same for all of them. A step of training goes forwards and backwards once for each micro-batch of this
process, then the optimizer steps once; weights and optimizer state are handed out whole, whichever process holds which
part of them, so that a checkpoint written by one engine is continued by any other, on any number of processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from dominotree.draft.fresh import skeleton
from dominotree.draft.model import DraftModel

from .config import OptimConfig
from .objective import Objective
from .step import StepInput, TrainStep

MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of every weight


class Engine(ABC):
    """Every method is called by all processes alike."""

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft
        self._trained = [weight for weight in draft.parameters() if weight.requires_grad]

    @abstractmethod
    def forward_backward(self, inputs: StepInput, lambda_base: float, scale: Tensor, *, last: bool) -> Objective:
        """Add one micro-batch's gradient of `scale * loss`; `last` of this update's. The gradient is the mean over
        the processes of what they add up."""

    @abstractmethod
    def step(self, learning_rate: float) -> float:
        """Clip, update the weights, forget the gradients; returns the gradient's norm before clipping."""

    @contextmanager
    def whole_draft(self) -> Iterator[DraftModel]:
        """The draft with all of its weights, to decode with and to save."""
        training = self._draft.training
        try:
            yield self._draft.eval()
        finally:
            self._draft.train(training)

    @abstractmethod
    def optimizer_state(self) -> dict[int, dict[str, Tensor]]:
        """Of every trained weight, in the draft's order, as torch's AdamW has it; complete on the main process."""

    @abstractmethod
    def load_optimizer_state(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Continue from the `optimizer_state` of any engine."""


def make_engine(accelerator: Accelerator, draft: DraftModel, step: TrainStep, optim: OptimConfig) -> Engine:
    """The engine that this process was launched for. The draft's weights must be the ones to start from."""
    optimizer = torch.optim.AdamW(
        [weight for weight in draft.parameters() if weight.requires_grad],
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        weight_decay=optim.weight_decay,
        fused=True,
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return ZeroEngine(accelerator, draft, step, optimizer)
    return PlainEngine(accelerator, draft, step, optimizer, optim.clip_norm)


class PlainEngine(Engine):
    """One process, or several with the same weights (DistributedDataParallel)."""

    def __init__(
        self,
        accelerator: Accelerator,
        draft: DraftModel,
        step: TrainStep,
        optimizer: torch.optim.Optimizer,
        clip_norm: float,
    ) -> None:
        super().__init__(draft)
        self._accelerator = accelerator
        self._clip_norm = clip_norm
        self._step, self._optimizer = accelerator.prepare(step, optimizer)

    def forward_backward(self, inputs: StepInput, lambda_base: float, scale: Tensor, *, last: bool) -> Objective:
        # Processes exchange gradients in the last backward pass alone.
        with nullcontext() if last else self._accelerator.no_sync(self._step):
            output: Objective = self._step(inputs, lambda_base)
            self._accelerator.backward(output.loss * scale)
        return output

    def step(self, learning_rate: float) -> float:
        norm = float(self._accelerator.clip_grad_norm_(self._trained, self._clip_norm))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def optimizer_state(self) -> dict[int, dict[str, Tensor]]:
        state: dict[int, dict[str, Tensor]] = self._optimizer.state_dict()["state"]
        return state

    def load_optimizer_state(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        copied = {index: {name: value.clone() for name, value in values.items()} for index, values in state.items()}
        # The groups' values follow from the settings, whatever was stored.
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": copied, "param_groups": groups})


class ZeroEngine(Engine):
    """DeepSpeed with optimizer state and gradients shared out among the processes (ZeRO-2), or the weights too
    (ZeRO-3, which gathers those of a module while it runs)."""

    def __init__(
        self, accelerator: Accelerator, draft: DraftModel, step: TrainStep, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(draft)
        self._is_main = accelerator.is_main_process
        self._shards_weights = accelerator.deepspeed_plugin.zero_stage == 3
        # Norms stay whole in every process, matrices are shared out.
        zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 10 * draft.config.hidden_size
        self._engine, _ = accelerator.prepare(_TensorOutputs(step), optimizer)

    def forward_backward(self, inputs: StepInput, lambda_base: float, scale: Tensor, *, last: bool) -> Objective:
        self._engine.set_gradient_accumulation_boundary(last)
        output = Objective(**self._engine(inputs, lambda_base))
        # Without DeepSpeed's division by the number of micro-batches: `scale` sees to the mean.
        self._engine.backward(output.loss * scale, scale_wrt_gas=False)
        return output

    def step(self, learning_rate: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    @contextmanager
    def whole_draft(self) -> Iterator[DraftModel]:
        # A draft of its own: weights inside the engine are parts of larger tensors, which are not saved in one piece,
        # and with ZeRO-3 a module gives them up again as soon as it has run.
        from deepspeed.runtime.zero import GatheredParameters

        whole = skeleton(self._draft.config).to(self._engine.device, torch.float32).eval().requires_grad_(False)
        for ours, theirs in zip(whole.parameters(), self._draft.parameters(), strict=True):
            with GatheredParameters([theirs]):
                ours.copy_(theirs)
        yield whole

    def optimizer_state(self) -> dict[int, dict[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        count = next(iter(self._engine.optimizer.optimizer.state.values()))["step"].cpu()
        state = {}
        for index, weight in enumerate(self._trained):
            moments = {name: safe_get_full_optimizer_state(weight, name) for name in MOMENTS}
            if self._is_main:
                state[index] = {"step": count.clone()} | {name: value.cpu() for name, value in moments.items()}
        return state

    def load_optimizer_state(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        zero = self._engine.optimizer
        count = state[0]["step"]
        for shard in self._optimizer_shards():
            # What AdamW itself makes in its first step.
            zero.optimizer.state[shard] = {"step": count.to(shard.device, copy=True)} | {
                name: torch.zeros_like(shard) for name in MOMENTS
            }
        if not self._shards_weights:
            zero._lazy_init_hp_params_optimizer_state()
        for index, weight in enumerate(self._trained):
            for name in MOMENTS:
                self._set_own_part(weight, name, state[index][name])

    def _optimizer_shards(self) -> list[Tensor]:
        """The flat tensors, each a part of many weights, that this process's AdamW updates."""
        zero = self._engine.optimizer
        shards: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if self._shards_weights else zero.single_partition_of_fp32_groups
        )
        return shards

    def _set_own_part(self, weight: Tensor, name: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if not self._shards_weights:
            safe_set_full_optimizer_state(weight, value.to(weight.device), name)
            return
        size = weight.ds_tensor.numel()  # type: ignore[attr-defined] # DeepSpeed's, alike on all processes
        rank, world_size = self._engine.global_rank, self._engine.world_size
        padded = nn.functional.pad(value.flatten(), (0, size * world_size - value.numel()))
        part = padded[rank * size : (rank + 1) * size]
        safe_set_local_optimizer_state(weight, part.to(weight.device), name)


class _TensorOutputs(nn.Module):
    """A training step whose output DeepSpeed can look into: it finds tensors in a dictionary, not in a dataclass.

    The step is no module of its own here, so that weights which it uses outside the modules they belong to (the head's)
    are gathered for this one, forwards and backwards.
    """

    def __init__(self, step: TrainStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, inputs: StepInput, lambda_base: float) -> dict[str, Tensor]:
        return dict(vars(self.step.forward(inputs, lambda_base)))
