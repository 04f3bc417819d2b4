"""Float32 at temperature 0: every method gives the target's own plain greedy tokens, one for one."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import FAMILIES, READY_METHODS, decode_guided, draft_block, greedy, make_draft, make_target, small_draft

from dominotree.decode.cache import TargetCache
from dominotree.decode.generation import Generation
from dominotree.decode.loop import decode, decode_rounds
from dominotree.decode.methods import DominoTree, Method, make_method
from dominotree.draft.model import DraftModel
from dominotree.target import Target
from dominotree.tree.children import Proposal
from dominotree.tree.nodes import DraftTree

TREES = ["ddtree", "static_corrected", "dominotree"]
CHAINS = ["dflash", "domino"]
COUNT = 16
DRAFTERS = [(shift, block) for shift in (True, False) for block in (2, 6, 16)]


@functools.cache
def target_of(family: str, tied: bool = False) -> Target:
    return make_target(family, tied=tied)


@functools.cache
def draft_of(family: str, tied: bool, shift_label: bool, block_size: int) -> DraftModel:
    return make_draft(target_of(family, tied), shift_label=shift_label, block_size=block_size)


@functools.cache
def prompt_of(length: int) -> tuple[int, ...]:
    rng = random.Random(length)
    return tuple(rng.randrange(13) for _ in range(length))


@functools.cache
def truth_of(family: str, tied: bool, length: int, count: int = COUNT) -> list[int]:
    return greedy(target_of(family, tied), list(prompt_of(length)), count)


def mean(lengths: list[int]) -> float:
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("shift_label", "block_size"), DRAFTERS)
@pytest.mark.parametrize("method", READY_METHODS)
def test_any_drafter_and_prompt_give_the_target_s_tokens(
    method: str, shift_label: bool, block_size: int, tied: bool
) -> None:
    target, draft = target_of("qwen3", tied), draft_of("qwen3", tied, shift_label, block_size)
    first = 1 + DRAFTERS.index((shift_label, block_size))  # every length from 1 to 60 over the six drafters
    accepted: list[int] = []
    for length in range(first, 61, len(DRAFTERS)):
        ours = decode(target, draft, make_method(method), list(prompt_of(length)), max_new_tokens=COUNT)
        assert ours.token_ids == truth_of("qwen3", tied, length)
        accepted += ours.accepted_lengths
    if method in TREES:
        assert mean(accepted) > 1  # drafted nodes were accepted and the caches compacted
    if method == "ar":
        assert set(accepted) == {1}


def test_the_greedy_outputs_above_are_no_constants() -> None:
    for tied in (True, False):
        assert all(len(set(truth_of("qwen3", tied, length))) > 2 for length in (1, 26, 60))


@pytest.mark.parametrize("method", ["dominotree", "domino", "ddtree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_target_s_tokens(family: str, method: str) -> None:
    target, draft = target_of(family), draft_of(family, False, True, 6)
    accepted: list[int] = []
    for length in (1, 5, 30):  # sliding windows are 6 and 7: shorter and longer prompts
        ours = decode(target, draft, make_method(method), list(prompt_of(length)), max_new_tokens=COUNT)
        assert ours.token_ids == truth_of(family, False, length)
        accepted += ours.accepted_lengths
    if method in TREES:
        assert mean(accepted) > 1


@pytest.mark.parametrize("family", ["qwen3", "mistral_sliding", "gemma3"])
def test_eager_attention_gives_the_target_s_tokens(family: str) -> None:
    target = make_target(family)
    target.model.set_attn_implementation("eager")
    ours = decode(target, make_draft(target), make_method("dominotree"), list(prompt_of(9)), max_new_tokens=COUNT)
    assert ours.token_ids == truth_of(family, False, 9)
    assert ours.acceptance_length > 1


class TestGuidedDrafts:
    """Drafts that are right or wrong as the test wants."""

    @staticmethod
    def run(method: str, right: Callable[[int], int], *, family: str = "qwen3", count: int = 40) -> Generation:
        target, draft = target_of(family), draft_of(family, False, True, 6)
        truth = truth_of(family, False, 7, count)
        ours = decode_guided(target, draft, make_method(method), list(prompt_of(7)), truth, right, max_new_tokens=count)
        assert ours.token_ids == truth
        return ours

    @pytest.mark.parametrize("method", TREES + CHAINS)
    def test_right_drafts_are_accepted_whole(self, method: str) -> None:
        assert self.run(method, right=lambda round_: 99).accepted_lengths == [7, 7, 7, 7, 7, 4]  # 1 + 39 = 40

    @pytest.mark.parametrize("method", CHAINS)
    def test_wrong_drafts_are_never_accepted(self, method: str) -> None:
        assert self.run(method, right=lambda round_: 0).accepted_lengths == [1] * 39

    @pytest.mark.parametrize("method", CHAINS)
    def test_drafts_are_accepted_up_to_the_first_wrong_one(self, method: str) -> None:
        lengths = self.run(method, right=lambda round_: round_ % 7).accepted_lengths
        assert lengths[:-1] == [1 + round_ % 7 for round_ in range(len(lengths) - 1)]

    @pytest.mark.parametrize("method", TREES)
    def test_a_tree_accepts_the_right_part_of_a_draft_at_least(self, method: str) -> None:
        lengths = self.run(method, right=lambda round_: round_ % 7).accepted_lengths
        assert all(length >= 1 + round_ % 7 for round_, length in enumerate(lengths[:-1]))

    @pytest.mark.parametrize("family", ["mistral_sliding", "gemma3"])
    @pytest.mark.parametrize("method", ["dominotree", "domino"])
    def test_whole_blocks_past_a_sliding_window(self, method: str, family: str) -> None:
        assert self.run(method, right=lambda round_: 6 - round_ % 3, family=family).acceptance_length > 5


@pytest.mark.parametrize("method", ["dominotree", "domino"])
def test_a_long_output_outgrows_the_first_buffers(method: str) -> None:
    target = make_target()
    target.model.config.max_position_embeddings = 2048
    truth = greedy(target, [3, 1, 4], 420)
    draft = make_draft(target, block_size=16)
    right: Callable[[int], int] = lambda round_: 16 - round_ % 4  # noqa: E731
    ours = decode_guided(target, draft, make_method(method), [3, 1, 4], truth, right, max_new_tokens=420)
    assert ours.token_ids == truth


@pytest.mark.parametrize("options", [{"node_budget": 1}, {"node_budget": 40, "node_topk": 1}, {"candidate_width": 1}])
def test_extreme_trees_give_the_target_s_tokens(options: dict[str, int]) -> None:
    target, draft = target_of("qwen3"), draft_of("qwen3", False, True, 6)
    ours = decode(target, draft, make_method("dominotree", **options), list(prompt_of(10)), max_new_tokens=COUNT)
    assert ours.token_ids == truth_of("qwen3", False, 10)


def test_a_budget_larger_than_the_tree_there_is() -> None:
    """2 slots of 13 tokens have 13 + 169 prefixes."""
    target, draft = target_of("qwen3"), draft_of("qwen3", False, True, 2)
    ours = decode(target, draft, make_method("ddtree", node_budget=500), list(prompt_of(10)), max_new_tokens=COUNT)
    assert ours.token_ids == truth_of("qwen3", False, 10)
    assert ours.accepted_lengths == [3] * 5  # everything is in the tree


@dataclass(frozen=True)
class Recorded(DominoTree):
    """DominoTree that keeps what it was given."""

    seen: list[Proposal] = dataclasses.field(default_factory=list)

    def build(self, proposal: Proposal) -> DraftTree:
        self.seen.append(proposal)
        return super().build(proposal)


@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("shift_label", [True, False])
def test_every_block_is_drafted_behind_the_features_of_the_committed_tokens(shift_label: bool, sliding: bool) -> None:
    """The caches, compacted round by round, hold what one pass over all committed tokens gives."""
    target = target_of("qwen3")
    layers: dict[str, Any] = (
        {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5} if sliding else {}
    )
    draft = small_draft(shift_label=shift_label, **layers)
    method = Recorded()
    committed = list(prompt_of(6))
    rounds = list(decode_rounds(target, draft, method, committed, max_new_tokens=30))
    assert len(method.seen) > 5
    for round_, proposal in zip(rounds, method.seen, strict=False):
        committed += round_.token_ids
        context = torch.tensor([committed[:-1]])  # the last one is the root, whose features do not exist yet
        layer_ids = draft.config.target_layer_ids
        features = target.forward(context, TargetCache(64), layer_ids=layer_ids).features
        assert features is not None
        anew = draft_block(target, draft, features, committed[-1])
        assert proposal.root_id == committed[-1]
        remaining = 30 - (len(committed) - 6)  # the last of them will be the target's own
        assert len(proposal.hidden) == min(draft.config.draft_length, remaining - 1)
        torch.testing.assert_close(proposal.hidden, anew.hidden[: len(proposal.hidden)], rtol=1e-3, atol=1e-4)
    accepted = [round_.accepted_length or 0 for round_ in rounds[1:]]
    assert max(accepted) > 1


@pytest.mark.parametrize("method", READY_METHODS)
def test_the_same_request_gives_the_same_rounds(method: str) -> None:
    target, draft = target_of("qwen3"), draft_of("qwen3", False, True, 6)
    made: Method = make_method(method)
    first, second = (decode(target, draft, made, list(prompt_of(12)), max_new_tokens=12) for _ in range(2))
    assert (first.token_ids, first.accepted_lengths) == (second.token_ids, second.accepted_lengths)
