"""Children of tree nodes: each scorer against the draft model's teacher-forced logits, computed independently."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from conftest import draft_block, make_draft, make_target
from torch import Tensor

from dominotree.decode.cache import TargetCache
from dominotree.draft.model import DraftModel
from dominotree.target import Target
from dominotree.tree.children import (
    ChildScorer,
    ConditionalScorer,
    MarginalScorer,
    Proposal,
    StaticCorrectedScorer,
)
from dominotree.tree.lanes import ConditionalLanes, DraftBlocks, PreparedHead, greedy_rollout

VOCABULARY = 23
ROOT = 4
ALIGNMENTS = [(True, 0), (True, 1), (True, 3), (False, 0), (False, 1), (False, 2)]  # shift_label, uncorrected drafts


class Block:
    """One drafted block with the model and target it came from."""

    def __init__(self, shift_label: bool = True, uncorrected: int = 1, with_head: bool = True) -> None:
        self.target: Target = make_target(vocab_size=VOCABULARY)
        self.draft: DraftModel = make_draft(
            self.target, shift_label=shift_label, pure_draft_prefix_len=uncorrected, with_head=with_head
        )
        if self.draft.head is not None:
            with torch.no_grad():
                self.draft.head.output_rows.mul_(12.0)  # strong enough to reorder tokens
        prompt = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
        layer_ids = self.draft.config.target_layer_ids
        features = self.target.forward(prompt, TargetCache(8), layer_ids=layer_ids).features
        assert features is not None
        self.proposal: Proposal = draft_block(self.target, self.draft, features, ROOT)
        self.slots = len(self.proposal.hidden)

    def forced_logits(self, path: list[int]) -> Tensor:  # [V]
        """Final logits of the slot behind `path`, from the model's teacher-forced form."""
        prefix = torch.tensor([[ROOT, *path] + [0] * (self.slots - 1 - len(path))])
        hidden, base_logits = self.proposal.hidden[None], self.proposal.base_logits[None]
        return self.draft.teacher_forced_logits(hidden, base_logits, prefix, self.target.embed)[0, len(path)]

    def greedy_path(self) -> list[int]:
        path: list[int] = []
        for _ in range(self.slots):
            path.append(int(self.forced_logits(path).argmax()))
        return path


def best(logits: Tensor, k: int) -> tuple[list[int], list[float]]:
    """The k best tokens of a distribution, by a plain sort."""
    log_probs = (logits.double() - logits.double().logsumexp(-1)).tolist()
    tokens = sorted(range(len(log_probs)), key=lambda token: (-log_probs[token], token))[:k]
    return tokens, [log_probs[token] for token in tokens]


def ask(scorer: ChildScorer[Any], path: list[int]) -> tuple[list[int], list[float]]:
    state = scorer.root_state()
    for token in path:
        state = scorer.advance(state, token)
    return scorer.children(state, len(path))


def same(ours: tuple[list[int], list[float]], expected: tuple[list[int], list[float]]) -> None:
    assert ours[0] == expected[0]
    assert ours[1] == pytest.approx(expected[1], abs=2e-4)


def rollout(proposal: Proposal) -> list[int]:
    assert proposal.head is not None
    prepared = PreparedHead(proposal.head, proposal.embed, VOCABULARY, input_table=False)
    lanes = ConditionalLanes(prepared, DraftBlocks.of(proposal), candidate_width=0, node_topk=1)
    return greedy_rollout(lanes, len(proposal.hidden))[0].tolist()


def random_paths(block: Block, count: int = 6) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCABULARY) for _ in range(slot)] for slot in range(block.slots) for _ in range(count)]


def test_marginal_children_are_the_base_distribution() -> None:
    block = Block(with_head=False)
    scorer = MarginalScorer(block.proposal.base_logits, node_topk=7)
    for path in random_paths(block, count=1):
        same(ask(scorer, path), best(block.proposal.base_logits[len(path)], 7))


@pytest.mark.parametrize(("shift_label", "uncorrected"), ALIGNMENTS)
def test_conditional_children_are_the_teacher_forced_distribution_along_the_path(
    shift_label: bool, uncorrected: int
) -> None:
    block = Block(shift_label, uncorrected)
    everything = ConditionalScorer(block.proposal, candidate_width=0, node_topk=7)
    all_candidates = ConditionalScorer(block.proposal, candidate_width=VOCABULARY, node_topk=7)
    for path in random_paths(block):
        expected = best(block.forced_logits(path), 7)
        same(ask(everything, path), expected)
        same(ask(all_candidates, path), expected)


def test_conditional_children_depend_on_the_path() -> None:
    block = Block()
    scorer = ConditionalScorer(block.proposal, candidate_width=0, node_topk=3)
    assert len({tuple(ask(scorer, [7, first, 2])[0]) for first in range(VOCABULARY)}) > 3


@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize(("shift_label", "uncorrected"), ALIGNMENTS)
def test_a_candidate_width_normalises_over_the_best_base_tokens_only(
    shift_label: bool, uncorrected: int, width: int
) -> None:
    block = Block(shift_label, uncorrected)
    scorer = ConditionalScorer(block.proposal, candidate_width=width, node_topk=5)
    for path in random_paths(block, count=3):
        slot = len(path)
        if slot < uncorrected:
            continue
        candidates = sorted(best(block.proposal.base_logits[slot], width)[0])
        tokens, log_probs = best(block.forced_logits(path)[candidates], 5)
        same(ask(scorer, path), ([candidates[index] for index in tokens], log_probs))


def test_more_children_than_candidates_are_the_candidates() -> None:
    scorer = ConditionalScorer(Block().proposal, candidate_width=4, node_topk=9)
    tokens, log_probs = ask(scorer, [1, 2])
    assert len(set(tokens)) == 4
    assert torch.tensor(log_probs).exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_more_children_than_tokens_are_the_vocabulary() -> None:
    block = Block()
    for scorer in (ConditionalScorer(block.proposal, 0, 99), MarginalScorer(block.proposal.base_logits, 99)):
        assert sorted(ask(scorer, [3, 3])[0]) == list(range(VOCABULARY))


@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("uncorrected", [1, 3])
def test_uncorrected_slots_keep_their_base_distribution_over_the_vocabulary(uncorrected: int, width: int) -> None:
    block = Block(uncorrected=uncorrected)
    conditional = ConditionalScorer(block.proposal, width, node_topk=8)
    static = StaticCorrectedScorer(block.proposal, width, node_topk=8)
    for path in random_paths(block, count=3):
        if len(path) < uncorrected:
            expected = best(block.proposal.base_logits[len(path)], 8)
            same(ask(conditional, path), expected)
            same(ask(static, path), expected)


@pytest.mark.parametrize("width", [0, 5, VOCABULARY])
@pytest.mark.parametrize(("shift_label", "uncorrected"), ALIGNMENTS)
def test_static_children_are_the_conditional_ones_on_the_greedy_chain(
    shift_label: bool, uncorrected: int, width: int
) -> None:
    block = Block(shift_label, uncorrected)
    static = StaticCorrectedScorer(block.proposal, width, node_topk=4)
    conditional = ConditionalScorer(block.proposal, width, node_topk=4)
    path: list[int] = []
    for slot in range(block.slots):
        on_chain = ask(conditional, path)
        same(ask(static, path), on_chain)
        same(ask(static, [0] * slot), on_chain)  # off the chain too
        path.append(on_chain[0][0])


@pytest.mark.parametrize(("shift_label", "uncorrected"), ALIGNMENTS)
def test_the_greedy_rollout_takes_the_best_teacher_forced_token_again_and_again(
    shift_label: bool, uncorrected: int
) -> None:
    block = Block(shift_label, uncorrected)
    assert rollout(block.proposal) == block.greedy_path()


def test_the_correction_changes_the_greedy_chain() -> None:
    block = Block()
    assert block.greedy_path() != block.proposal.base_logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("width", [0, 6])
def test_equal_scores_go_to_the_lowest_ids(width: int) -> None:
    block = Block(uncorrected=1)
    assert block.draft.head is not None
    with torch.no_grad():
        block.draft.head.output_rows.zero_()  # no correction
    proposal = dataclasses.replace(block.proposal, base_logits=torch.zeros_like(block.proposal.base_logits))
    for scorer in (ConditionalScorer(proposal, width, 5), StaticCorrectedScorer(proposal, width, 5)):
        for path in ([], [2], [2, 2]):
            assert ask(scorer, path)[0] == [0, 1, 2, 3, 4]
    assert rollout(proposal) == [0] * block.slots


def test_candidates_that_the_correction_makes_equal_go_to_the_lowest_id() -> None:
    """Token 7 is the better candidate by its base logit; corrected, token 2 comes level with it."""
    block = Block(uncorrected=0)
    head = block.draft.head
    assert head is not None
    state = head.advance(block.target.embed(torch.tensor(ROOT)), head.initial_state(1)[0])
    with torch.no_grad():
        factors = head.low_rank(block.proposal.hidden[0], state)
        largest = factors.abs().argmax()
        head.output_rows.zero_()
        head.output_rows[2, largest] = factors[largest].sign()  # lifts token 2 by the size of that factor
    base_logits = torch.full_like(block.proposal.base_logits, -50.0)
    base_logits[0, 2], base_logits[0, 7] = 0.0, factors[largest].abs()
    scorer = ConditionalScorer(dataclasses.replace(block.proposal, base_logits=base_logits), 3, 2)
    tokens, log_probs = ask(scorer, [])
    assert log_probs[0] == log_probs[1]
    assert tokens == [2, 7]


@pytest.mark.parametrize("scorer", [ConditionalScorer, StaticCorrectedScorer])
def test_a_corrected_tree_needs_a_domino_head(scorer: type) -> None:
    with pytest.raises(ValueError, match="Domino head"):
        scorer(Block(with_head=False).proposal, 0, 4)
