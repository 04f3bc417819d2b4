"""Where a generation ends: an end token, a stop string, or the number of tokens asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UserError
from .text import Detokenizer, find_stop, stop_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Verdict:
    """How many of the fed tokens stay, and why the generation ended: "stop", "length", or None when it goes on."""

    kept: int
    finish_reason: str | None


class Stopping:
    """Decides token by token where one generation ends; fed with every committed run of tokens, in order.

    The first token that is an end token, completes a stop string, or is the `max_new_tokens`-th one ends the generation
    and is kept; what follows it is not. At the last allowed token an end token or a stop string gives "stop".
    A stop string is complete with the first token whose text, decoded with everything before it, contains it.
    """

    def __init__(
        self,
        max_new_tokens: int,
        end_token_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if max_new_tokens < 0:
            raise UserError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
        check_stop_strings(stop_strings)
        if stop_strings and tokenizer is None:
            raise UserError(f"stop strings need the target's tokenizer, and it has none; got stop={list(stop_strings)}")
        self.remaining = max_new_tokens  # tokens that may still be produced
        self.finish_reason: str | None = None if max_new_tokens else "length"
        self._end_token_ids = frozenset(end_token_ids)
        self._stop_strings = tuple(stop_strings)
        self._detokenizer = Detokenizer(tokenizer) if stop_strings and tokenizer is not None else None
        self._held = ""  # the end of the text, as far back as a stop string may begin

    def feed(self, token_ids: Sequence[int]) -> Verdict:
        """Judge the next tokens; once the generation has ended, none is kept."""
        for index, token_id in enumerate(token_ids):
            if self.finish_reason is not None:
                return Verdict(index, self.finish_reason)
            self.remaining -= 1
            if self._completes_stop_string(token_id) or token_id in self._end_token_ids:
                self.finish_reason = "stop"
            elif self.remaining <= 0:
                self.finish_reason = "length"
        return Verdict(len(token_ids), self.finish_reason)

    def _completes_stop_string(self, token_id: int) -> bool:
        if self._detokenizer is None:
            return False
        self._held += self._detokenizer.push([token_id])
        if find_stop(self._held + self._detokenizer.peek(), self._stop_strings) is not None:
            return True
        self._held = self._held[stop_start(self._held, self._stop_strings) :]
        return False


def check_stop_strings(stop_strings: Sequence[str]) -> None:
    """UserError where a stop string is empty, or a bare string stands where a list of them belongs."""
    if isinstance(stop_strings, str):
        raise UserError(f"stop must be a list of strings, got the string {stop_strings!r}")
    if any(not stop for stop in stop_strings):
        raise UserError(f"a stop string must not be empty, got stop={list(stop_strings)}")
