"""Where an output ends: at the first end token wherever in a block it falls, or after exactly the tokens asked for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import READY_METHODS, decode_guided, greedy, make_draft, make_target

from dominotree.decode.generation import Generation
from dominotree.decode.loop import decode, decode_rounds
from dominotree.decode.methods import make_method
from dominotree.decode.stopping import Stopping
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError
from dominotree.target import Target

PROMPT = [3, 1, 4, 1, 5]
BLOCK = 6
COUNT = 20


@functools.cache
def target_of() -> Target:
    """Over a larger vocabulary, so that its output repeats no token too soon."""
    return make_target(vocab_size=47, seed=48)


@functools.cache
def draft_of(block_size: int = BLOCK, shift_label: bool = True) -> DraftModel:
    return make_draft(target_of(), block_size=block_size, shift_label=shift_label)


@functools.cache
def truth() -> list[int]:
    return greedy(target_of(), PROMPT, 40)


def cut_at(end: int, count: int = COUNT) -> tuple[list[int], str]:
    """Plain decoding of `count` tokens, cut behind the first `end` in it."""
    ids = truth()[:count]
    return (ids[: ids.index(end) + 1], "stop") if end in ids else (ids, "length")


def consistent(ours: Generation) -> bool:
    """The first token comes from the prefill, every other from a round."""
    return sum(ours.accepted_lengths) + 1 == len(ours.token_ids)


def test_the_output_holds_many_different_tokens() -> None:
    assert len(set(truth()[:COUNT])) > 8


@pytest.mark.parametrize("method", READY_METHODS)
def test_the_k_th_token_as_end_token_cuts_every_method_there(method: str) -> None:
    for end in dict.fromkeys(truth()[:COUNT]):
        stopping = Stopping(COUNT, {end})
        ours = decode(target_of(), draft_of(), make_method(method), PROMPT, max_new_tokens=COUNT, stopping=stopping)
        assert (ours.token_ids, ours.finish_reason) == cut_at(end)
        assert consistent(ours)


@pytest.mark.parametrize("method", [name for name in READY_METHODS if name != "ar"])
@pytest.mark.parametrize("right", [2, 99], ids=["bonus after two drafts", "whole blocks"])
def test_an_end_token_inside_an_accepted_path_or_on_the_bonus_token_ends_there(method: str, right: int) -> None:
    """Drafts are right, so that every place of a block, the bonus token's included, holds the end token once."""
    places: set[int] = set()
    for end in dict.fromkeys(truth()[:COUNT]):
        ours = decode_guided(
            target_of(),
            draft_of(),
            make_method(method),
            PROMPT,
            truth(),
            lambda round_: right,
            max_new_tokens=COUNT,
            stopping=Stopping(COUNT, {end}),
        )
        assert (ours.token_ids, ours.finish_reason) == cut_at(end)
        assert consistent(ours)
        places.add(ours.accepted_lengths[-1] if ours.accepted_lengths else 0)
    assert places >= ({0, 1, 2, 3} if right == 2 else set(range(BLOCK + 2)))


def test_several_end_tokens_end_at_the_first_of_them() -> None:
    ids = truth()
    ends = {ids[11], ids[6], ids[14]}
    first = min(ids.index(end) for end in ends)
    ours = decode(
        target_of(), draft_of(), make_method("dominotree"), PROMPT, max_new_tokens=COUNT, stopping=Stopping(COUNT, ends)
    )
    assert ours.token_ids == ids[: first + 1]
    assert ours.finish_reason == "stop"


@pytest.mark.parametrize("as_list", [True, False])
def test_the_target_s_own_end_tokens_count_without_being_named(as_list: bool) -> None:
    target = make_target(vocab_size=47, seed=48)
    end = truth()[5]
    target.model.generation_config.eos_token_id = [46, end] if as_list else end
    ours = decode(target, draft_of(), make_method("dominotree"), PROMPT, max_new_tokens=COUNT)
    assert (ours.token_ids, ours.finish_reason) == cut_at(end)
    assert ours.token_ids == greedy(target, PROMPT, COUNT)


@pytest.mark.parametrize("method", READY_METHODS)
@pytest.mark.parametrize(("block_size", "shift_label"), [(2, True), (BLOCK, True), (BLOCK, False)])
def test_exactly_the_tokens_asked_for(method: str, block_size: int, shift_label: bool) -> None:
    for count in sorted({0, 1, 2, block_size - 1, block_size, block_size + 1, block_size + 2, COUNT}):
        draft = draft_of(block_size, shift_label)
        ours = decode(target_of(), draft, make_method(method), PROMPT, max_new_tokens=count)
        assert ours.token_ids == truth()[:count]
        assert ours.finish_reason == "length"
        assert consistent(ours) or count == 0


@pytest.mark.parametrize("method", ["dflash", "domino", "ddtree", "static_corrected", "dominotree"])
def test_right_drafts_do_not_run_past_the_tokens_asked_for(method: str) -> None:
    for count in range(1, 2 * BLOCK + 4):
        ours = decode_guided(
            target_of(), draft_of(), make_method(method), PROMPT, truth(), lambda round_: 99, max_new_tokens=count
        )
        assert ours.token_ids == truth()[:count]
        assert ours.finish_reason == "length"
        assert consistent(ours)


def test_an_end_token_at_the_last_allowed_place_is_a_stop() -> None:
    end = truth()[7]
    assert end not in truth()[:7]
    for method in READY_METHODS:
        ours = decode(
            target_of(), draft_of(), make_method(method), PROMPT, max_new_tokens=8, stopping=Stopping(8, {end})
        )
        assert (ours.token_ids, ours.finish_reason) == (truth()[:8], "stop")


def test_rounds_are_yielded_as_they_are_committed_and_nothing_follows_the_last() -> None:
    rounds = list(decode_rounds(target_of(), draft_of(), make_method("dominotree"), PROMPT, max_new_tokens=COUNT))
    assert len(rounds[0].token_ids) == 1 and rounds[0].accepted_length is None
    assert all(len(round_.token_ids) == round_.accepted_length for round_ in rounds[1:])
    assert [round_.finish_reason for round_ in rounds] == [None] * (len(rounds) - 1) + ["length"]
    assert set(rounds[0].seconds) == {"prefill"}
    assert all(set(round_.seconds) == {"draft", "build", "verify", "commit"} for round_ in rounds[1:])


def test_the_prompt_and_output_may_fill_the_context_exactly() -> None:
    target = make_target(vocab_size=47, seed=48)
    target.model.config.max_position_embeddings = len(PROMPT) + 9
    ours = decode(target, draft_of(), make_method("dominotree"), PROMPT, max_new_tokens=9)
    assert ours.token_ids == truth()[:9]


class TestRefusals:
    """What cannot be served is refused before the target is run once."""

    @pytest.fixture
    def untouched(self) -> Iterator[Target]:
        target = make_target(vocab_size=47, seed=48)
        calls: list[Any] = []
        target.model.register_forward_pre_hook(lambda *arguments: calls.append(arguments))
        yield target
        assert not calls

    @pytest.mark.parametrize("method", READY_METHODS)
    @pytest.mark.parametrize(
        ("prompt", "count", "message"),
        [
            ([], 5, "the prompt is empty"),
            (PROMPT, -1, "max_new_tokens must be 0 or more, got -1"),
            ([1] * 257, 0, "257 tokens .* context of 256 tokens"),
            ([1] * 250, 7, "250 tokens and max_new_tokens=7 exceed the target's context of 256 tokens"),
        ],
    )
    def test_requests(self, untouched: Target, method: str, prompt: list[int], count: int, message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            decode(untouched, draft_of(), make_method(method), prompt, max_new_tokens=count)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("method", [name for name in READY_METHODS if name != "ar"])
    def test_a_method_that_drafts_without_a_drafter(self, untouched: Target, method: str) -> None:
        with pytest.raises(UserError, match=f"method {method} needs a drafter"):
            decode(untouched, None, make_method(method), PROMPT, max_new_tokens=3)

    @pytest.mark.parametrize("method", ["domino", "static_corrected", "dominotree"])
    def test_a_plain_dflash_drafter_where_a_head_is_needed(self, untouched: Target, method: str) -> None:
        with pytest.raises(UserError, match="Domino head"):
            decode(untouched, make_draft(untouched, with_head=False), make_method(method), PROMPT, max_new_tokens=3)

    def test_a_drafter_made_for_another_target(self, untouched: Target) -> None:
        other = make_draft(make_target(vocab_size=13))
        with pytest.raises(UserError, match="vocabulary is 13, the target's 47"):
            decode(untouched, other, make_method("dominotree"), PROMPT, max_new_tokens=3)


def test_methods_that_need_no_head_take_a_plain_dflash_drafter() -> None:
    draft = make_draft(target_of(), with_head=False, shift_label=False)
    for method in ("ar", "dflash", "ddtree"):
        ours = decode(target_of(), draft, make_method(method), PROMPT, max_new_tokens=10)
        assert ours.token_ids == truth()[:10]


def test_plain_decoding_needs_no_drafter() -> None:
    ours = decode(target_of(), None, make_method("ar"), PROMPT, max_new_tokens=10)
    assert ours.token_ids == truth()[:10]
    assert torch.is_grad_enabled()  # decoding leaves global state alone
