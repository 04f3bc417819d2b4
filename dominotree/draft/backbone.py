"""The DFlash backbone: Qwen3-style layers that draft a whole block in one pass (DFlash, section 3).

The target's fused features enter every layer as keys and values; queries come from the block alone.
Shapes: B batch, S context positions, C newly committed positions, Q block slots, H hidden, F target features
concatenated, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from .config import DraftConfig
from .masks import Attend

Rotation = tuple[Tensor, Tensor]  # cosines and sines, each [B, T, D]
KeysValues = tuple[Tensor, Tensor]  # each [B, kv_heads, T, D]


class ContextKV(Protocol):
    """Keys and values of the context, layer by layer; the block's own are appended for the one pass only."""

    def with_block(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues: ...


class FixedContext:
    """Context projected once for a training pass."""

    def __init__(self, layers: list[KeysValues]) -> None:
        self.layers = layers

    def with_block(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        context_keys, context_values = self.layers[layer]
        return torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)


class ExactRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary tables whose frequencies stay in float32 when the model is cast: in half precision the angles of far
    positions would be off by whole turns. (transformers recomputes the tables of classes named *RotaryEmbedding when it
    loads a model, which remote code relies on.)"""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExactRotaryEmbedding:
        frequencies = {name: buffer for name, buffer in self.named_buffers() if not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, exact in frequencies.items():
            setattr(self, name, exact.to(getattr(self, name).device))
        return self


class DraftAttention(nn.Module):
    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, inputs: Tensor, rotation: Rotation) -> KeysValues:  # inputs [B, T, H]
        """Keys and values of context features or block slots: the same projections serve both."""
        keys = rotate(self.k_norm(self._split_heads(self.k_proj(inputs))), rotation)
        return keys, self._split_heads(self.v_proj(inputs))

    def forward(
        self,
        hidden: Tensor,  # [B, Q, H]
        rotation: Rotation,
        context: ContextKV,
        attend: Attend,
    ) -> Tensor:  # [B, Q, H]
        queries = rotate(self.q_norm(self._split_heads(self.q_proj(hidden))), rotation)
        keys, values = context.with_block(self.layer, *self.keys_values(hidden, rotation))
        return self.o_proj(attend(queries, keys, values).transpose(1, 2).flatten(2))

    def _split_heads(self, projected: Tensor) -> Tensor:  # [B, T, heads*D] -> [B, heads, T, D]
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, layer)
        self.mlp = Qwen3MLP(config.to_qwen3())
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, rotation: Rotation, context: ContextKV, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, context, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashBackbone(nn.Module):
    """Weights under their published names: `fc`, `hidden_norm`, `layers.N.*`, `norm`."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = ExactRotaryEmbedding(config.to_qwen3())
        self.gradient_checkpointing = False  # recompute each layer in the backward pass instead of storing it

    def compile_parts(self) -> None:
        """Compile what does not depend on how blocks attend: the layers' MLPs and norms (torch.compile)."""
        for layer in self.layers:
            for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
                cast(nn.Module, part).compile(dynamic=True)

    def project_context(
        self,
        features: Tensor,  # [B, S, F] target features
        positions: Tensor,  # [B, S]
    ) -> list[KeysValues]:
        """Fuse the target's features and project them to every layer's keys and values."""
        fused = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        rotation = self.rotary_emb(fused, positions)
        return [cast(DraftLayer, layer).self_attn.keys_values(fused, rotation) for layer in self.layers]

    def forward(
        self,
        block_embeds: Tensor,  # [B, Q, H] embeddings of the anchor and the masks
        positions: Tensor,  # [B, Q]
        context: ContextKV,
        attends: list[Attend],  # one a layer: attention that keeps to who may see whom
    ) -> Tensor:  # [B, Q, H]
        hidden = block_embeds.to(self.fc.weight.dtype)
        rotation = self.rotary_emb(hidden, positions)
        for layer, attend in zip(self.layers, attends, strict=True):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, rotation, context, attend, use_reentrant=False)
            else:
                hidden = layer(hidden, rotation, context, attend)
        return self.norm(hidden)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:  # [B, heads, T, D]
    """Rotary position embedding in the half-split convention of Qwen3 and Llama."""
    cos, sin = (table[:, None] for table in rotation)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin
