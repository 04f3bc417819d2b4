"""The target: a frozen Hugging Face causal language model whose output is preserved.

Shapes: B batch, P committed tokens, Q tokens of this forward, N tree nodes, F features concatenated, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from . import few_rows
from .decode.cache import TargetCache
from .dtypes import parse_device, parse_dtype
from .errors import UserError

LAYER_LISTS = ("layers", "h")
FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f")
POSITIONS_BY_MASK = {"bloom", "mpt"}
ROLLBACK_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class TargetOutput:
    logits: Tensor  # [B, Q, V], or [B, 1, V] for the last token only
    features: Tensor | None  # [B, Q, F], None when none were asked for


class Target:
    """Wraps a causal LM that keeps a rollback-able KV cache. The model is frozen, and its linear layers multiply as
    `few_rows` says.

    Raises UserError when made around a model that speculative decoding cannot serve.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        check_servable(model.config, type(model))
        self.model = model.eval().requires_grad_(False)
        few_rows.speed_up(model)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self._layers, self._norm = _decoder_parts(model)
        self._capturing = Lock()
        # transformers renamed the argument that takes the cache in 5.2x.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        if self._attention not in ("sdpa", "eager"):
            raise UserError(
                f"tree verification needs the target's attention to be sdpa or eager, got {self._attention}; "
                "load it with attn_implementation='sdpa'"
            )

    @classmethod
    def load(cls, path: str | Path, *, dtype: str = "auto", device: str = "auto") -> Target:
        """Read a target and its tokenizer from a directory or hub id. `dtype` "auto" is the checkpoint's own.

        Raises UserError for a path that holds no causal LM, and for one that cannot be rolled back.
        """
        chosen_device = parse_device(device)
        chosen_dtype: str | torch.dtype = "auto" if dtype == "auto" else parse_dtype(dtype)
        path = str(Path(path).expanduser()) if Path(path).expanduser().exists() else str(path)
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            check_servable(config, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=chosen_dtype, trust_remote_code=False, output_loading_info=True
            )
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"cannot load the target {path}: {reason[0]}") from error
        model, report = loaded
        missing = sorted(report["missing_keys"])
        if missing:
            # transformers would draw them at random.
            raise UserError(
                f"{path} holds no complete {config.model_type} model: {missing[0]} is missing, of {len(missing)} in all"
            )
        nn.Module.to(model, chosen_device)  # model.to refuses some quantised models and is typed for none
        return cls(model, tokenizer)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head, which may exceed the tokenizer's vocabulary."""
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def context_length(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every id that ends a generation: the generation config's and the tokenizer's."""
        ids: set[int] = set()
        for source in (self.model.generation_config, self.tokenizer):
            named = getattr(source, "eos_token_id", None)
            ids.update([named] if isinstance(named, int) else named or ())
        return frozenset(ids)

    def embed(self, token_ids: Tensor) -> Tensor:  # [...] -> [..., H]
        """The target's input embeddings, shared with the drafter."""
        return self.model.get_input_embeddings()(token_ids)

    def lm_head(self, hidden: Tensor) -> Tensor:  # [..., H] -> [..., V]
        """The target's LM head (tied or not), shared with the drafter; takes the drafter's dtype too."""
        head = self.model.get_output_embeddings()
        return head(hidden.to(head.weight.dtype))

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,  # [B, Q]
        cache: TargetCache,
        *,
        layer_ids: Sequence[int] = (),
        positions: Tensor | None = None,  # [B, Q], default consecutive
        visible: Tensor | None = None,  # [B, Q, Q] bool among the new tokens, default causal
        last_only: bool = False,
    ) -> TargetOutput:
        """Append Q tokens to `cache`; logits of all of them or the last, features of the layers asked for."""
        if positions is None:
            positions = torch.arange(cache.length, cache.length + token_ids.shape[1], device=token_ids.device)[None]
        mask = None
        if visible is not None:
            mask = self._attention_mask(cache.visibility.over(visible, cache.length), positions)
        with self._captured(layer_ids) as features:
            output = self.model(
                input_ids=token_ids,
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
                **{self._cache_argument: cache},
            )
        gathered = torch.cat([features[layer] for layer in layer_ids], dim=-1) if layer_ids else None
        return TargetOutput(output.logits, gathered)

    @torch.no_grad()
    def features(
        self,
        token_ids: Tensor,  # [B, S]
        layer_ids: Sequence[int],
        starts: Tensor | None = None,  # [B, S] where in its row each token's sequence begins; None: at 0, one a row
    ) -> Tensor:  # [B, S, F]
        """Features of whole sequences, padded on the right: no cache is kept and no logits are formed. A sequence does
        not see those before it in its row."""
        apart: dict[str, Any] = {}
        if starts is not None:
            places = torch.arange(token_ids.shape[1], device=token_ids.device)
            positions = places - starts
            visible = (places[:, None] >= places) & (starts[..., None] == starts[:, None])
            apart = {
                "attention_mask": self._attention_mask(visible, positions),
                "position_ids": positions,
            }
        with self._captured(layer_ids) as features:
            self.model.get_decoder()(input_ids=token_ids, use_cache=False, **apart)
        return torch.cat([features[layer] for layer in layer_ids], dim=-1)

    def logits_at(self, token_ids: Sequence[int]) -> Tensor:  # [V]
        """Logits of the token that follows `token_ids`, from one forward without history."""
        ids = torch.tensor([list(token_ids)], device=self.device)
        return self.forward(ids, TargetCache(len(token_ids)), last_only=True).logits[0, -1]

    @property
    def _attention(self) -> str:
        return self.model.config._attn_implementation

    @contextmanager
    def _captured(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the outputs of the wanted layers; the last layer's is taken after the final norm, as the published
        drafters were trained on `output_hidden_states`."""
        features: dict[int, Tensor] = {}

        def hook(layer: int) -> Any:
            def keep(module: nn.Module, inputs: Any, output: Any) -> None:
                features[layer] = (output[0] if isinstance(output, tuple) else output).to(self.device)

            return keep

        last = self.num_layers - 1
        with self._capturing:  # hooks are the model's: two threads would collect each other's features
            handles = [
                (self._norm if layer == last else self._layers[layer]).register_forward_hook(hook(layer))
                for layer in layer_ids
            ]
            try:
                yield features
            finally:
                for handle in handles:
                    handle.remove()

    def _attention_mask(
        self,
        visible: Tensor,  # [B, Q, P + Q] bool, over the committed tokens and the new ones
        positions: Tensor,  # [B, Q]
    ) -> Tensor | dict[str, Tensor]:
        """The 4-D mask, one a layer kind."""
        kinds = _layer_kinds(self.config)
        masks = {
            kind: self._as_mask(_windowed(visible, positions, self.config.sliding_window) if sliding else visible)
            for kind, sliding in kinds.items()
        }
        # Models with layers of several kinds take a mask a kind; the others take the mask itself.
        wants_mapping = "sliding_attention" in (getattr(self.config, "layer_types", None) or ())
        return masks if wants_mapping else next(iter(masks.values()))

    def _as_mask(self, visible: Tensor) -> Tensor:  # [B, Q, P + Q] bool -> [B, 1, Q, P + Q]
        if self._attention == "sdpa":
            return visible[:, None]
        # Eager attention adds the mask to its scores: a bool mask would be silently wrong there.
        additive = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return additive.masked_fill(~visible, torch.finfo(self.dtype).min)[:, None]


def check_servable(config: PretrainedConfig, model_class: Any) -> None:
    """Refuse targets that cannot verify a tree, or cannot be rolled back to the accepted part of one.

    Raises UserError naming the model and the reason.
    """
    text_config = config.get_text_config()
    name = text_config.model_type
    if model_class is None:
        raise UserError(f"the target must be a causal language model, got a {name} configuration")
    if config.is_encoder_decoder:
        raise UserError(f"{name} is an encoder-decoder; the target must be a decoder-only language model")
    foreign = set(getattr(text_config, "layer_types", None) or ()) - ROLLBACK_LAYER_TYPES
    if foreign:
        raise UserError(f"{name} has {', '.join(sorted(foreign))} layers, whose state cannot be rolled back")
    if getattr(model_class, "_is_stateful", False):
        raise UserError(f"{name} keeps a recurrent state, which cannot be rolled back to an accepted prefix")
    if name in POSITIONS_BY_MASK or getattr(text_config, "alibi", False):
        raise UserError(f"{name} takes positions from its attention mask (ALiBi), so it cannot verify a tree")
    if any("local" in str(kind) for kind in getattr(text_config, "attention_types", None) or ()):
        raise UserError(f"{name} has local layers that window by place, not by position, so it cannot verify a tree")


def _decoder_parts(model: PreTrainedModel) -> tuple[nn.ModuleList, nn.Module]:
    decoder = model.get_decoder()
    layers = next((getattr(decoder, name) for name in LAYER_LISTS if hasattr(decoder, name)), None)
    norm = next((getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)), None)
    if layers is None or norm is None:
        raise UserError(f"cannot find the decoder layers and final norm of {type(model).__name__}: unsupported target")
    return layers, norm


def _layer_kinds(config: PretrainedConfig) -> dict[str, bool]:
    """Kinds of attention layer in the target, each with whether it slides."""
    types = getattr(config, "layer_types", None)
    if types:
        return {kind: kind == "sliding_attention" for kind in sorted(set(types))}
    return {"attention": getattr(config, "sliding_window", None) is not None}


def _windowed(
    visible: Tensor,  # [B, Q, P + Q]
    positions: Tensor,  # [B, Q]
    window: int,
) -> Tensor:  # [B, Q, P + Q]
    past_positions = torch.arange(visible.shape[2] - visible.shape[1], device=positions.device)
    past_positions = past_positions.expand(positions.shape[0], -1)
    key_positions = torch.cat([past_positions, positions.expand(positions.shape[0], -1)], dim=-1)
    return visible & (positions[..., None] - key_positions[:, None] < window)
