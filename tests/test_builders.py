"""Builders of the conditional tree: all select the nodes of the reference heap, on random and on trained weights."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import draft_block, make_draft, make_target
from torch import Tensor

from dominotree.decode.cache import TargetCache
from dominotree.decode.methods import make_method
from dominotree.draft.checkpoint import load_draft
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError
from dominotree.target import Target
from dominotree.tree.builders import (
    BUILDERS,
    CapturedChain,
    CapturedFrontier,
    ConditionalTree,
    FrontierBuilder,
    GraphBuilder,
    HeapBuilder,
    prepare_head,
)
from dominotree.tree.children import Proposal, Scale
from dominotree.tree.lanes import DraftBlocks, input_table_bytes
from dominotree.tree.nodes import DraftTree

VOCABULARY = 29
FAST = {"frontier": FrontierBuilder, "captured frontier": CapturedFrontier, "graph": GraphBuilder}
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7], [9, 3])


def blocks_of(target: Target, draft: DraftModel, prompts: Any = PROMPTS) -> list[Proposal]:
    """One drafted block behind every prompt."""
    proposals = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        features = target.forward(ids, TargetCache(8), layer_ids=draft.config.target_layer_ids).features
        assert features is not None
        proposals.append(draft_block(target, draft, features, root_id=prompt[-1]))
    return proposals


def random_blocks(vocab_size: int = VOCABULARY, **options: Any) -> list[Proposal]:
    target = make_target(vocab_size=vocab_size)
    draft = make_draft(target, **options)
    assert draft.head is not None
    with torch.no_grad():
        draft.head.output_rows.mul_(12.0)  # strong enough to reorder tokens
    return blocks_of(target, draft)


def batched(proposals: list[Proposal]) -> DraftBlocks:
    return DraftBlocks(
        torch.stack([proposal.root_id for proposal in proposals]),
        torch.stack([proposal.hidden for proposal in proposals]),
        torch.stack([proposal.base_logits for proposal in proposals]),
        proposals[0].uncorrected_length,
    )


def same_tree(ours: DraftTree, expected: DraftTree, row: int = 0) -> None:
    """Node for node, padding behind the last node left out."""
    assert ours.path_log_probs is not None and expected.path_log_probs is not None
    size = expected.size
    assert int((ours.depths[row] > 0).sum()) == size
    for name in ("token_ids", "parents", "depths"):
        assert getattr(ours, name)[row, :size].tolist() == getattr(expected, name)[0].tolist(), name
    torch.testing.assert_close(ours.path_log_probs[row, :size], expected.path_log_probs[0], rtol=1e-5, atol=1e-5)


SHAPES = [
    {"block_size": block, "shift_label": shift, "pure_draft_prefix_len": prefix}
    for block, shift, prefix in [
        (2, True, 0), (2, False, 0), (4, True, 1), (5, False, 2),
        (7, True, 3), (7, False, 3), (16, True, 1), (16, False, 1),
    ]
]  # fmt: skip


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_builder_selects_the_reference_s_nodes(shape: dict[str, Any], name: str) -> None:
    proposals = random_blocks(**shape)
    for budget, width in itertools.product((1, 2, 16, 64), (0, 8, VOCABULARY)):
        tree = ConditionalTree(budget, width, node_topk=4)
        builder = FAST[name](tree)
        for proposal in proposals[:2]:
            same_tree(builder.build(proposal), HeapBuilder(tree).build(proposal))


@pytest.mark.parametrize("name", FAST)
def test_large_trees_of_a_larger_vocabulary_are_the_reference_s(name: str) -> None:
    proposals = random_blocks(vocab_size=700, block_size=16, gru_hidden_dim=24, emb_dim=12)
    for budget, width in ((256, 64), (100, 0)):
        tree = ConditionalTree(budget, width, node_topk=8)
        builder = FAST[name](tree)
        same_tree(builder.build(proposals[0]), HeapBuilder(tree).build(proposals[0]))


@pytest.mark.parametrize("budget", [1, 7, 40])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_batch_is_built_as_its_sequences(batch: int, budget: int) -> None:
    proposals = random_blocks(block_size=6)[:batch]
    tree = ConditionalTree(budget, 8, node_topk=3)
    prepared = prepare_head(proposals[0], input_table=False)
    ours = FrontierBuilder(tree).build_all(prepared, batched(proposals))
    for row, proposal in enumerate(proposals):
        same_tree(ours, HeapBuilder(tree).build(proposal), row)


@pytest.mark.parametrize("builder", ["frontier", "graph"])
def test_trees_of_the_trained_pair_are_the_reference_s(reference: Path, builder: str) -> None:
    target = Target.load(reference / "trained" / "target")
    draft = load_draft(reference / "trained" / "draft")
    prompts = [list(range(start, start + 24)) for start in (40, 90, 140, 300)]
    proposals = blocks_of(target, draft, prompts)
    for budget in (4, 16, 128):
        fast, plain = (make_method("dominotree", node_budget=budget, builder=name) for name in (builder, "heap"))
        for proposal in proposals:
            same_tree(fast.build(proposal), plain.build(proposal))


@pytest.mark.parametrize("name", FAST)
def test_a_tree_smaller_than_its_budget_holds_all_there_is(name: str) -> None:
    proposal = random_blocks(block_size=2)[0]  # two slots
    tree = ConditionalTree(100, 4, node_topk=3)
    assert HeapBuilder(tree).build(proposal).size == 3 + 9
    same_tree(FAST[name](tree).build(proposal), HeapBuilder(tree).build(proposal))


@pytest.mark.parametrize("name", FAST)
def test_tokens_that_the_draft_rules_out_end_a_branch(name: str) -> None:
    """All but two tokens of every slot have no probability, so every node has two children."""
    proposal = random_blocks(block_size=4)[0]
    base = torch.full_like(proposal.base_logits, -torch.inf)
    base[:, 3:5] = proposal.base_logits[:, 3:5]
    proposal = dataclasses.replace(proposal, base_logits=base)
    tree = ConditionalTree(2 + 4 + 8 + 16, 6, node_topk=2)
    same_tree(FAST[name](tree).build(proposal), HeapBuilder(tree).build(proposal))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("width", [0, 6])
def test_ties_are_the_same_in_every_builder(name: str, width: int) -> None:
    """No correction and logits of few values: whole families of paths have the same score."""
    proposal = random_blocks(block_size=5)[0]
    assert proposal.head is not None
    with torch.no_grad():
        proposal.head.output_rows.zero_()
    proposal = dataclasses.replace(proposal, base_logits=proposal.base_logits.sign())
    for budget in (1, 5, 16, 60):
        tree = ConditionalTree(budget, width, node_topk=5)
        ours, expected = FAST[name](tree).build(proposal), HeapBuilder(tree).build(proposal)
        assert torch.equal(ours.token_ids, expected.token_ids)
        assert torch.equal(ours.parents, expected.parents)


def test_the_graph_heap_is_the_reference_bit_for_bit() -> None:
    for proposal in random_blocks(block_size=8):
        tree = ConditionalTree(40, 8, node_topk=4)
        ours, expected = GraphBuilder(tree).build(proposal), HeapBuilder(tree).build(proposal)
        assert ours.path_log_probs is not None and expected.path_log_probs is not None
        assert torch.equal(ours.path_log_probs, expected.path_log_probs)
        assert torch.equal(ours.token_ids, expected.token_ids)


SCALES = [Scale(0.5), Scale(2.0), Scale(depth_term=-0.3), Scale(1.5, -2.0)]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_temperature_and_depth_term_are_the_same_in_every_builder(scale: Scale, name: str) -> None:
    for proposal in random_blocks(block_size=6)[:2]:
        tree = ConditionalTree(30, 8, node_topk=4, scale=scale)
        same_tree(FAST[name](tree).build(proposal), HeapBuilder(tree).build(proposal))


def test_a_depth_term_is_added_once_a_step() -> None:
    proposal = random_blocks(block_size=5)[0]
    plain, bent = (make_method("dominotree", node_budget=300, depth_term=term).build(proposal) for term in (0.0, -0.4))

    def scores(tree: DraftTree, term: float) -> dict[tuple[int, ...], float]:
        assert tree.path_log_probs is not None
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.token_ids[0].tolist(), tree.parents[0].tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return {
            path: score - term * len(path) for path, score in zip(paths, tree.path_log_probs[0].tolist(), strict=True)
        }

    log_probs, without_term = scores(plain, 0.0), scores(bent, -0.4)
    common = log_probs.keys() & without_term.keys()
    assert len(common) > 100
    assert [without_term[path] for path in common] == pytest.approx([log_probs[path] for path in common], abs=1e-4)


def test_a_depth_term_makes_trees_shallower_and_a_temperature_changes_them() -> None:
    proposal = random_blocks(block_size=12)[0]
    depths = [
        float(make_method("dominotree", depth_term=term).build(proposal).depths.float().mean())
        for term in (0.0, -0.5, -5.0)
    ]
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[2]
    warm, plain = (make_method("ddtree", draft_temperature=t).build(proposal).token_ids for t in (3.0, 1.0))
    assert not torch.equal(warm, plain)


def test_an_input_table_changes_no_node() -> None:
    for proposal in random_blocks(block_size=8)[:2]:
        trees = [make_method("dominotree", input_table=table).build(proposal) for table in (False, True)]
        same_tree(*trees)
        chains = [make_method("domino", input_table=table).build(proposal).token_ids for table in (False, True)]
        assert torch.equal(*chains)


def test_what_will_be_built_how_is_said() -> None:
    target = make_target()
    draft = make_draft(target)
    assert make_method("dominotree").notes(target, draft) == ["tree builder frontier (auto, on cpu)"]
    assert make_method("dominotree", builder="heap").notes(target, draft) == ["tree builder heap"]
    assert make_method("dflash").notes(target, draft) == []
    assert draft.head is not None
    assert input_table_bytes(draft.head, 1000) == 1000 * 3 * 12 * 4
    assert "table of GRU inputs takes 0.00 GiB" in make_method("domino", input_table=True).notes(target, draft)[0]


@pytest.mark.parametrize("method", ["dominotree", "domino"])
@pytest.mark.parametrize("table", [False, True])
def test_changed_weights_are_noticed(method: str, table: bool) -> None:
    """A trainer validates with the head that it goes on changing."""
    proposal = random_blocks(block_size=8)[0]
    assert proposal.head is not None
    made = make_method(method, input_table=table)
    made.build(proposal)
    with torch.no_grad():
        for weight in proposal.head.parameters():
            weight.mul_(-1.3)
    expected = make_method(method).build(proposal)
    assert torch.equal(made.build(proposal).token_ids, expected.token_ids)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("vocab_size", [VOCABULARY, 5000])
def test_short_blocks_are_built_between_long_ones(name: str, vocab_size: int) -> None:
    """Near the end of a generation fewer slots are looked at, sometimes none that is corrected; what the last round
    left in buffers must not be seen."""
    tree = ConditionalTree(20, 8, node_topk=4)
    builder = FAST[name](tree)
    proposals = random_blocks(vocab_size, block_size=7, pure_draft_prefix_len=2)
    for proposal, slots in itertools.product(proposals[:2], (1, 7, 3, 1, 2, 5)):
        short = dataclasses.replace(proposal, hidden=proposal.hidden[:slots], base_logits=proposal.base_logits[:slots])
        same_tree(builder.build(short), HeapBuilder(tree).build(short))


def test_the_captured_chain_is_the_chain() -> None:
    captured, plain = CapturedChain(input_table=False), make_method("domino")
    for proposal, slots in itertools.product(random_blocks(block_size=7), (7, 2, 5)):
        short = dataclasses.replace(proposal, hidden=proposal.hidden[:slots], base_logits=proposal.base_logits[:slots])
        assert torch.equal(captured.build(short).token_ids, plain.build(short).token_ids)


def test_what_is_built_outlives_the_next_round() -> None:
    builder = CapturedFrontier(ConditionalTree(12, 8, node_topk=4))
    first, second = random_blocks()[:2]
    tree = builder.build(first)
    before = tree.token_ids.clone()
    builder.build(second)
    assert torch.equal(tree.token_ids, before)


def best_of_level(tree: DraftTree) -> list[int]:
    return [int((tree.depths[0] == depth).sum()) for depth in range(1, int(tree.depths.max()) + 1)]


def test_dartree_keeps_at_most_its_width_a_depth() -> None:
    proposal = random_blocks(block_size=8)[0]
    assert max(best_of_level(make_method("dartree", node_budget=40, width=3).build(proposal))) <= 3
    even = make_method("dartree", node_budget=16, width=0).build(proposal)
    assert best_of_level(even) == [2] * 8
    exact = make_method("dominotree", node_budget=40, node_topk=64)
    same_tree(make_method("dartree", node_budget=40, width=40).build(proposal), exact.build(proposal))


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("budget", [1, 9, 30])
def test_nodes_come_in_order_of_selection(builder: str, budget: int) -> None:
    proposal = random_blocks(block_size=6)[0]
    whole = make_method("dominotree", node_budget=30, builder=builder).build(proposal)
    assert whole.path_log_probs is not None
    assert bool((whole.path_log_probs[0, 1:] <= whole.path_log_probs[0, :-1]).all())
    part = make_method("dominotree", node_budget=budget, builder=builder).build(proposal)
    same_tree(whole.first(budget), part)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"builder": "fastest"}, "builder must be one of auto, heap, graph, frontier, got fastest"),
        (
            {"builder": "heap", "input_table": True},
            "input_table=true goes with method.builder=frontier or auto, got heap",
        ),
        ({"input_table": "yes"}, "input_table must be true or false, got yes"),
        ({"draft_temperature": 0.0}, "draft_temperature must be a number above 0, got 0.0"),
        ({"draft_temperature": -1.0}, "draft_temperature must be a number above 0"),
        ({"draft_temperature": float("nan")}, "draft_temperature must be a number above 0, got nan"),
        ({"depth_term": 0.1}, "depth_term must be a number of 0 or less, got 0.1"),
        ({"depth_term": float("-inf")}, "depth_term must be a number of 0 or less"),
    ],
)
def test_options_out_of_range_state_the_rule(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_method("dominotree", **options)


def test_a_dartree_width_is_not_negative() -> None:
    with pytest.raises(UserError, match="width must be an integer of at least 0, got -1"):
        make_method("dartree", width=-1)


def a_tree(size: int) -> DraftTree:
    return DraftTree.from_lists(
        [7] * size, list(range(-1, size - 1)), list(range(1, size + 1)), [-1.0] * size, torch.device("cpu")
    )


@pytest.mark.parametrize(("count", "size"), [(0, 0), (2, 2), (5, 5), (9, 5)])
def test_the_first_nodes_of_a_tree(count: int, size: int) -> None:
    cut = a_tree(5).first(count)
    fields: list[Tensor | None] = [cut.token_ids, cut.parents, cut.depths, cut.path_log_probs]
    assert all(field is not None and field.shape == (1, size) for field in fields)
    assert DraftTree.chain(torch.arange(5)[None]).first(count).linear


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="0 nodes or more, got -1"):
        a_tree(3).first(-1)
