"""Text while decoding: the pieces join to exactly the tokenizer's own text, and no stop string is ever shown."""

from __future__ import annotations

import functools
import itertools
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dominotree.decode.text import Detokenizer, TextStream, find_stop, stop_start

TEXTS = [
    "Hello, world! It's a test.",
    "naïve café – über",
    "日本語のテキスト、漢字",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 emoji",
    "def f(x):\n\treturn x  +  1\n",
] * 3
SPECIAL = ["<|end|>", "<|pad|>"]


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False),
    )
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("é→", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def sentencepiece_vocabulary() -> dict[str, int]:
    pieces = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [
        "▁",
        "▁▁",
        "▁Hello",
        "▁world",
        "Hello",
        ",",
        "!",
        "▁日本",
        "語",
        "é",
        "a",
        "b",
        "▁a",
        "<0x",
        "\ufffd",
        "\n",
    ]
    return {piece: index for index, piece in enumerate(pieces)}


def sentencepiece_bpe() -> PreTrainedTokenizerFast:
    """The shape of Llama 2 and Mistral: byte fallback, then one leading space taken off."""
    tokenizer = Tokenizer(models.BPE(vocab=sentencepiece_vocabulary(), merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentencepiece_unigram() -> PreTrainedTokenizerFast:
    vocabulary = [(piece, -1.0) for piece in sentencepiece_vocabulary()]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def word_level(clean_up: bool = False) -> PreTrainedTokenizerFast:
    words = [*SPECIAL, "it", "is", "n't", "'s", ".", ",", "'", "'m", "do", "日本", "\ufffd", "?", "!", "'ve", "x'", "n"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=clean_up
    )


def word_piece() -> PreTrainedTokenizerFast:
    pieces = [*SPECIAL, "it", "##s", "##n't", "n't", ".", ",", "'", "do", "##日本", "日本", "?", "##.", "'s"]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="<|pad|>"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def end_of_word_bpe() -> PreTrainedTokenizerFast:
    pieces = [*SPECIAL, "a", "b", "c</w>", "ab</w>", "日</w>", ".</w>"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


MAKERS = {
    "byte level": byte_level,
    "sentencepiece BPE": sentencepiece_bpe,
    "sentencepiece unigram": sentencepiece_unigram,
    "word level": word_level,
    "word level with clean-up": functools.partial(word_level, clean_up=True),
    "WordPiece": word_piece,
    "end-of-word BPE": end_of_word_bpe,
}


@functools.cache
def make(kind: str) -> PreTrainedTokenizerFast:
    return MAKERS[kind]()


def split(items: list[int], cuts: list[int]) -> list[list[int]]:
    """The items in runs, some of them empty, cut at the given places."""
    places = [0, *sorted(cut % (len(items) + 1) for cut in cuts), len(items)]
    return [items[start:end] for start, end in itertools.pairwise(places)]


def decoded(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


IDS = st.lists(st.integers(0, 345), max_size=60)
CUTS = st.lists(st.integers(0, 60), max_size=12)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=300, deadline=None)
@given(ids=IDS, cuts=CUTS, modulus=st.booleans())
def test_pieces_join_to_what_the_tokenizer_decodes(kind: str, ids: list[int], cuts: list[int], modulus: bool) -> None:
    tokenizer = make(kind)
    ids = [token_id % len(tokenizer) for token_id in ids] if modulus else ids
    for runs in (split(ids, cuts), [[token_id] for token_id in ids]):
        detokenizer = Detokenizer(tokenizer)
        so_far: list[int] = []
        text = ""
        for run in runs:
            text += detokenizer.push(run)
            so_far += run
            assert text + detokenizer.peek() == decoded(tokenizer, so_far)
        assert text + detokenizer.flush() == decoded(tokenizer, ids)
        assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="日本語é😀👩‍ aHellowrd,.!\n'", max_size=40))
def test_characters_are_never_shown_broken(kind: str, text: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    for token_id in ids:
        assert "\ufffd" not in detokenizer.push([token_id])


def test_a_long_text_is_decoded_in_short_windows() -> None:
    tokenizer = make("byte level")
    ids = tokenizer(" ".join(TEXTS * 40), add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    longest = 0
    for token_id in ids:
        detokenizer.push([token_id])
        longest = max(longest, len(detokenizer._window))
    assert len(ids) > 2000
    assert longest <= 40


def test_a_character_over_two_runs_appears_whole() -> None:
    tokenizer = make("byte level")
    ids = tokenizer("🦀", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:1]) == ""
    assert detokenizer.push(ids[1:]) == "🦀"


def test_an_incomplete_character_at_the_end_is_given_as_the_tokenizer_gives_it() -> None:
    tokenizer = make("byte level")
    ids = tokenizer("x🦀", add_special_tokens=False)["input_ids"][:-1]
    stream = TextStream(tokenizer)
    assert stream.push(ids) == "x"
    assert stream.flush() == "\ufffd"
    assert stream.text == decoded(tokenizer, ids)


STOPS = st.lists(
    st.one_of(st.text(alphabet="ab 日é\n.", min_size=1, max_size=4), st.text(min_size=1, max_size=2)), max_size=4
)
STOP_TEXT = st.text(alphabet="ab 日é\n.😀", max_size=30)


def cut_text(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, by looking at every beginning of it."""
    for end in range(len(text) + 1):
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(ending)]
    return text


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece BPE"])
@settings(max_examples=300, deadline=None)
@given(text=STOP_TEXT, stops=STOPS, cuts=CUTS)
def test_the_stream_shows_the_text_before_the_stop_string(
    kind: str, text: str, stops: list[str], cuts: list[int]
) -> None:
    tokenizer = make(kind)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = cut_text(decoded(tokenizer, ids), stops)
    stream = TextStream(tokenizer, stops)
    shown = ""
    for run in split(ids, cuts):
        shown += stream.push(run)
        assert stream.text == shown
        assert expected.startswith(shown)
    shown += stream.flush()
    assert shown == stream.text == expected
    assert stream.stopped == (expected != decoded(tokenizer, ids))
    assert stream.push(ids) == (stream.flush() if stream.stopped else stream.text[len(shown) :])


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("END", ["END"], ""),
        ("abcd", ["abcd", "bc"], "a"),
        ("abc", ["abc", "bc", "c"], ""),
        ("aab", ["ab"], "a"),
        ("abab!", ["abac", "bab"], "a"),
        ("日本語のテ", ["語の"], "日本"),
        ("🦀🦀", ["🦀"], ""),
        ("line\n\nmore", ["\n\n"], "line"),
        ("nothing", ["END"], "nothing"),
    ],
)
def test_stop_strings_cut_the_text(text: str, stops: list[str], expected: str) -> None:
    tokenizer = make("byte level")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for runs in ([ids], [[token_id] for token_id in ids]):
        stream = TextStream(tokenizer, stops)
        shown = "".join([stream.push(run) for run in runs]) + stream.flush()
        assert shown == stream.text == expected == cut_text(text, stops)


def test_a_tail_that_may_begin_a_stop_string_waits() -> None:
    tokenizer = make("byte level")
    first, second = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("go #", "#x"))
    stream = TextStream(tokenizer, ["###"])
    assert stream.push(first) == "go "
    assert stream.push(second) == "##x"


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abc", max_size=12), stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4)))
def test_find_stop_and_stop_start_agree_with_their_definition(text: str, stops: list[str]) -> None:
    found = find_stop(text, stops)
    assert (text if found is None else text[: found[0]]) == cut_text(text, stops)
    begins = [i for i in range(len(text)) if any(len(text) - i < len(s) and s.startswith(text[i:]) for s in stops)]
    if found is None:
        assert stop_start(text, stops) == min(begins, default=len(text))


def test_specials_and_ids_without_an_entry_give_no_text() -> None:
    tokenizer = make("byte level")
    special = tokenizer.convert_tokens_to_ids("<|end|>")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([special, 100_000, special]) == ""
    letters = tokenizer.convert_tokens_to_ids(list(string.ascii_lowercase))
    assert detokenizer.push([letters[0], special, letters[1]]) == "ab"
