"""Checkpoints: a draft directory in the published layout beside the state that resumes training exactly.

<output>/checkpoints/update-00000100/draft/     what infer reads
<output>/checkpoints/update-00000100/state/     optimizer, weights in training precision, random states
<output>/best/, <output>/last/                  draft directories
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dominotree.draft.checkpoint import save_draft
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError

PREFIX = "update-"


class Checkpoints:
    """Writes, finds and prunes the checkpoints of one run directory. A checkpoint appears whole or not at all."""

    def __init__(self, output: Path, *, keep_last: int, provenance: dict[str, Any], identity: dict[str, Any]) -> None:
        """`identity`: what must be the same for a checkpoint to be resumed (data, seed, batch size, recipe)."""
        self._output = output
        self._folder = output / "checkpoints"
        self._keep_last = keep_last
        self._provenance = provenance
        self._identity = identity
        self._best = 0.0

    def restore(self, accelerator: Accelerator, *, resume: str) -> int:
        """Load the newest checkpoint, where there is one and `resume` is auto; returns its update, else 0.

        Raises UserError where the run directory belongs to other data or another recipe, or holds a run already.
        """
        newest = self.newest()
        if newest is None:
            return 0
        if resume == "never":
            raise UserError(f"{self._output} holds a run already; resume=auto continues it, or give another output=")
        meta = json.loads((newest / "training.json").read_text(encoding="utf-8"))
        for key, value in self._identity.items():
            if meta["identity"].get(key) != value:
                raise UserError(
                    f"{self._output} was trained with {key}={meta['identity'].get(key)}, this run says {value}; "
                    "give another output= to start anew"
                )
        accelerator.load_state(str(newest / "state"))
        self._best = meta["best"]
        return int(meta["update"])

    def save(self, accelerator: Accelerator, draft: DraftModel, update: int) -> None:
        """Write the checkpoint of `update` and prune older ones; all processes take part."""
        scratch = self._folder / f".{PREFIX}{update:08d}"
        final = self._folder / f"{PREFIX}{update:08d}"
        if accelerator.is_main_process:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(scratch / "state"))
        if accelerator.is_main_process:
            self._write_draft(draft, scratch / "draft", update)
            meta = {"update": update, "best": self._best, "identity": self._identity}
            (scratch / "training.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            scratch.rename(final)
            self._write_draft(draft, self._output / "last", update)
            for old in self._all()[: -self._keep_last]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()

    def keep_best(self, accelerator: Accelerator, draft: DraftModel, update: int, score: float) -> None:
        """Keep the drafter that decoded best so far under `best/`."""
        if score > self._best:
            self._best = score
            if accelerator.is_main_process:
                self._write_draft(draft, self._output / "best", update)

    def newest(self) -> Path | None:
        found = self._all()
        return found[-1] if found else None

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob(f"{PREFIX}*")) if self._folder.is_dir() else []

    def _write_draft(self, draft: DraftModel, folder: Path, update: int) -> None:
        save_draft(draft, folder)
        provenance = self._provenance | {"update": update}
        (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
