"""Configuration of a draft model.

This file, like the others that `checkpoint.CODE_FILES` names, is copied into every saved draft directory, so that
`AutoModel.from_pretrained(path, trust_remote_code=True)` works without this package. It may therefore import nothing of
ours but those neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class HeadConfig:
    """Shape of the Domino head (Domino, section 3): GRU state G, low rank R, uncorrected leading drafts."""

    gru_hidden_dim: int
    emb_dim: int
    pure_draft_prefix_len: int


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash backbone and, where `head` is not None, the Domino head on top of it.

    Raises ValueError when made with values that contradict each other; the message states the rule and the value.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    shift_label: bool
    rope_parameters: Mapping[str, Any]
    head: HeadConfig | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    hidden_act: str = "silu"
    attention_bias: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        self._check_sizes()
        self._check_layers()
        self._check_head()

    @property
    def draft_length(self) -> int:
        """Tokens drafted a round: with `shift_label` the anchor's own slot predicts too, without it does not."""
        return self.block_size if self.shift_label else self.block_size - 1

    @property
    def uncorrected_length(self) -> int:
        """How many leading drafts keep their base logits: all of them where there is no head."""
        return self.draft_length if self.head is None else self.head.pure_draft_prefix_len

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, None for full attention."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def causal(self, layer: int) -> bool:
        """Whether slots of a block see only earlier slots: as stated, else on sliding layers only (SGLang's rule)."""
        return self.layer_types[layer] == "sliding_attention" if self.is_causal is None else self.is_causal

    def _check_sizes(self) -> None:
        positive = (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        )
        for name in positive:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if not isinstance(self.block_size, int) or self.block_size < 2:
            raise ValueError(
                f"block_size must be an integer of at least 2 (an anchor and a mask), got {self.block_size!r}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, for the rotary embedding turns pairs; got {self.head_dim}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be an activation that transformers knows, got {self.hidden_act!r}")
        rope_type = self.rope_parameters.get("rope_type")
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rope_type must be default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}; got {rope_type!r}")
        if not isinstance(self.mask_token_id, int) or self.mask_token_id < 0:
            raise ValueError(f"mask_token_id must be a token id, got {self.mask_token_id!r}")

    def _check_layers(self) -> None:
        if any(not isinstance(kind, str) for kind in self.layer_types):
            raise ValueError(f"layer_types must be a list of names, got {list(self.layer_types)}")
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - set(LAYER_TYPES):
            raise ValueError(
                f"layer_types must name {self.num_hidden_layers} layers, each one of {', '.join(LAYER_TYPES)}; "
                f"got {list(self.layer_types)}"
            )
        if "sliding_attention" in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"sliding_attention layers need a positive sliding_window, got {self.sliding_window!r}")
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids must name at least one target layer, got none")
        for layer in self.target_layer_ids:
            if not 0 <= layer < self.num_target_layers:
                raise ValueError(
                    f"target_layer_ids must lie in 0..{self.num_target_layers - 1} (num_target_layers is "
                    f"{self.num_target_layers}), got {list(self.target_layer_ids)}"
                )

    def _check_head(self) -> None:
        if self.head is None:
            return
        for name in ("gru_hidden_dim", "emb_dim"):
            value = getattr(self.head, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not 0 <= self.head.pure_draft_prefix_len <= self.draft_length:
            raise ValueError(
                f"pure_draft_prefix_len must lie in 0..{self.draft_length} (the tokens drafted a round), "
                f"got {self.head.pure_draft_prefix_len}"
            )

    def to_qwen3(self) -> Qwen3Config:
        """The same sizes as transformers' Qwen3 layers want them."""
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            hidden_act=self.hidden_act,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),
            attention_bias=self.attention_bias,
        )


def build_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Which target layers feed the drafter (DFlash, section 3): `count` of them, evenly from layer 1 to layer L-3.

    A target too shallow for that span is covered from its first to its last layer instead.
    """
    first, last = 1, num_target_layers - 3
    if count == 1:
        return (num_target_layers // 2,)
    if last - first < count - 1:
        first, last, count = 0, num_target_layers - 1, min(count, num_target_layers)
    step = (last - first) / max(1, count - 1)
    return tuple(round(first + index * step) for index in range(count))
