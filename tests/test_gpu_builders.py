"""Capture and replay of the builders on a CUDA device. Their bodies are tested on the CPU, in test_builders."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import draft_block, make_draft, make_target

from dominotree.decode.cache import TargetCache
from dominotree.decode.loop import decode
from dominotree.decode.methods import make_method
from dominotree.tree.builders import CapturedChain, CapturedFrontier, ConditionalTree, GraphBuilder, HeapBuilder
from dominotree.tree.captured import Captured
from dominotree.tree.children import Proposal
from dominotree.tree.nodes import DraftTree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7])
TREE = ConditionalTree(24, 8, node_topk=4)
BUILDERS: dict[str, Callable[[], Any]] = {
    "frontier": lambda: CapturedFrontier(TREE),
    "graph": lambda: GraphBuilder(TREE),
    "chain": lambda: CapturedChain(input_table=True),
}


def blocks() -> list[Proposal]:
    target = make_target(vocab_size=29)
    torch.nn.Module.to(target.model, "cuda")
    draft = make_draft(target)
    proposals = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        features = target.forward(ids, TargetCache(8), layer_ids=draft.config.target_layer_ids).features
        assert features is not None
        with torch.device("cuda"):
            proposals.append(draft_block(target, draft, features, prompt[-1]))
    return proposals


def bits(tree: DraftTree) -> list[Any]:
    scores = None if tree.path_log_probs is None else tree.path_log_probs.tolist()
    return [tree.token_ids.tolist(), tree.parents.tolist(), tree.depths.tolist(), scores]


@pytest.mark.parametrize("name", BUILDERS)
def test_a_replay_is_the_eager_body_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proposals = blocks()
    replayed = BUILDERS[name]()
    ours = [bits(replayed.build(proposal)) for proposal in proposals * 2]
    monkeypatch.setattr(Captured, "__call__", lambda captured: captured._body())
    eager = BUILDERS[name]()
    assert ours == [bits(eager.build(proposal)) for proposal in proposals] * 2


def test_the_graph_heap_is_the_reference_bit_for_bit() -> None:
    for proposal in blocks():
        assert bits(GraphBuilder(TREE).build(proposal)) == bits(HeapBuilder(TREE).build(proposal))


def test_the_captured_frontier_selects_the_reference_s_nodes() -> None:
    builder = CapturedFrontier(TREE)
    for proposal in blocks():
        assert bits(builder.build(proposal))[:3] == bits(HeapBuilder(TREE).build(proposal))[:3]


@pytest.mark.parametrize("name", ["frontier", "chain"])
def test_a_replay_does_not_wait_for_the_host(name: str) -> None:
    proposals, builder = blocks(), BUILDERS[name]()
    builder.build(proposals[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        builder.build(proposals[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["domino", "dominotree"])
def test_a_round_waits_for_the_host_once_it_knows_the_tokens(method: str) -> None:
    """From draft to verification nothing is copied to the host: one transfer a round, of the accepted tokens."""
    target = make_target()
    torch.nn.Module.to(target.model, "cuda")
    draft, made = make_draft(target), make_method(method)
    decode(target, draft, made, PROMPTS[0], max_new_tokens=12)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            generation = decode(target, draft, made, PROMPTS[0], max_new_tokens=24)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    assert len(waits) <= len(generation.accepted_lengths) + 4  # the prompt's own
