"""Methods by name: their options, and one-line errors for names, options and values that do not exist."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from conftest import READY_METHODS, draft_block, make_draft, make_target

from dominotree.decode.cache import TargetCache
from dominotree.decode.methods import METHODS, make_method
from dominotree.errors import UserError
from dominotree.tree.children import Proposal
from dominotree.tree.nodes import DraftTree

SCALE = {"draft_temperature": 1.0, "depth_term": 0.0}
BUILT = {"builder": "auto", "input_table": False}
WIDE = {"node_budget": 16, "candidate_width": 64, "node_topk": 8, **SCALE}
OPTIONS: dict[str, dict[str, Any]] = {
    "ar": {},
    "dflash": {},
    "ddtree": {"node_budget": 16, **SCALE},
    "domino": {"input_table": False},
    "static_corrected": WIDE,
    "dominotree": {**WIDE, **BUILT},
    "dartree": {**WIDE, "node_budget": 64, "node_topk": 64, "width": 12, "input_table": False},
    "caddtree": {"cap": 64, "profile": ""},
    "condadaptive": {"cap": 64, "profile": "", "candidate_width": 64, "node_topk": 8, **BUILT},
    "adaptive": {"cap": 64, "profile": "", "candidate_width": 64, "node_topk": 8, **BUILT, "calibration": ""},
}
EVERY_OPTION = ("node_budget", "candidate_width", "node_topk", *SCALE, "builder", "input_table", "width")
TREES = [name for name, options in OPTIONS.items() if "node_budget" in options]


@pytest.fixture(scope="module")
def proposal() -> Proposal:
    target = make_target(vocab_size=29)
    draft = make_draft(target)
    assert draft.head is not None
    with torch.no_grad():
        draft.head.output_rows.mul_(12.0)  # so that every method builds another tree
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    features = target.forward(prompt, TargetCache(8), layer_ids=draft.config.target_layer_ids).features
    assert features is not None
    return draft_block(target, draft, features, root_id=9)


def nodes(tree: DraftTree) -> list[tuple[int, int]]:
    return list(zip(tree.token_ids[0].tolist(), tree.parents[0].tolist(), strict=True))


def test_the_methods_and_their_published_defaults() -> None:
    assert {name: dataclasses.asdict(make_method(name)) for name in METHODS} == OPTIONS
    assert all(make_method(name).name == name for name in METHODS)


def test_options_are_taken() -> None:
    options = {**OPTIONS["dominotree"], "node_budget": 3, "candidate_width": 0, "node_topk": 2, "builder": "heap"}
    assert dataclasses.asdict(make_method("dominotree", **options)) == options


def test_methods_do_not_change_once_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_method("ddtree").node_budget = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["", "tree", "DominoTree", "domino ", "dominotree16"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UserError, match=f"unknown method {name!r}") as caught:
        make_method(name)
    assert all(known in str(caught.value) for known in METHODS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in METHODS for option in (*EVERY_OPTION, "budget") if option not in OPTIONS[name]],
)
def test_an_option_that_a_method_lacks_names_those_it_has(name: str, option: str) -> None:
    with pytest.raises(UserError, match=f"method {name} has no {option}") as caught:
        make_method(name, **{option: 4})
    assert all(known in str(caught.value) for known in OPTIONS[name])


@pytest.mark.parametrize(
    ("option", "value", "lowest"),
    [
        ("node_budget", 0, 1),
        ("node_budget", -1, 1),
        ("node_budget", 2.5, 1),
        ("node_budget", "8", 1),
        ("node_budget", None, 1),
        ("candidate_width", -1, 0),
        ("candidate_width", 1.0, 0),
        ("node_topk", 0, 1),
    ],
)
@pytest.mark.parametrize("name", ["static_corrected", "dominotree"])
def test_a_value_out_of_range_states_the_rule_and_the_value(name: str, option: str, value: Any, lowest: int) -> None:
    with pytest.raises(UserError, match=f"{option} must be an integer of at least {lowest}, got {value}"):
        make_method(name, **{option: value})


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 60])
@pytest.mark.parametrize("name", TREES)
def test_a_tree_has_as_many_nodes_as_its_budget(proposal: Proposal, name: str, budget: int) -> None:
    tree = make_method(name, node_budget=budget).build(proposal)
    assert tree.size == budget
    assert int(tree.depths.max()) <= len(proposal.hidden)


def test_node_topk_bounds_the_children_of_a_node(proposal: Proposal) -> None:
    for topk in (1, 3):
        parents = make_method("dominotree", node_budget=40, node_topk=topk).build(proposal).parents[0].tolist()
        assert max(parents.count(parent) for parent in set(parents)) == topk


def test_one_child_a_node_is_the_domino_chain(proposal: Proposal) -> None:
    chain = make_method("domino").build(proposal)
    tree = make_method("dominotree", node_budget=40, candidate_width=0, node_topk=1).build(proposal)
    assert nodes(tree) == nodes(chain)


def test_the_first_child_of_every_ddtree_level_is_the_dflash_chain(proposal: Proposal) -> None:
    chain = nodes(make_method("dflash").build(proposal))
    assert nodes(make_method("ddtree", node_budget=1).build(proposal)) == chain[:1]
    assert [parent for _, parent in chain] == list(range(-1, len(chain) - 1))
    assert [token for token, _ in chain] == proposal.base_logits.argmax(dim=-1).tolist()


def test_the_five_drafting_methods_build_different_trees(proposal: Proposal) -> None:
    built = [nodes(make_method(name).build(proposal)) for name in READY_METHODS if name != "ar"]
    assert len({str(tree) for tree in built}) == len(built)


def test_a_smaller_candidate_width_changes_the_tree(proposal: Proposal) -> None:
    trees = [nodes(make_method("dominotree", candidate_width=width).build(proposal)) for width in (0, 29, 3)]
    assert trees[0] == trees[1]  # the whole vocabulary, said in two ways
    assert trees[0] != trees[2]


def test_plain_decoding_builds_nothing(proposal: Proposal) -> None:
    with pytest.raises(UserError, match="ar drafts nothing"):
        make_method("ar").build(proposal)
