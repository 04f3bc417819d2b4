"""Tiny random models that every test can afford, and the reference values where they lie beside the checkout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
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

from dominotree.decode.cache import DraftCache
from dominotree.decode.generation import Generation
from dominotree.decode.loop import decode_rounds
from dominotree.decode.methods import METHODS, Method
from dominotree.draft.config import DraftConfig, HeadConfig
from dominotree.draft.fresh import fresh_draft
from dominotree.draft.model import DraftModel, initialize
from dominotree.target import Target
from dominotree.tree.children import Proposal
from dominotree.tree.nodes import DraftTree

# Those that need no profile of costs; the others have tests of their own.
READY_METHODS = [name for name, method in METHODS.items() if not method.needs_profile]
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
                weight.mul_(10.0)  # or all drafts would be alike, whatever they are made from
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
        "head": HeadConfig(gru_hidden_dim=10, emb_dim=6, pure_draft_prefix_len=1),
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


def draft_block(target: Target, draft: DraftModel, features: Tensor, root_id: int) -> Proposal:  # features [1, S, F]
    """One drafted block behind S context positions, as a builder sees it."""
    context = DraftCache(draft.backbone, reserve=64)
    context.append(features)
    root = torch.tensor([root_id])
    with torch.no_grad():
        hidden = draft.draft_hidden(root, torch.tensor([context.length]), target.embed, context, context.length)
        base_logits = target.lm_head(hidden)
    return Proposal(root[0], hidden[0], base_logits[0], draft.head, draft.config.uncorrected_length, target.embed)


@dataclass(frozen=True)
class Guided(Method):
    """`inner` on base logits that force the tokens `wanted(K)` of the K slots: right or wrong drafts at will."""

    name = "guided"
    inner: Method
    wanted: Callable[[int], Sequence[int]]

    def build(self, proposal: Proposal) -> DraftTree:
        tokens = torch.tensor(self.wanted(len(proposal.hidden)))
        forced = proposal.base_logits.scatter_add(1, tokens[:, None], torch.full((len(tokens), 1), 1e4))
        return self.inner.build(dataclasses.replace(proposal, base_logits=forced))


def decode_guided(
    target: Target,
    draft: DraftModel,
    method: Method,
    prompt: list[int],
    truth: list[int],
    right: Callable[[int], int],
    **options: Any,
) -> Generation:
    """Decode with drafts whose first `right(round)` tokens are those of `truth`, the known output, and no others."""
    produced = Generation("guided")

    def wanted(count: int) -> list[int]:
        known = truth[len(produced.token_ids) :][:count]
        known += [0] * (count - len(known))
        good = right(len(produced.accepted_lengths))
        return [(token + (slot >= good)) % target.vocab_size for slot, token in enumerate(known)]

    for round_ in decode_rounds(target, draft, Guided(method, wanted), prompt, **options):
        produced.add(round_)
    return produced


@dataclass(frozen=True)
class RandomTree:
    """One tree as lists, parents before children."""

    token_ids: list[int]
    parents: list[int]

    @property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append((depths[parent] if parent >= 0 else 0) + 1)
        return depths

    def arrays(self) -> DraftTree:
        return batch_of([self])


def batch_of(trees: Sequence[RandomTree]) -> DraftTree:
    """Trees of unequal size, padded to the largest."""
    size = max(len(tree.parents) for tree in trees)

    def padded(rows: list[list[int]], filler: int) -> Tensor:  # [B, N]
        whole = [row + [filler] * (size - len(row)) for row in rows]
        return torch.tensor(whole, dtype=torch.int64).view(len(trees), size)

    return DraftTree(
        padded([tree.token_ids for tree in trees], 0),
        padded([tree.parents for tree in trees], -1),
        padded([tree.depths for tree in trees], 0),
        None,
    )


@st.composite
def random_trees(draw: st.DrawFn, max_size: int, vocab_size: int = 50) -> RandomTree:
    """Any shape, siblings of different tokens."""
    token_ids: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, max_size))):
        parent, token = draw(st.integers(-1, len(parents) - 1)), draw(st.integers(0, vocab_size - 1))
        if (parent, token) not in zip(parents, token_ids, strict=True):
            parents.append(parent)
            token_ids.append(token)
    return RandomTree(token_ids, parents)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny chat models and drafters on disk, under a name that is awkward on a command line."""
    from tiny_chat import save_tiny_models  # which builds on this file

    folder = tmp_path_factory.mktemp("models, a=1 {x}")
    save_tiny_models(folder)
    return folder


@pytest.fixture
def words(folder: Path) -> list[str]:
    """What every call of the generate command in the tests begins with."""
    return [f"target={folder / 'target'}", f"draft={folder / 'draft'}", "max_new_tokens=12"]
