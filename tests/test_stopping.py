"""Where a generation ends: the first end token, completed stop string or last allowed token, wherever runs are cut."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dominotree.decode.stopping import Stopping, Verdict
from dominotree.decode.text import TextStream, find_stop
from dominotree.errors import UserError


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, a few of several letters, one special token that ends."""
    pieces = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "ca", "Ġab", "abab"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def ids_of(pieces: list[str]) -> list[int]:
    return [byte_tokenizer().convert_tokens_to_ids(piece) for piece in pieces]


def first_end(ids: list[int], max_new_tokens: int, ends: set[int], stops: list[str]) -> tuple[int, str | None]:
    """The definition, by decoding every beginning of the ids."""
    for count in range(1, len(ids) + 1):
        text = byte_tokenizer().decode(ids[:count], skip_special_tokens=True)
        if ids[count - 1] in ends or any(stop in text for stop in stops):
            return count, "stop"
        if count == max_new_tokens:
            return count, "length"
    return len(ids), None


LETTERS = ["a", "b", "c", "Ġ", "ab", "abc", "ca", "Ġab", "abab", "<|end|>", "ð", "Ł", "ĺ", "Ģ"]  # the last four: 😀
PIECES = st.lists(st.sampled_from(LETTERS), max_size=25)
STOPS = st.lists(st.text(alphabet="abc 😀", min_size=1, max_size=4), max_size=3)


@settings(max_examples=600, deadline=None)
@given(
    pieces=PIECES,
    stops=STOPS,
    runs=st.lists(st.integers(1, 6), min_size=25, max_size=25),
    max_new_tokens=st.integers(1, 30),
    ends=st.sets(st.sampled_from([0, 40, 41]), max_size=2),
)
def test_ends_where_the_definition_says(
    pieces: list[str], stops: list[str], runs: list[int], max_new_tokens: int, ends: set[int]
) -> None:
    ids = ids_of(pieces)
    count, reason = first_end(ids, max_new_tokens, ends, stops)
    stopping = Stopping(max_new_tokens, ends, stops, byte_tokenizer())
    stream = TextStream(byte_tokenizer(), stops)
    kept: list[int] = []
    rest = ids
    for size in runs:
        verdict = stopping.feed(rest[:size])
        kept += rest[: verdict.kept]
        stream.push(rest[: verdict.kept])
        rest = rest[size:]
        assert stopping.remaining == max_new_tokens - len(kept)
        if verdict.finish_reason or not rest:
            break
    stream.flush()
    assert (kept, stopping.finish_reason) == (ids[:count], reason)
    text = byte_tokenizer().decode(kept, skip_special_tokens=True)
    found = find_stop(text, stops)
    assert stream.text == (text if found is None else text[: found[0]])


def test_the_last_allowed_token_may_still_be_a_stop() -> None:
    assert Stopping(2, {7}).feed([5, 7]) == Verdict(2, "stop")
    assert Stopping(2, {7}).feed([5, 6]) == Verdict(2, "length")
    assert Stopping(2, {7}).feed([5]) == Verdict(1, None)


def test_tokens_after_the_end_are_not_kept() -> None:
    stopping = Stopping(10, {7})
    assert stopping.feed([1, 7, 2, 7]) == Verdict(2, "stop")
    assert stopping.feed([3]) == Verdict(0, "stop")
    assert stopping.remaining == 8


def test_no_token_is_kept_when_none_is_asked_for() -> None:
    assert Stopping(0).feed([1, 2]) == Verdict(0, "length")


def test_a_stop_string_inside_one_token() -> None:
    stopping = Stopping(10, (), ["ba"], byte_tokenizer())
    assert stopping.feed(ids_of(["c", "abab", "c"])) == Verdict(2, "stop")


def test_a_stop_string_over_three_runs() -> None:
    stopping = Stopping(10, (), ["bcab"], byte_tokenizer())
    assert stopping.feed(ids_of(["a", "b"])).finish_reason is None
    assert stopping.feed(ids_of(["ca"])).finish_reason is None
    assert stopping.feed(ids_of(["b", "c"])) == Verdict(1, "stop")


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(UserError, match="tokenizer"):
        Stopping(3, (), ["x"])


@pytest.mark.parametrize("stops", [[""], ["a", ""], "END"])
def test_stop_strings_that_say_nothing_are_refused(stops: list[str]) -> None:
    with pytest.raises(UserError, match="stop"):
        Stopping(3, (), stops, byte_tokenizer())


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(UserError, match="max_new_tokens must be 0 or more, got -1"):
        Stopping(-1)
