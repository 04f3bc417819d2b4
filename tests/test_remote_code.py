"""A saved drafter opens with `AutoModel` and remote code, on a machine that does not have this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_config, small_draft
from torch import Tensor
from torch.nn.functional import embedding
from transformers import Qwen3Config

from dominotree.draft.backbone import FixedContext
from dominotree.draft.checkpoint import load_draft, published_state, save_draft
from dominotree.draft.config import DraftConfig
from dominotree.draft.layout import render_config
from dominotree.draft.model import DraftModel
from dominotree.draft.modeling_dflash import DFlashDraftModel

# Runs where importing this package fails. Leaves what it found in a file, and the drafters saved again in bfloat16.
STRANGER = """
import sys
sys.modules["dominotree"] = None
import torch
from transformers import AutoModel

inputs = torch.load("inputs.pt")
found = {}
for name in ("domino", "dflash"):
    model, info = AutoModel.from_pretrained(name, trust_remote_code=True, output_loading_info=True)
    found[name] = {"info": {key: sorted(map(str, value)) for key, value in info.items() if value}}
    found[name]["training"] = model.training
    found[name]["weights"] = model.state_dict()
    found[name]["hidden"] = model(inputs["anchors"], inputs["features"], lambda ids: inputs["embeddings"][ids])
    if model.head is not None:
        found[name]["state"] = model.head.advance(inputs["token"], inputs["state"])
        found[name]["correction"] = model.head.correction(inputs["hidden"], inputs["state"])
    model.to(torch.bfloat16).save_pretrained("again_" + name)
    half = AutoModel.from_pretrained(name, trust_remote_code=True, dtype=torch.bfloat16)
    found[name]["half_hidden"] = half(inputs["anchors"], inputs["features"], lambda ids: inputs["embeddings"][ids])
torch.save(found, "found.pt")
try:
    import dominotree
except ImportError:
    print("on its own")
"""

INPUTS: dict[str, Tensor] = {
    "anchors": torch.tensor([3, 7]),
    "features": torch.linspace(-2, 2, 2 * 9 * 96).sin().view(2, 9, 96),
    "embeddings": torch.linspace(0, 40, 13 * 32).cos().view(13, 32),
    "token": torch.linspace(-1, 1, 2 * 32).view(2, 32),
    "state": torch.linspace(-1, 1, 2 * 10).view(2, 10),
    "hidden": torch.linspace(1, -1, 2 * 32).view(2, 32),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "domino": {
        "layer_types": ("full_attention", "sliding_attention"),
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
        },
    },
    "dflash": {"head": None, "shift_label": False, "attention_bias": True, "is_causal": True},
}


def block_hidden(draft: DraftModel) -> Tensor:
    """What the library drafts for the block behind `INPUTS`."""
    features = INPUTS["features"]
    context = FixedContext(draft.backbone.project_context(features, torch.arange(9)[None]))
    return draft.draft_hidden(
        INPUTS["anchors"], torch.tensor([9, 9]), lambda ids: embedding(ids, INPUTS["embeddings"]), context, 9
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """What a stranger with nothing but transformers finds in two saved drafters, and where it worked."""
    here = tmp_path_factory.mktemp("stranger")
    for name, options in VARIANTS.items():
        save_draft(small_draft(**options), here / name)
    torch.save(INPUTS, here / "inputs.pt")
    environment = os.environ | {"HF_HOME": str(here / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", STRANGER], cwd=here, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "on its own" in done.stdout, done.stderr
    return here, torch.load(here / "found.pt")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_stranger_finds_every_weight_and_no_other(found: tuple[Path, dict[str, dict[str, Any]]], name: str) -> None:
    there = found[1][name]
    assert there["info"] == {}  # nothing missing, unexpected or of another shape
    assert not there["training"]
    own = published_state(small_draft(**VARIANTS[name]))
    assert there["weights"].keys() == own.keys()
    for key, weight in own.items():
        assert torch.equal(there["weights"][key], weight)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_stranger_drafts_the_same_hidden_states(found: tuple[Path, dict[str, dict[str, Any]]], name: str) -> None:
    there, draft = found[1][name], small_draft(**VARIANTS[name])
    torch.testing.assert_close(there["hidden"], block_hidden(draft), rtol=1e-6, atol=1e-6)
    assert there["half_hidden"].dtype == torch.bfloat16
    torch.testing.assert_close(there["half_hidden"].float(), block_hidden(draft), rtol=0.1, atol=0.2)


def test_a_stranger_s_head_steps_and_corrects_alike(found: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    there, head = found[1]["domino"], small_draft(**VARIANTS["domino"]).head
    assert head is not None
    torch.testing.assert_close(there["state"], head.advance(INPUTS["token"], INPUTS["state"]), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        there["correction"], head.correction(INPUTS["hidden"], INPUTS["state"]), rtol=1e-6, atol=1e-6
    )
    assert "state" not in found[1]["dflash"]


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_stranger_saves_again_is_still_a_checkpoint(
    found: tuple[Path, dict[str, dict[str, Any]]], name: str
) -> None:
    own, again = load_draft(found[0] / name), load_draft(found[0] / f"again_{name}")
    assert again.dtype == torch.bfloat16
    assert again.config == own.config
    for key, weight in own.state_dict().items():
        assert torch.equal(again.state_dict()[key], weight.bfloat16())


def as_transformers_sees(config: DraftConfig) -> DFlashDraftModel:
    """The remote class on the configuration as transformers reads it from the saved file."""
    return DFlashDraftModel(Qwen3Config(**render_config(config, "float32")))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head": None, "shift_label": False},
        {"shift_label": False, "attention_bias": True},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3},
        {"is_causal": True},
        {"is_causal": False, "layer_types": ("sliding_attention",) * 2, "sliding_window": 3},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "max_position_embeddings": 77, "initializer_range": 0.5},
    ],
)
def test_transformers_passes_the_whole_configuration_on(options: dict[str, Any]) -> None:
    config = small_config(**options)
    assert as_transformers_sees(config).draft.config == config


def test_a_new_remote_model_starts_from_the_published_initialisation() -> None:
    model = as_transformers_sees(small_config(hidden_size=128, intermediate_size=128, initializer_range=0.02))
    weights = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
    for name, weight in weights.items():
        if "prefix_gru" in name:
            assert 0.9 * 10**-0.5 < weight.abs().max() <= 10**-0.5
        elif weight.numel() > 2000:
            assert 0.019 < weight.std() < 0.021
    assert torch.equal(model.state_dict()["norm.weight"], torch.ones(128))
