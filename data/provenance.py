"""What a data directory was made from: the target by its numbers, the versions, the revision of the code."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dominotree.errors import UserError
from dominotree.identity import weights_fingerprint
from dominotree.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGES = ("torch", "transformers", "datasets", "dominotree")


def target_fingerprint(target: Target) -> str:
    """Tells targets apart, see `weights_fingerprint`."""
    return weights_fingerprint(target.model)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Tells tokenizers apart: how they cut text, and their chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.blake2b(f"{rules}\n{tokenizer.chat_template}".encode(), digest_size=16).hexdigest()


def versions() -> dict[str, str | None]:
    """Python, the libraries that matter, and the checkout's revision (None outside one)."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {"git_revision": _git_revision()}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file whole. Raises UserError where the disk takes no more; the old file survives."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error}; make room and run again") from error


def _git_revision() -> str | None:
    command = ["git", "describe", "--always", "--dirty=+changes", "--abbrev=12"]
    try:
        root = Path(__file__).resolve().parents[1]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
