"""Draft checkpoints: read and written bit for bit, and whatever is wrong with one is named in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from conftest import small_draft
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import dominotree.draft.checkpoint as checkpoint
from dominotree.draft.checkpoint import load_draft, published_state, save_draft
from dominotree.draft.layout import render_config
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError

DRAFTERS = ["draft_dflash", "draft_shift_p0", "draft_shift_p1", "draft_noshift_p0", "draft_noshift_p1"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A two-layer Domino drafter on disk."""
    save_draft(small_draft(), tmp_path / "draft")
    return tmp_path / "draft"


def equal_states(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


def refusal(path: str | Path, **options: Any) -> str:
    """The one line that refuses to load `path`."""
    with pytest.raises(UserError) as caught:
        load_draft(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace the tensors of a saved drafter."""
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file)


def edit_config(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    draft = small_draft().to(dtype)
    save_draft(draft, tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft")
    assert loaded.config == draft.config
    assert loaded.dtype == dtype
    assert equal_states(loaded.state_dict(), draft.state_dict())
    assert not loaded.training and not any(weight.requires_grad for weight in loaded.parameters())


def test_a_loaded_drafter_is_cast_only_on_request(saved: Path) -> None:
    assert load_draft(saved).dtype == torch.float32
    cast = load_draft(saved, dtype="bfloat16")
    assert {weight.dtype for weight in cast.parameters()} == {torch.bfloat16}
    assert torch.equal(cast.backbone.fc.weight, small_draft().backbone.fc.weight.bfloat16())
    assert load_draft(saved, dtype=torch.float16).dtype == torch.float16
    assert "int8" in refusal(saved, dtype="int8")


def test_rotary_angles_stay_exact_in_half_precision(tmp_path: Path) -> None:
    draft = small_draft(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e6}).bfloat16()
    save_draft(draft, tmp_path / "draft")
    backbone = load_draft(tmp_path / "draft").backbone
    config = Qwen3Config(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    positions = torch.tensor([[0, 1, 500, 4095, 30000]])
    like = torch.zeros(1, dtype=torch.bfloat16)
    for ours, theirs in zip(
        backbone.rotary_emb(like, positions), Qwen3RotaryEmbedding(config)(like, positions), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_loaded_drafter_drafts_as_the_saved_one(saved: Path) -> None:
    draft, loaded = small_draft(), load_draft(saved)
    features, positions = torch.randn(1, 5, 96), torch.arange(5)[None]
    for (keys, values), (expected_keys, expected_values) in zip(
        loaded.backbone.project_context(features, positions),
        draft.backbone.project_context(features, positions),
        strict=True,
    ):
        assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


@pytest.mark.parametrize("with_head", [True, False])
def test_exactly_the_official_tensor_names_are_saved(tmp_path: Path, with_head: bool) -> None:
    draft = small_draft() if with_head else small_draft(head=None, shift_label=False)
    save_draft(draft, tmp_path / "draft")
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for layer in (0, 1):
        parts = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
        parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
        expected |= {f"layers.{layer}.{part}.weight" for part in parts}
    if with_head:
        expected |= {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"}
        expected |= {"embed_proj.0.weight", "embed_proj.2.weight"}
    assert set(load_file(tmp_path / "draft" / "model.safetensors")) == expected


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_reference_drafters_are_loaded_and_saved_to_the_same_tensors(
    reference: Path, tmp_path: Path, name: str
) -> None:
    draft = load_draft(reference / name)
    assert draft.config.shift_label is ("_shift" in name)
    assert (draft.head is None) is (name == "draft_dflash")
    assert draft.config.head is None or draft.config.head.pure_draft_prefix_len == int(name[-1])
    save_draft(draft, tmp_path / "again")
    published = load_file(reference / name / "model.safetensors")
    assert equal_states(load_file(tmp_path / "again" / "model.safetensors"), published)
    assert load_draft(tmp_path / "again").config == draft.config


def test_a_missing_tensor_is_named(saved: Path) -> None:
    rewrite(saved, lambda tensors: {key: tensors[key] for key in tensors if key != "embed_proj.2.weight"})
    message = refusal(saved)
    assert "embed_proj.2.weight is missing" in message and str(saved) in message


def test_an_extra_tensor_is_named(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors | {"lm_head.weight": torch.zeros(13, 32)})
    assert "lm_head.weight" in refusal(saved)


def test_a_head_under_a_headless_configuration_is_named(saved: Path) -> None:
    raw = render_config(small_draft(head=None).config, "float32")
    (saved / "config.json").write_text(json.dumps(raw))
    message = refusal(saved)
    assert "prefix_gru." in message and "embed_proj." in message


def test_a_tensor_of_another_shape_is_named_with_both_shapes(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors | {"fc.weight": torch.zeros(32, 64)})
    message = refusal(saved)
    assert "fc.weight" in message and "[32, 64]" in message and "[32, 96]" in message


def test_a_configuration_of_other_sizes_is_refused(saved: Path) -> None:
    edit_config(saved, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert "layers.2." in refusal(saved)


def test_a_file_cut_short_is_named(saved: Path) -> None:
    file = saved / "model.safetensors"
    for size in (file.stat().st_size - 100, 20, 0):
        os.truncate(file, size)
        assert str(file) in refusal(saved)


def test_a_configuration_that_cannot_be_read_is_named(saved: Path) -> None:
    file = saved / "config.json"
    for content in (b'{"architectures": [', b"[1, 2]", b"\xff\xfe", b""):
        file.write_bytes(content)
        assert str(file) in refusal(saved)


def test_a_configuration_that_contradicts_itself_is_named_with_its_file(saved: Path) -> None:
    edit_config(saved, block_size=1)
    message = refusal(saved)
    assert str(saved / "config.json") in message and "block_size" in message


def test_an_alignment_the_checkpoint_does_not_state_is_asked_for(saved: Path) -> None:
    section = json.loads((saved / "config.json").read_text())["dflash_config"]
    del section["shift_label"]
    edit_config(saved, dflash_config=section)
    assert "shift_label" in refusal(saved)
    assert load_draft(saved, shift_label=False).config.draft_length == 3
    assert load_draft(saved, shift_label=True).config.draft_length == 4


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_directory_without_its_files_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    message = refusal(saved)
    assert str(saved) in message and name in message


def test_a_path_that_is_no_directory_is_named(saved: Path, tmp_path: Path) -> None:
    file = saved / "model.safetensors"
    assert str(file) in refusal(file)
    for path in (tmp_path / "nothing", "./nothing/here", "nothing", "a/b/c", "~/nothing-here"):
        assert str(path) in refusal(path)


def test_a_hub_id_that_is_not_cached_offline_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert "someone/Some-Draft" in refusal("someone/Some-Draft")
    assert "some one/Draft" in refusal("some one/Draft")


def test_a_hub_id_is_read_from_the_hub_s_cache(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--someone--Some-Draft"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    saved.rename(repository / "snapshots" / ("0" * 40))
    assert equal_states(load_draft("someone/Some-Draft").state_dict(), small_draft().state_dict())


def older_names(prefix: str, head_prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        heads = ("prefix_gru.", "embed_proj.")
        return {prefix + (head_prefix if key.startswith(heads) else "") + key: tensors[key] for key in tensors}

    return rename


@pytest.mark.parametrize(
    ("prefix", "head_prefix"),
    [("", "logit_head."), ("", "domino_head."), ("model.", ""), ("module.", "logit_head."), ("module.model.", "")],
)
def test_older_tensor_names_are_read(saved: Path, prefix: str, head_prefix: str) -> None:
    rewrite(saved, older_names(prefix, head_prefix))
    assert equal_states(load_draft(saved).state_dict(), small_draft().state_dict())


def test_a_tensor_under_two_names_is_refused(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors | {"domino_head.embed_proj.2.weight": torch.zeros(13, 6)})
    message = refusal(saved)
    assert "embed_proj.2.weight" in message and "twice" in message


def shard(directory: Path) -> list[Path]:
    """Cut the weights of a saved drafter into several files, as the hub's tools do."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    save_torch_state_dict(tensors, str(directory), max_shard_size=12000)
    return sorted(directory.glob("model-*.safetensors"))


def test_sharded_weights_are_read(saved: Path) -> None:
    assert len(shard(saved)) > 2
    assert equal_states(load_draft(saved).state_dict(), small_draft().state_dict())


def test_a_missing_shard_is_named(saved: Path) -> None:
    gone = shard(saved)[1]
    gone.unlink()
    assert gone.name in refusal(saved)


def test_a_tensor_in_two_shards_is_refused(saved: Path) -> None:
    first, second = shard(saved)[:2]
    name = next(iter(load_file(first)))
    tensors = load_file(second)
    save_file(tensors | {name: torch.zeros_like(load_file(first)[name])}, second)
    assert name in refusal(saved)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": []}', "[]"])
def test_a_broken_shard_index_is_refused(saved: Path, content: str) -> None:
    shard(saved)
    (saved / "model.safetensors.index.json").write_text(content)
    assert str(saved) in refusal(saved)


def test_saving_replaces_a_directory_whole(saved: Path) -> None:
    (saved / "leftover.txt").write_text("from an earlier save")
    other = small_draft(seed=5, head=None, shift_label=False)
    save_draft(other, saved)
    assert equal_states(load_draft(saved).state_dict(), other.state_dict())
    assert not (saved / "leftover.txt").exists()
    assert [entry.name for entry in saved.parent.iterdir()] == ["draft"]


def test_saving_makes_the_parent_directories(tmp_path: Path) -> None:
    save_draft(small_draft(), tmp_path / "runs" / "one" / "draft")
    assert equal_states(load_draft(tmp_path / "runs" / "one" / "draft").state_dict(), small_draft().state_dict())


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "save_torch_state_dict", full_disk)
    with pytest.raises((OSError, UserError), match="No space left"):
        save_draft(small_draft(), tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_keeps_the_directory_that_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "save_torch_state_dict", full_disk)
    with pytest.raises((OSError, UserError), match="No space left"):
        save_draft(small_draft(seed=5), saved)
    assert equal_states(load_draft(saved).state_dict(), small_draft().state_dict())


@pytest.mark.parametrize("failing_call", [0, 1])
def test_a_replacement_that_fails_keeps_the_directory_that_was_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    rename, calls = os.rename, iter(range(100))

    def failing_rename(*args: Any, **kwargs: Any) -> None:
        if next(calls) == failing_call:
            full_disk()
        rename(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises((OSError, UserError), match="No space left"):
        patch.setattr(os, "rename", failing_rename)
        save_draft(small_draft(seed=5), saved)
    assert equal_states(load_draft(saved).state_dict(), small_draft().state_dict())


def test_published_names_carry_no_container(saved: Path) -> None:
    draft: DraftModel = small_draft()
    assert equal_states(published_state(draft), load_file(saved / "model.safetensors"))
