"""Speculative decoding with Domino drafters: draft models, conditional draft trees, lossless decoding.

    from dominotree import load, generate

Attributes are imported when first used, so that light parts of the package do not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import generate, load
    from .draft.checkpoint import load_draft, save_draft
    from .draft.fresh import fresh_draft
    from .errors import UserError
    from .target import Target

__all__ = ["Target", "UserError", "fresh_draft", "generate", "load", "load_draft", "save_draft"]

_HOMES = {
    "Target": "target",
    "UserError": "errors",
    "fresh_draft": "draft.fresh",
    "generate": "api",
    "load": "api",
    "load_draft": "draft.checkpoint",
    "save_draft": "draft.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
