"""Loading the two models that a generation needs, with the user kept informed."""

from __future__ import annotations

from data.models import DraftChoice, TargetChoice, load_drafter, load_target, target_path
from dominotree.decode.methods import Method
from dominotree.draft.model import DraftModel
from dominotree.dtypes import parse_device, parse_dtype
from dominotree.errors import UserError
from dominotree.target import Target
from infer.console import Console


def check_loading(draft: DraftChoice, method: Method, dtype: str, device: str) -> None:
    """What can be known before a model is read. Raises UserError."""
    if dtype != "auto":
        parse_dtype(dtype)
    parse_device(device)
    if draft.source == "none" and method.drafts:
        raise UserError(f"method={method.name} needs a drafter, got draft=none; name one, or use method=ar")


def load_models(
    target: TargetChoice, draft: DraftChoice, method: Method, *, dtype: str, device: str, console: Console
) -> tuple[Target, DraftModel | None]:
    """The target, and the drafter where the method drafts, checked to fit it. Raises UserError."""
    path = target_path(target)  # with messages of its own where SmolLM2 is fetched first
    with console.loading() as step:
        step(f"loading the target {path}")
        loaded = load_target(target, dtype=dtype, device=device)
        if not method.drafts:
            return loaded, None
        step(f"loading the drafter {draft.path or draft.source}")
        drafter = load_drafter(draft, loaded, dtype=dtype)
    note_untrained(draft, console)
    return loaded, drafter


def note_untrained(draft: DraftChoice, console: Console) -> None:
    """Say so where the drafter is drawn from a seed."""
    if draft.source == "fresh":
        console.note(
            f"the drafter is untrained (draft=fresh, drawn from seed {draft.seed}): it guesses at random, so expect no "
            "speedup; the target decides every token all the same"
        )
