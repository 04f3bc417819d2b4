"""The target and the drafter that a command names: what its settings hold, and loading them.

torch is imported when a model is loaded, not before, so that a mistake in the settings shows at once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dominotree.checked import at_least, one_of
from dominotree.errors import UserError

if TYPE_CHECKING:
    from dominotree.draft.model import DraftModel
    from dominotree.target import Target

SMOLLM2_DRAFTER = Path(__file__).parent / "drafters" / "smollm2"


@dataclass(frozen=True)
class TargetChoice:
    """Where the target comes from: `source` smollm2 (obtained by this project) or path (a directory or a hub id)."""

    source: str
    path: str | None
    dtype: str  # what `dtype=auto` means for this target

    def __post_init__(self) -> None:
        one_of("target.source", self.source, ("smollm2", "path"))
        _needs_path("target", self.source, self.path)

    def effective_dtype(self, dtype: str) -> str:
        """The dtype asked for, or this target's own where that is auto."""
        return self.dtype if dtype == "auto" else dtype


@dataclass(frozen=True)
class DraftChoice:
    """Where the drafter comes from: `source` smollm2 (it ships with this project), path (a directory or a hub id),
    fresh (drawn from a seed), or none."""

    source: str
    path: str | None = None
    shift_label: bool | None = None
    seed: int = 0
    block_size: int = 8
    num_layers: int = 2
    num_features: int = 5
    gru_hidden_dim: int = 256
    emb_dim: int = 128
    pure_draft_prefix_len: int = 1

    def __post_init__(self) -> None:
        one_of("draft.source", self.source, ("smollm2", "path", "fresh", "none"))
        _needs_path("draft", self.source, self.path)
        at_least("draft.seed", self.seed, 0)
        at_least("draft.block_size", self.block_size, 2)
        at_least("draft.pure_draft_prefix_len", self.pure_draft_prefix_len, 0)
        for name in ("num_layers", "num_features", "gru_hidden_dim", "emb_dim"):
            at_least(f"draft.{name}", getattr(self, name), 1)


def target_path(choice: TargetChoice) -> str:
    """The directory or hub id; SmolLM2 is fetched first when it is not in the cache. Raises UserError."""
    from data.smollm2 import smollm2_path

    return str(smollm2_path()) if choice.source == "smollm2" else str(choice.path)


def load_target(choice: TargetChoice, *, dtype: str = "auto", device: str = "auto") -> Target:
    """The loaded target. Raises UserError."""
    from dominotree.target import Target

    return Target.load(target_path(choice), dtype=choice.effective_dtype(dtype), device=device)


def load_drafter(choice: DraftChoice, target: Target, *, dtype: str = "auto", with_head: bool = True) -> DraftModel:
    """The drafter, checked to fit the target; a fresh one may leave the Domino head out. Raises UserError."""
    from dominotree.draft.checkpoint import check_fits, load_draft
    from dominotree.draft.fresh import fresh_draft

    if choice.source == "none":
        raise UserError("this needs a drafter, got draft=none; name one")
    if choice.source == "smollm2":
        draft = load_draft(str(SMOLLM2_DRAFTER), dtype=dtype, device=target.device)
        try:
            check_fits(draft, target)
        except UserError as error:
            raise UserError(
                f"draft=smollm2, the default, is for SmolLM2: {error}; name a drafter for this target, or draft=fresh"
            ) from error
        return draft
    if choice.source == "path":
        draft = load_draft(str(choice.path), dtype=dtype, device=target.device, shift_label=choice.shift_label)
        check_fits(draft, target)
        return draft
    return fresh_draft(
        target,
        seed=choice.seed,
        block_size=choice.block_size,
        num_layers=choice.num_layers,
        num_features=choice.num_features,
        gru_hidden_dim=choice.gru_hidden_dim,
        emb_dim=choice.emb_dim,
        shift_label=choice.shift_label is not False,
        pure_draft_prefix_len=choice.pure_draft_prefix_len,
        with_head=with_head,
    )


def quiet_libraries() -> None:
    """No load reports, warnings and progress bars of the libraries; their errors still come through."""
    import huggingface_hub.utils
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def _needs_path(group: str, source: str, path: str | None) -> None:
    if source == "path" and not path:
        raise UserError(f"{group}.path must be a directory or a hub id, got {path!r}; write {group}=PATH")
