"""The published `config.json` layout of a draft checkpoint: Qwen3 keys with a `dflash_config` section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from .config import DraftConfig, HeadConfig, build_target_layer_ids

ARCHITECTURES = ("DFlashDraftModel", "DominoDraftModel")
DOMINO_PROJECTORS = ("domino", "causal_v5")
# Options of other drafters that change what is drafted, with the values that leave it alone.
UNSUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "use_bias_gate": (False,),
    "use_bias_norm": (False,),
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "attention_mode": ("gqa", "mha"),
    "attention_modes": (),
    "quantization_config": (),
}


def parse_config(raw: Mapping[str, Any], *, shift_label: bool | None = None) -> DraftConfig:
    """Read the published layout: Qwen3 keys with a `dflash_config` section.

    `shift_label` states the alignment of a Domino checkpoint that does not say it itself.
    Raises ValueError naming the key at fault and its value.
    """
    top = _Section(raw)
    architecture = (top.take("architectures", "a list", None) or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architectures must name one of {', '.join(ARCHITECTURES)}, got {architecture}")
    section = _Section(top.take("dflash_config", "a mapping", {}), "dflash_config.")
    for option, neutral in UNSUPPORTED_OPTIONS.items():
        for values in (section, top):
            if values.get(option) not in (None, *neutral):
                raise ValueError(
                    f"{option}={values.get(option)!r} is not supported: it would change what is drafted; "
                    "use a checkpoint made without it"
                )
    num_layers = top.take("num_hidden_layers", "a whole number")
    heads = top.take("num_attention_heads", "a whole number")
    hidden_size = top.take("hidden_size", "a whole number")
    num_target_layers = top.take("num_target_layers", "a whole number")
    has_head = _has_head(section, architecture)
    layer_ids = section.take("target_layer_ids", "a list of whole numbers", None)
    causal_head = section.take("causal_head", "true or false", False)
    return DraftConfig(
        hidden_size=hidden_size,
        intermediate_size=top.take("intermediate_size", "a whole number"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=top.take("num_key_value_heads", "a whole number", heads),
        head_dim=top.take("head_dim", "a whole number", hidden_size // max(1, heads)),
        vocab_size=top.take("vocab_size", "a whole number"),
        block_size=top.take("block_size", "a whole number"),
        mask_token_id=section.take("mask_token_id", "a whole number"),
        target_layer_ids=tuple(
            build_target_layer_ids(num_target_layers, num_layers) if layer_ids is None else layer_ids
        ),
        num_target_layers=num_target_layers,
        shift_label=_alignment(section, has_head, shift_label),
        rope_parameters=_rope(top),
        head=_head(top, section) if has_head else None,
        layer_types=_layer_types(top, num_layers),
        sliding_window=top.take("sliding_window", "a whole number", None),
        is_causal=True if causal_head else _in_either(top, section, "is_causal", "true or false"),
        rms_norm_eps=top.take("rms_norm_eps", "a number", 1e-6),
        max_position_embeddings=top.take("max_position_embeddings", "a whole number", 40960),
        hidden_act=top.take("hidden_act", "text", "silu"),
        attention_bias=top.take("attention_bias", "true or false", False),
        initializer_range=top.take("initializer_range", "a number", 0.02),
    )


def render_config(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """The published layout of `config`, with both spellings of the rotary embedding, of transformers 4 and 5."""
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
        **_older_rope(config.rope_parameters),
        "layer_types": list(config.layer_types),
    }
    if config.is_causal is not None:
        raw["is_causal"] = section["is_causal"] = config.is_causal
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


def _older_rope(rope_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 4's spelling: the base at the top level, the scaling, if any, beside it."""
    scaling = {key: value for key, value in rope_parameters.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": rope_parameters.get("rope_theta"), "rope_scaling": None if plain else scaling}


_REQUIRED = object()


class _Section:
    """A part of `config.json` whose values are taken with their type checked: nothing is converted."""

    _kinds: ClassVar[dict[str, Callable[[Any], bool]]] = {
        "a whole number": lambda value: isinstance(value, int) and not isinstance(value, bool),
        "a number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        "true or false": lambda value: isinstance(value, bool),
        "text": lambda value: isinstance(value, str),
        "a list": lambda value: isinstance(value, list),
        "a list of whole numbers": lambda value: isinstance(value, list) and all(type(item) is int for item in value),
        "a mapping": lambda value: isinstance(value, Mapping),
    }

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def take(self, key: str, kind: str, default: Any = _REQUIRED) -> Any:
        """The value of `key`; a missing or null one is the default, where there is one."""
        value = self._values.get(key)
        if value is None and default is _REQUIRED:
            raise ValueError(f"{self._prefix}{key} is missing: the checkpoint must state it")
        if value is None:
            return default
        if not self._kinds[kind](value):
            raise ValueError(f"{self._prefix}{key} must be {kind}, got {value!r}")
        return value


def _has_head(section: _Section, architecture: str) -> bool:
    projector = section.take("projector_type", "text", None)
    if projector in DOMINO_PROJECTORS:
        return True
    if projector not in (None, "", "none", "dflash"):
        raise ValueError(f"projector_type must be domino, causal_v5 or absent, got {projector!r}")
    if architecture == "DominoDraftModel":
        raise ValueError("a DominoDraftModel must state dflash_config.projector_type=domino, got none")
    return False


def _alignment(section: _Section, has_head: bool, stated: bool | None) -> bool:
    """Guessing the alignment wrong lets acceptance fall to 1 without any error, so it is never guessed."""
    own = section.take("shift_label", "true or false", None)
    if not has_head and own is None and stated:
        raise ValueError("shift_label=true does not go with a plain DFlash checkpoint: its slots predict themselves")
    if own is None and has_head and stated is None:
        raise ValueError(
            "this Domino checkpoint does not state dflash_config.shift_label, which decides what its slots predict; "
            "give shift_label=true or shift_label=false"
        )
    if own is not None and stated is not None and own != stated:
        raise ValueError(f"the checkpoint states shift_label={own}, the caller shift_label={stated}; drop the latter")
    return bool(stated if own is None else own)


def _head(top: _Section, section: _Section) -> HeadConfig:
    emb_dim = _in_either(top, section, "emb_dim", "a whole number")
    if emb_dim is None:
        raise ValueError("emb_dim is missing: a Domino checkpoint must state it at the top level or in dflash_config")
    return HeadConfig(
        gru_hidden_dim=section.take("gru_hidden_dim", "a whole number"),
        emb_dim=emb_dim,
        pure_draft_prefix_len=section.take("pure_draft_prefix_len", "a whole number", 0),
    )


def _in_either(top: _Section, section: _Section, key: str, kind: str) -> Any:
    """A key that some tools write into `dflash_config` and others at the top level."""
    return section.take(key, kind, top.take(key, kind, None))


def _layer_types(top: _Section, num_layers: int) -> tuple[str, ...]:
    stated = top.take("layer_types", "a list", None)
    if stated:
        return tuple(stated)
    if top.take("use_sliding_window", "true or false", False) and top.take("sliding_window", "a whole number", None):
        first_sliding = top.take("max_window_layers", "a whole number", num_layers)
        return tuple("sliding_attention" if i >= first_sliding else "full_attention" for i in range(num_layers))
    return ("full_attention",) * num_layers


def _rope(top: _Section) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4); the former wins."""
    stated = top.take("rope_parameters", "a mapping", None)
    scaling = dict(stated or top.take("rope_scaling", "a mapping", {}))
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    if scaling.get("rope_theta") is None:
        scaling["rope_theta"] = top.take("rope_theta", "a number")
    return scaling
