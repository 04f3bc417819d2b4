"""Strict reading and writing of draft checkpoints in the published layout."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..dtypes import parse_dtype
from ..errors import UserError
from .backbone import ExactRotaryEmbedding
from .config import DraftConfig
from .layout import parse_config, render_config
from .model import DraftModel

if TYPE_CHECKING:
    from ..target import Target

HEAD_MODULES = ("prefix_gru.", "embed_proj.")
OLDER_PREFIXES = ("module.", "draft_model.", "model.", "logit_head.", "domino_head.")
CODE_FILES = ("config.py", "layout.py", "masks.py", "backbone.py", "head.py", "model.py", "modeling_dflash.py")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_draft(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    shift_label: bool | None = None,
) -> DraftModel:
    """Read a drafter from a directory or hub id, in evaluation mode, without gradients.

    `dtype` "auto" keeps the checkpoint's. `shift_label` states the alignment of a Domino checkpoint that does not.
    Raises UserError naming the file, key or tensor at fault: nothing is guessed, skipped or re-initialised.
    """
    directory = resolve_directory(path)
    config = _read_config(directory, shift_label)
    tensors = _rename(_read_tensors(directory), directory)
    with torch.device("meta"):
        draft = DraftModel(config)
    draft.directory = directory
    _check_tensors(draft, tensors, directory)
    draft.load_state_dict(tensors, strict=True, assign=True)
    # The rotary tables are computed, not stored, so the ones made on the meta device hold nothing.
    draft.backbone.rotary_emb = ExactRotaryEmbedding(config.to_qwen3())
    chosen = draft.dtype if dtype == "auto" else parse_dtype(dtype)
    return draft.to(device=device, dtype=chosen).eval().requires_grad_(False)


def save_draft(draft: DraftModel, path: str | Path) -> None:
    """Write `draft` as a directory that the public tools, and `AutoModel` with remote code, open unchanged.

    The directory appears whole or not at all; one that is already there is replaced.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        raw = render_config(draft.config, str(draft.dtype).removeprefix("torch."))
        (fresh / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        for name in CODE_FILES:
            shutil.copyfile(Path(__file__).with_name(name), fresh / name)
        save_torch_state_dict(published_state(draft), str(fresh))
        _put_in_place(fresh, path, aside=Path(scratch) / "replaced")


def _put_in_place(fresh: Path, path: Path, aside: Path) -> None:
    """Rename `fresh` to `path`; what stood there is set aside first, and put back should that fail."""
    if not path.exists():
        fresh.rename(path)
        return
    path.rename(aside)
    try:
        fresh.rename(path)
    except OSError:
        aside.rename(path)
        raise


def published_state(draft: DraftModel) -> dict[str, Tensor]:
    """The weights under their published, flat names."""
    parts = draft.state_dict()
    return {key.removeprefix("backbone.").removeprefix("head."): tensor for key, tensor in parts.items()}


def resolve_directory(path: str | Path) -> Path:
    """A directory as it is, a hub id downloaded to the Hugging Face cache."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise UserError(f"a draft checkpoint is a directory or a hub id, got the file {path}")
    if directory.is_absolute() or str(path).count("/") != 1 or str(path).startswith("."):
        raise UserError(f"no draft checkpoint at {path}: no such directory")
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"no draft checkpoint at {path}: no such directory, and the hub gave {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{file.parent} is no draft checkpoint: it has no {file.name}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def _read_config(directory: Path, shift_label: bool | None) -> DraftConfig:
    raw = _read_json(directory / "config.json")
    try:
        return parse_config(raw, shift_label=shift_label)
    except ValueError as error:
        raise UserError(f"{directory / 'config.json'}: {error}") from error


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    if (directory / INDEX).is_file():
        weight_map = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{directory / INDEX} must hold a weight_map from tensors to files, got {weight_map!r}")
        files = sorted({directory / str(name) for name in weight_map.values()})
    else:
        files = [directory / WEIGHTS]
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{directory} is no complete draft checkpoint: it has no {file.name}")
        try:
            shard = load_file(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read, it may be cut short: {_first_line(error)}") from error
        for key in tensors.keys() & shard.keys():
            raise UserError(f"{directory} holds tensor {key} twice, in {file.name} and in an earlier shard")
        tensors |= shard
    return tensors


def _rename(tensors: Mapping[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Published flat names, and older ones with a container in front, to the module tree's."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key
        while name.startswith(OLDER_PREFIXES):
            name = name.partition(".")[2]
        name = ("head." if name.startswith(HEAD_MODULES) else "backbone.") + name
        if name in renamed:
            raise UserError(f"{directory} holds tensor {key} twice, under an older name too")
        renamed[name] = tensor
    return renamed


def _check_tensors(draft: DraftModel, tensors: Mapping[str, Tensor], directory: Path) -> None:
    expected = {key: tensor.shape for key, tensor in draft.state_dict().items()}
    problems = [f"{_flat(key)} is missing" for key in expected if key not in tensors]
    problems += [f"{_flat(key)} is not part of this architecture" for key in tensors if key not in expected]
    problems += [
        f"{_flat(key)} has shape {list(tensors[key].shape)}, the configuration asks for {list(shape)}"
        for key, shape in expected.items()
        if key in tensors and tensors[key].shape != shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(f"{directory}: {'; '.join(problems[:3])}{more}")


def _flat(key: str) -> str:
    return key.partition(".")[2]


def check_fits(draft: DraftModel, target: Target) -> None:
    """Raises UserError, with both values, when `draft` was not made for a target like this one."""
    config = draft.config
    pairs = (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
    )
    for name, drafted, offered in pairs:
        if drafted != offered:
            raise UserError(f"the drafter does not fit the target: its {name} is {drafted}, the target's {offered}")
    rows = target.model.get_input_embeddings().weight.shape[0]
    if config.mask_token_id >= rows:
        raise UserError(
            f"the drafter does not fit the target: its mask token id {config.mask_token_id} is outside the target's "
            f"{rows} embeddings"
        )
