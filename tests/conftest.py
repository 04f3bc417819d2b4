"""Tiny random models that every test can afford, and the reference values where they lie beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from dominotree.draft.config import DraftConfig, HeadConfig
from dominotree.draft.fresh import fresh_draft
from dominotree.draft.model import DraftModel, initialize
from dominotree.target import Target

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference"

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {}),
    "qwen3_sliding": (Qwen3Config, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral_sliding": (MistralConfig, {"sliding_window": 7}),
    "gemma": (GemmaConfig, {}),
    "gemma2": (Gemma2Config, {"sliding_window": 6, "attn_logit_softcapping": None}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 6, "sliding_window_pattern": 2}),
}


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    """Tiny matrices are slower on many threads."""
    torch.set_num_threads(1)


def make_target(family: str = "qwen3", *, vocab_size: int = 13, tied: bool = False, seed: int = 0) -> Target:
    """A random target. Weights are spread wide enough that its greedy output is neither constant nor a near-tie."""
    embedding_spread = 0.1 if "gemma" in family or tied else 1.0
    config_class, options = FAMILIES[family]
    config = config_class(vocab_size=vocab_size, tie_word_embeddings=tied, **SIZES, **options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, embedding_spread if "embed" in name else 0.5)
    return Target(model)


def make_draft(target: Target, **options: Any) -> DraftModel:
    """A random drafter; a tiny vocabulary makes some of its drafts right."""
    defaults: dict[str, Any] = {"seed": 1, "block_size": 6, "num_features": 3, "gru_hidden_dim": 12, "emb_dim": 8}
    draft = fresh_draft(target, **(defaults | options))
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() == 2:
                weight.mul_(10.0)  # or the correction would be too weak to change any tree
    return draft


def small_config(**options: Any) -> DraftConfig:
    """A Domino drafter's configuration for the targets of `make_target`; `options` replace its values."""
    defaults: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 13,
        "block_size": 4,
        "mask_token_id": 12,
        "target_layer_ids": (0, 2, 3),
        "num_target_layers": 4,
        "shift_label": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "head": HeadConfig(gru_hidden_dim=10, emb_dim=6),
    }
    return DraftConfig(**(defaults | options))


def small_draft(*, seed: int = 0, **options: Any) -> DraftModel:
    """A random drafter without a target, all its weights wide and none of its norms one."""
    draft = DraftModel(small_config(**options))
    generator = torch.Generator().manual_seed(seed)
    initialize(draft, generator)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.normal_(1.0, 0.2, generator=generator) if weight.dim() == 1 else weight.mul_(10.0)
    return draft.eval().requires_grad_(False)


def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """The target's own plain greedy continuation, by transformers."""
    ids = torch.tensor([prompt])
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def reference() -> Path:
    if not REFERENCE.is_dir():
        pytest.skip("the reference values are not beside this checkout")
    return REFERENCE


@pytest.fixture(scope="session")
def reference_expected(reference: Path) -> dict[str, Any]:
    return json.loads((reference / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def reference_target(reference: Path) -> Target:
    return Target.load(reference / "target")
