"""Tokens to text while they are being produced: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CLEAN_UP_BORDER = re.compile(r"(?<=[^\W_])(?= [^\W_])")
_TRIM_AT = 16  # tokens in the window from which old ones are let go


class Detokenizer:
    """Turns token ids into text piece by piece, decoding only a short window of recent tokens each time.

    The pieces, joined, are `tokenizer.decode(all_ids, skip_special_tokens=True)` for any ids and any split of them.
    To keep that promise some text waits for the next token: the last bytes of a character that is not complete yet,
    and a run of byte tokens (`<0xE2>`, sentencepiece), which decodes to U+FFFD as a whole once one byte of it is wrong.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._special_tokens = _special_tokens(tokenizer)
        self._cleans_up = _cleans_up(tokenizer)
        self._window: list[int] = []  # recent ids; it begins where a character begins
        self._whole = 0  # the window's first ids that end on a whole character and are shown
        self._shown = 0  # characters of the window's text already returned
        self._tail = ""  # decoded, but the tokenizer's clean-up of spaces may still change it

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these ids."""
        self._window += [token_id for token_id in token_ids if self._is_text(token_id)]
        stable = self._stable_length()
        text = self._decode(self._window[:stable])
        is_whole = not text.endswith(REPLACEMENT)
        end = len(text) if is_whole else len(text) - 1
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        if is_whole and stable > self._whole:
            self._advance(stable)
        return self._cleaned(piece)

    def peek(self) -> str:
        """What `flush` would return now; changes nothing."""
        text = self._tail + self._decode(self._window)[self._shown :]
        return self._tokenizer.clean_up_tokenization(text) if self._cleans_up else text

    def flush(self) -> str:
        """The rest, as the tokenizer decodes it: U+FFFD for a character that never became complete."""
        rest = self.peek()
        self._window, self._whole, self._shown, self._tail = [], 0, 0, ""
        return rest

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _token(self, token_id: int) -> str | None:
        if self._backend is not None:
            return self._backend.id_to_token(token_id)
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return token if isinstance(token, str) else None

    def _is_text(self, token_id: int) -> bool:
        """Whether decoding looks at this id at all: it skips special tokens and ids without an entry."""
        token = self._token(token_id)
        return token is not None and token not in self._special_tokens

    def _stable_length(self) -> int:
        """How many ids of the window come before its trailing run of byte tokens."""
        length = len(self._window)
        while length and _BYTE_TOKEN.fullmatch(self._token(self._window[length - 1]) or ""):
            length -= 1
        return length

    def _advance(self, stable: int) -> None:
        """Remember the whole characters up to `stable`, and let go of what lies before the previous such place.

        Something before the new text always stays, as decoders treat the first token apart (its space, for one).
        """
        if stable < _TRIM_AT:
            self._whole = stable
            return
        kept = self._decode(self._window[self._whole : stable])
        if kept:
            self._window = self._window[self._whole :]
            self._whole, self._shown = stable - self._whole, len(kept)

    def _cleaned(self, piece: str) -> str:
        """Apply the tokenizer's own clean-up of spaces, where it has one, up to a place that it cannot reach across."""
        if not self._cleans_up:
            return piece
        self._tail += piece
        borders = [border.start() for border in _CLEAN_UP_BORDER.finditer(self._tail)]
        cut = borders[-1] if borders else 0
        ready, self._tail = self._tail[:cut], self._tail[cut:]
        return self._tokenizer.clean_up_tokenization(ready)


class TextStream:
    """The text that may be shown: `Detokenizer` cut before the first stop string, with what may begin one held back.

    The stop string that is complete first ends the text; of two complete at the same character, the longer one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()) -> None:
        self.text = ""  # everything returned so far
        self.stopped = False
        self._stop_strings = tuple(stop_strings)
        self._detokenizer = Detokenizer(tokenizer)
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that may be shown after these ids."""
        return self._release(self._detokenizer.push(token_ids), is_last=False)

    def flush(self) -> str:
        """The rest of the text: nothing will follow, so nothing is held back for a stop string."""
        return self._release(self._detokenizer.flush(), is_last=True)

    def _release(self, piece: str, is_last: bool) -> str:
        if self.stopped:
            return ""
        self._held += piece
        found = find_stop(self._held, self._stop_strings)
        self.stopped = found is not None
        if found is not None:
            end = found[0]
        else:
            end = len(self._held) if is_last else stop_start(self._held, self._stop_strings)
        shown, self._held = self._held[:end], self._held[end:]
        self.text += shown
        return shown


def find_stop(text: str, stop_strings: Sequence[str]) -> tuple[int, int] | None:
    """Start and end (characters, end exclusive) of the stop string that is complete first; None without any."""
    starts = [(text.find(stop), len(stop)) for stop in stop_strings]
    found = [(start + length, start) for start, length in starts if start >= 0]
    if not found:
        return None
    end, start = min(found)
    return start, end


def stop_start(text: str, stop_strings: Sequence[str]) -> int:
    """The first character (index) from which `text` may be the beginning of a stop string; its length without any."""
    longest = max((len(stop) for stop in stop_strings), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(stop.startswith(text[start:]) for stop in stop_strings):
            return start
    return len(text)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The tokens that `skip_special_tokens` leaves out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return frozenset(tokenizer.all_special_tokens)
    return frozenset(token.content for token in backend.get_added_tokens_decoder().values() if token.special)


def _cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `tokenizer.decode` removes spaces before punctuation; newer transformers leave BPE tokenizers alone."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", None)
    is_bpe = backend is not None and type(backend.model).__name__ == "BPE"
    return not is_bpe or forced is None or bool(forced)
