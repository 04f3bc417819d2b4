"""Checkpoints: a draft directory in the published layout beside the state that resumes training exactly.

<output>/checkpoints/update-00000100/draft/       what infer reads, in training precision
<output>/checkpoints/update-00000100/training.pt  optimizer, update, best score, identity: whole, whatever the engine
<output>/last                                     link to the newest draft
<output>/best/                                    the draft that decoded best
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import Tensor

from dominotree.draft.checkpoint import load_draft, save_draft
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError

from .engine import Engine

PREFIX = "update-"


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on: after `update`, with this optimizer state (None at the beginning)."""

    update: int = 0
    optimizer_state: Mapping[int, Mapping[str, Tensor]] | None = None


class Checkpoints:
    """Writes, finds and prunes the checkpoints of one run directory. A checkpoint appears whole or not at all."""

    def __init__(
        self, output: Path, *, keep_last: int, provenance: Mapping[str, Any], identity: Mapping[str, Any]
    ) -> None:
        """`identity`: by dotted name, what a run must have in common with the checkpoint that it resumes."""
        self._output = output
        self._folder = output / "checkpoints"
        self._keep_last = keep_last
        self._provenance = dict(provenance)
        self._identity = dict(identity)
        self._best = 0.0

    def restore(self, draft: DraftModel, *, resume: str) -> Resumed:
        """Load the newest checkpoint's weights, where there is one and `resume` is auto; tells where to go on.

        Raises UserError where the directory belongs to another run, or holds one that is not to be resumed.
        """
        found = self._all()
        if not found:
            return Resumed()
        if resume == "never":
            raise UserError(f"{self._output} holds a run already; resume=auto continues it, or give another output=")
        # Mapped: the processes of a machine share one copy.
        state = torch.load(found[-1] / "training.pt", map_location="cpu", weights_only=True, mmap=True)
        self._check_identity(state["identity"])
        draft.load_state_dict(load_draft(found[-1] / "draft", dtype="float32").state_dict())
        self._best = state["best"]
        return Resumed(int(state["update"]), state["optimizer"]["state"])

    def save(self, accelerator: Accelerator, engine: Engine, update: int) -> None:
        """Write the checkpoint of `update` and prune older ones. Raises UserError when the disk takes no more; the
        checkpoint before survives."""
        optimizer_state = engine.optimizer_state()
        problem: list[str | None] = [None]
        with engine.whole_draft() as draft:
            if accelerator.is_main_process:
                try:
                    self._write(draft, optimizer_state, update)
                except UserError as error:
                    problem = [str(error)]
        # All processes end alike where the main one could not write.
        if (message := broadcast_object_list(problem)[0]) is not None:
            raise UserError(message)

    def keep_best(self, accelerator: Accelerator, draft: DraftModel, update: int, score: float) -> None:
        """Keep the drafter under `best/` if it decoded better than any before."""
        if score > self._best:
            self._best = score
            if accelerator.is_main_process:
                with _telling(f"the best drafter, of update {update}, in {self._output}"):
                    self._write_draft(draft, self._output / "best", update)

    def _write(self, draft: DraftModel, optimizer_state: Mapping[int, Mapping[str, Tensor]], update: int) -> None:
        scratch = self._folder / f".{PREFIX}{update:08d}"
        state = {
            "update": update,
            "best": self._best,
            "identity": self._identity,
            "optimizer": {"state": optimizer_state},
        }
        try:
            with _telling(f"the checkpoint of update {update} in {self._folder}"):
                for litter in self._folder.glob(f".{PREFIX}*"):
                    shutil.rmtree(litter)
                scratch.mkdir(parents=True)
                self._write_draft(draft, scratch / "draft", update)
                torch.save(state, scratch / "training.pt")
                self._put_in_place(scratch, self._folder / f"{PREFIX}{update:08d}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _put_in_place(self, scratch: Path, final: Path) -> None:
        """The checkpoint appears, `last` turns to it, and the oldest goes."""
        shutil.rmtree(final, ignore_errors=True)
        scratch.rename(final)
        self._link_last(final / "draft")
        for old in self._all()[: -self._keep_last]:
            shutil.rmtree(old)

    def _link_last(self, draft: Path) -> None:
        link, fresh = self._output / "last", self._output / ".last"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(draft.relative_to(self._output), target_is_directory=True)
        os.replace(fresh, link)

    def _write_draft(self, draft: DraftModel, folder: Path, update: int) -> None:
        save_draft(draft, folder)
        provenance = self._provenance | {"update": update}
        (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")

    def _check_identity(self, stored: Mapping[str, Any]) -> None:
        for key, value in self._identity.items():
            if stored.get(key) != value:
                raise UserError(
                    f"{self._output} was trained with {key}={stored.get(key)}, this run says {value}; "
                    "give another output= to start anew"
                )

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob(f"{PREFIX}*")) if self._folder.is_dir() else []


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Raises UserError, naming `what` could not be saved, where the disk takes no more."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises the last
        raise UserError(f"cannot save {what}: {str(error).splitlines()[0]}; make room and run again") from error
