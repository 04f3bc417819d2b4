"""The DFlash backbone: Qwen3 layers whose keys and values also come from the target's features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import small_draft
from torch import Tensor
from transformers import Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from dominotree.draft.backbone import DFlashBackbone, FixedContext, rotate
from dominotree.draft.masks import AnchorBlocks, anchor_block_rule, attend_by_mask, attend_densely
from dominotree.draft.model import DraftModel, initialize

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(backbone: DFlashBackbone, block: Tensor, features: Tensor, start: int = 0) -> Tensor:
    """A block behind all of `features`, nothing hidden; the first feature stands at position `start`."""
    length = features.shape[1]
    context = FixedContext(backbone.project_context(features, torch.arange(start, start + length)[None]))
    positions = torch.arange(start + length, start + length + block.shape[1])[None]
    return backbone(block, positions, context, [attend_by_mask(None)] * len(backbone.layers))


@pytest.mark.parametrize("options", [{}, {"attention_bias": True}, {"rope_parameters": YARN}, {"hidden_act": "gelu"}])
def test_without_features_and_causal_it_is_a_qwen3_model(options: dict[str, Any]) -> None:
    """Transformers' own Qwen3 on the same weights."""
    draft = small_draft(**options)
    config = Qwen3Config(
        vocab_size=1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        hidden_act=options.get("hidden_act", "silu"),
        attention_bias=options.get("attention_bias", False),
        rope_parameters=options.get("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
    )
    model = Qwen3Model(config).eval()
    weights = draft.backbone.state_dict()
    shared = {key: weights[key] for key in weights if not key.startswith(("fc.", "hidden_norm."))}
    report = model.load_state_dict(shared, strict=False)
    assert report.unexpected_keys == [] and report.missing_keys == ["embed_tokens.weight"]
    block, positions = noise(2, 6, 32), torch.arange(6)[None]
    empty = FixedContext(draft.backbone.project_context(torch.zeros(2, 0, 96), positions[:, :0]))
    anchors = torch.zeros(2, 1, dtype=torch.int64)
    blocks = AnchorBlocks(anchors, anchors, torch.ones(2, 1, dtype=torch.bool), 0, 6)
    attend = attend_densely(anchor_block_rule(blocks, causal=True), blocks)
    with torch.no_grad():
        expected = model(inputs_embeds=block, use_cache=False).last_hidden_state
        hidden = draft.backbone(block, positions, empty, [attend, attend])
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)


def rms_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return weight * hidden / (hidden.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


def by_hand(backbone: DFlashBackbone, block: Tensor, features: Tensor) -> Tensor:
    """One sequence through the published equations, head by head (DFlash, section 3)."""
    weights = backbone.state_dict()
    length, size = features.shape[0], block.shape[0]
    fused = rms_norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    frequencies = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    angles = (torch.arange(length + size)[:, None] * frequencies).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def rotated(heads: Tensor, at: slice) -> Tensor:
        return heads * cos[at] + torch.cat([-heads[:, 4:], heads[:, :4]], dim=-1) * sin[at]

    for layer in range(len(backbone.layers)):
        part = {key.removeprefix(f"layers.{layer}."): weights[key] for key in weights if f"layers.{layer}." in key}
        normed = rms_norm(block, part["input_layernorm.weight"])
        inputs = torch.cat([fused, normed])  # keys and values: context first, then the block
        mixed = []
        for head in range(4):
            query_rows, shared_rows = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
            query = rms_norm(normed @ part["self_attn.q_proj.weight"][query_rows].T, part["self_attn.q_norm.weight"])
            key = rms_norm(inputs @ part["self_attn.k_proj.weight"][shared_rows].T, part["self_attn.k_norm.weight"])
            value = inputs @ part["self_attn.v_proj.weight"][shared_rows].T
            scores = rotated(query, slice(length, None)) @ rotated(key, slice(None)).T / 8**0.5
            mixed.append(scores.softmax(dim=-1) @ value)
        block = block + torch.cat(mixed, dim=-1) @ part["self_attn.o_proj.weight"].T
        normed = rms_norm(block, part["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(normed @ part["mlp.gate_proj.weight"].T)
        block = block + (gate * (normed @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
    return rms_norm(block, weights["norm.weight"])


def test_features_enter_every_layer_as_the_paper_says() -> None:
    backbone = small_draft().backbone
    block, features = noise(2, 4, 32), noise(2, 7, 96, seed=4)
    hidden = run(backbone, block, features)
    for row in range(2):
        torch.testing.assert_close(hidden[row], by_hand(backbone, block[row], features[row]), rtol=1e-4, atol=1e-5)


def test_only_distances_matter() -> None:
    backbone = small_draft().backbone
    block, features = noise(1, 4, 32), noise(1, 7, 96, seed=4)
    torch.testing.assert_close(
        run(backbone, block, features, start=300), run(backbone, block, features), rtol=1e-3, atol=1e-4
    )


def test_a_block_is_bidirectional() -> None:
    backbone = small_draft().backbone
    block, features = noise(1, 4, 32), noise(1, 7, 96, seed=4)
    before, changed = run(backbone, block, features), block.clone()
    changed[0, 3] += 1.0
    assert (run(backbone, changed, features)[0, 0] - before[0, 0]).abs().max() > 1e-3


def test_features_and_embeddings_of_another_dtype_are_cast_once() -> None:
    backbone = small_draft().backbone
    block, features = noise(1, 4, 32).bfloat16(), noise(1, 7, 96, seed=4).bfloat16()
    hidden = run(backbone, block, features)
    assert hidden.dtype == torch.float32
    assert torch.equal(hidden, run(backbone, block.float(), features.float()))
    half = run(small_draft().bfloat16().backbone, block.float(), features.float())
    assert half.dtype == torch.bfloat16


def test_rotation_is_transformers_own() -> None:
    heads, angles = noise(2, 4, 5, 8), noise(2, 5, 4, seed=4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    expected = apply_rotary_pos_emb(heads, heads, cos, sin)[0]
    torch.testing.assert_close(rotate(heads, (cos, sin)), expected, rtol=0, atol=1e-6)


def test_initialisation_is_the_published_one_and_reproducible() -> None:
    config = small_draft(hidden_size=128, intermediate_size=128, initializer_range=0.05, attention_bias=True).config
    drafts = [DraftModel(config) for _ in range(3)]
    for draft, seed in zip(drafts, (7, 7, 8), strict=True):
        initialize(draft, torch.Generator().manual_seed(seed))
    first, again, other = (draft.state_dict() for draft in drafts)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first if first[key].dim() == 2)
    for key, weight in first.items():
        if key.endswith("bias"):
            assert not weight.any()
        elif "prefix_gru" in key:
            assert 0.9 * 10**-0.5 < weight.abs().max() <= 10**-0.5  # U(-1/sqrt(G), 1/sqrt(G)), G = 10
        elif weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight))
        elif weight.numel() > 2000:
            assert 0.047 < weight.std() < 0.053 and abs(weight.mean()) < 0.005
