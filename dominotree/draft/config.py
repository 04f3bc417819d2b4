"""Configuration of a draft model, read from and written to the published `config.json` layout.

This file, like its neighbours `masks`, `backbone`, `head`, `model` and `modeling_dflash`, is copied into every saved
draft directory so that `AutoModel.from_pretrained(path, trust_remote_code=True)` works without this package. It may
therefore import nothing of ours but those neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config

ARCHITECTURES = ("DFlashDraftModel", "DominoDraftModel")
DOMINO_PROJECTORS = ("domino", "causal_v5")
LAYER_TYPES = ("full_attention", "sliding_attention")
UNSUPPORTED_OPTIONS = ("use_bias_gate", "use_bias_norm")


@dataclass(frozen=True)
class HeadConfig:
    """Shape of the Domino head (Domino, section 3): GRU state G, low rank R, uncorrected leading drafts."""

    gru_hidden_dim: int
    emb_dim: int
    pure_draft_prefix_len: int = 1


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
        if not isinstance(self.mask_token_id, int) or self.mask_token_id < 0:
            raise ValueError(f"mask_token_id must be a token id, got {self.mask_token_id!r}")

    def _check_layers(self) -> None:
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


def parse_config(raw: Mapping[str, Any], *, shift_label: bool | None = None) -> DraftConfig:
    """Read the published layout: Qwen3 keys with a `dflash_config` section.

    `shift_label` states the alignment of a Domino checkpoint that does not say it itself.
    Raises ValueError naming the key at fault.
    """
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architectures must name one of {', '.join(ARCHITECTURES)}, got {architecture}")
    section = raw.get("dflash_config") or {}
    for option in UNSUPPORTED_OPTIONS:
        if section.get(option) or raw.get(option):
            raise ValueError(f"{option} is not supported: decode with a checkpoint made without it")
    num_layers = _require(raw, "num_hidden_layers")
    heads = _require(raw, "num_attention_heads")
    hidden_size = _require(raw, "hidden_size")
    num_target_layers = _require(raw, "num_target_layers")
    has_head = _has_head(section, architecture)
    layer_ids = section.get("target_layer_ids") or build_target_layer_ids(num_target_layers, num_layers)
    return DraftConfig(
        hidden_size=hidden_size,
        intermediate_size=_require(raw, "intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden_size // heads,
        vocab_size=_require(raw, "vocab_size"),
        block_size=_require(raw, "block_size"),
        mask_token_id=_require(section, "mask_token_id", "dflash_config.mask_token_id"),
        target_layer_ids=tuple(layer_ids),
        num_target_layers=num_target_layers,
        shift_label=_alignment(section, has_head, shift_label),
        rope_parameters=_rope(raw),
        head=_head(raw, section) if has_head else None,
        layer_types=_layer_types(raw, num_layers),
        sliding_window=raw.get("sliding_window"),
        is_causal=True if section.get("causal_head") else section.get("is_causal"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_position_embeddings=raw.get("max_position_embeddings", 40960),
        hidden_act=raw.get("hidden_act", "silu"),
        attention_bias=bool(raw.get("attention_bias", False)),
        initializer_range=raw.get("initializer_range", 0.02),
    )


def render_config(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """The published layout of `config`; both spellings of the rotary base, so transformers 4 and 5 read it alike."""
    section: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "shift_label": config.shift_label,
    }
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "modeling_dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "dtype": dtype,
        "block_size": config.block_size,
        "dflash_config": section,
        "tie_word_embeddings": False,
        "use_sliding_window": "sliding_attention" in config.layer_types,
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": config.rope_parameters.get("rope_theta"),
        "layer_types": list(config.layer_types),
    }
    if config.is_causal is not None:
        section["is_causal"] = config.is_causal
    if config.head is not None:
        section |= {
            "projector_type": "domino",
            "pure_draft_prefix_len": config.head.pure_draft_prefix_len,
            "emb_dim": config.head.emb_dim,
            "gru_hidden_dim": config.head.gru_hidden_dim,
        }
        raw["emb_dim"] = config.head.emb_dim
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "num_target_layers",
        "sliding_window",
        "rms_norm_eps",
        "max_position_embeddings",
        "hidden_act",
        "attention_bias",
        "initializer_range",
    ):
        raw[name] = getattr(config, name)
    return raw


def _require(section: Mapping[str, Any], key: str, name: str | None = None) -> Any:
    if section.get(key) is None:
        raise ValueError(f"{name or key} is missing: the checkpoint must state it")
    return section[key]


def _has_head(section: Mapping[str, Any], architecture: str) -> bool:
    projector = section.get("projector_type")
    if projector in DOMINO_PROJECTORS:
        return True
    if projector not in (None, "", "none", "dflash"):
        raise ValueError(f"projector_type must be domino, causal_v5 or absent, got {projector!r}")
    if architecture == "DominoDraftModel":
        raise ValueError("a DominoDraftModel must state dflash_config.projector_type=domino, got none")
    return False


def _alignment(section: Mapping[str, Any], has_head: bool, stated: bool | None) -> bool:
    """Guessing the alignment wrong lets acceptance fall to 1 without any error, so it is never guessed."""
    own = section.get("shift_label")
    if own is None and has_head and stated is None:
        raise ValueError(
            "this Domino checkpoint does not state dflash_config.shift_label, which decides what its slots predict; "
            "give shift_label=true or shift_label=false"
        )
    if own is not None and stated is not None and bool(own) != stated:
        raise ValueError(
            f"the checkpoint states shift_label={bool(own)}, the caller shift_label={stated}; drop the latter"
        )
    if own is not None:
        return bool(own)
    return False if stated is None else stated


def _head(raw: Mapping[str, Any], section: Mapping[str, Any]) -> HeadConfig:
    emb_dim = section.get("emb_dim") or raw.get("emb_dim")
    if emb_dim is None:
        raise ValueError("emb_dim is missing: a Domino checkpoint must state it at the top level or in dflash_config")
    return HeadConfig(
        gru_hidden_dim=_require(section, "gru_hidden_dim", "dflash_config.gru_hidden_dim"),
        emb_dim=emb_dim,
        pure_draft_prefix_len=section.get("pure_draft_prefix_len", 0),
    )


def _layer_types(raw: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    if raw.get("layer_types"):
        return tuple(raw["layer_types"])
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        first_sliding = raw.get("max_window_layers", num_layers)
        return tuple("sliding_attention" if i >= first_sliding else "full_attention" for i in range(num_layers))
    return ("full_attention",) * num_layers


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4); the former wins."""
    if raw.get("rope_parameters"):
        return dict(raw["rope_parameters"])
    if raw.get("rope_theta") is None:
        raise ValueError("rope_theta is missing: the checkpoint must state it, or rope_parameters")
    scaling = dict(raw.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    return {**scaling, "rope_theta": raw["rope_theta"]}
