"""A freshly initialised drafter for any target: where training starts, and a stand-in until there is a trained one."""

from __future__ import annotations

import torch

from ..errors import UserError
from ..target import Target
from .config import DraftConfig, HeadConfig, build_target_layer_ids
from .model import DraftModel, initialize


def fresh_draft(
    target: Target,
    *,
    seed: int,
    block_size: int = 8,
    num_layers: int = 2,
    num_features: int = 5,
    gru_hidden_dim: int = 256,
    emb_dim: int = 128,
    shift_label: bool = True,
    pure_draft_prefix_len: int = 1,
    with_head: bool = True,
) -> DraftModel:
    """An untrained drafter with the target's layer shapes, reproducible from `seed`, on the target's device and dtype.

    `num_features` target layers are fused, all of them where the target has fewer. Raises UserError for sizes that
    contradict each other.
    """
    text = target.config
    heads = text.num_attention_heads
    try:
        config = DraftConfig(
            hidden_size=text.hidden_size,
            intermediate_size=text.intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocab_size=target.vocab_size,
            block_size=block_size,
            mask_token_id=choose_mask_token(target),
            target_layer_ids=build_target_layer_ids(target.num_layers, num_features),
            num_target_layers=target.num_layers,
            shift_label=shift_label,
            rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(text)},
            head=HeadConfig(gru_hidden_dim, emb_dim, pure_draft_prefix_len) if with_head else None,
            rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
            max_position_embeddings=target.context_length or 40960,
        )
    except ValueError as error:
        raise UserError(f"cannot make a fresh drafter: {error}") from error
    draft = skeleton(config)
    initialize(draft, torch.Generator().manual_seed(seed))
    return draft.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


def skeleton(config: DraftConfig) -> DraftModel:
    """A draft whose weights are to be set: torch draws them while it is made, which must not be felt elsewhere."""
    with torch.random.fork_rng(devices=[]):
        return DraftModel(config)


def choose_mask_token(target: Target) -> int:
    """An id to stand for tokens not drafted yet: the tokenizer's mask, else an embedding row past its vocabulary, else
    its padding where that ends nothing, else the last row, which byte-pair merges leave to a rare token."""
    rows = target.model.get_input_embeddings().weight.shape[0]
    tokenizer = target.tokenizer
    if tokenizer is None:
        return rows - 1
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if len(tokenizer) < rows:
        return len(tokenizer)
    padding = tokenizer.pad_token_id
    return padding if padding is not None and padding not in target.end_token_ids else rows - 1


def _rope_theta(text_config: object) -> float:
    """The target's rotary base; the larger one where its layer kinds differ."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    bases = [rope.get("rope_theta"), *(kind.get("rope_theta") for kind in rope.values() if isinstance(kind, dict))]
    return float(max((base for base in bases if base), default=10000.0))
