"""What tells machines and models apart, for figures that hold for one of them only."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .errors import UserError
from .tree.builders import builder_for

if TYPE_CHECKING:
    from .draft.model import DraftModel
    from .target import Target

VALUES_A_WEIGHT = 64
Identity = Mapping[str, str]


def speed_identity(target: Target, draft: DraftModel) -> dict[str, str]:
    """Everything that decoding times depend on: machine, threads, number format, libraries, the models' shapes."""
    return {
        "processor": processor_name(),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
        "threads": str(torch.get_num_threads()),
        "tree builder": builder_for("auto", target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "target shapes": shapes_fingerprint(target.model),
        "draft shapes": shapes_fingerprint(draft),
    }


def weights_identity(target: Target, draft: DraftModel) -> dict[str, str]:
    """Everything that acceptance depends on: the weights of both models."""
    return {"target weights": weights_fingerprint(target.model), "draft weights": weights_fingerprint(draft)}


def check_identity(path: str, made: Identity, now: Identity, remedy: str) -> None:
    """Raises UserError, naming what differs, for a file whose figures were not made under the present identity."""
    for key, value in now.items():
        if made.get(key) != value:
            raise UserError(f"{path} was made with {key} {made.get(key, 'unknown')}, this run has {value}; {remedy}")


def shapes_fingerprint(model: torch.nn.Module) -> str:
    """Tells architectures apart: the names and shapes of all weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        digest.update(f"{name}{tuple(weight.shape)}".encode())
    return digest.hexdigest()


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Tells models apart: their shapes and a few values of every weight, whatever dtype they are loaded in."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        values = weight.detach().flatten()[:VALUES_A_WEIGHT].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(f"{name}{tuple(weight.shape)}".encode() + values.numpy().tobytes())
    return digest.hexdigest()


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
