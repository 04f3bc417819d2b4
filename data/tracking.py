"""Weights & Biases, where a command is asked to log there."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from dominotree.checked import one_of
from dominotree.errors import UserError

RUN_ID = "wandb_run_id"
WANDB_TIMEOUT = 30  # seconds


@dataclass(frozen=True)
class TrackingConfig:
    """Where figures go besides the files in the output folder."""

    wandb: str
    project: str
    name: str | None

    def __post_init__(self) -> None:
        one_of("tracking.wandb", self.wandb, ("online", "offline", "disabled"))


def start_wandb(config: TrackingConfig, output: Path, provenance: dict[str, Any]) -> Any:
    """The run of this directory, continued under its own id after a restart; None where it is disabled.

    Raises UserError without the package, and where the service does not answer.
    """
    if config.wandb == "disabled":
        return None
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            f"tracking.wandb={config.wandb} needs the wandb package: pip install -e '.[wandb]', or say disabled"
        ) from error
    stored = output / RUN_ID
    run_id = stored.read_text(encoding="utf-8").strip() if stored.exists() else secrets.token_hex(4)
    stored.write_text(run_id + "\n", encoding="utf-8")
    try:
        return wandb.init(
            project=config.project,
            name=config.name,
            id=run_id,
            resume="allow",
            mode=cast(Literal["online", "offline"], config.wandb),
            dir=str(output),
            config=provenance,
            settings=wandb.Settings(init_timeout=WANDB_TIMEOUT),
        )
    except wandb.errors.Error as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"Weights & Biases: {reason}; tracking.wandb=offline works without it") from error
