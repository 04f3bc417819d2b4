"""Conversations as the target's chat template writes them, and where in that text a user begins to speak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dominotree.chat import Message, render_chat, text_ids
from dominotree.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "USERWORDS"


def user_prefix(tokenizer: PreTrainedTokenizerBase, history: Sequence[Message]) -> str:
    """The text up to where the words of the next user turn begin: behind it a chat model writes such a turn itself.

    Raises UserError where the template has no such place, or refuses the history.
    """
    return _around_user_words(tokenizer, history)[0]


def user_end_ids(tokenizer: PreTrainedTokenizerBase, end_token_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end a user turn: the target's end tokens, and the special token that the template puts there."""
    _, after = _around_user_words(tokenizer, ())
    first = text_ids(tokenizer, after)[:1]
    return end_token_ids | (frozenset(first) & special_ids(tokenizer))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that stand for no text: those that decoding with `skip_special_tokens` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}


def _around_user_words(tokenizer: PreTrainedTokenizerBase, history: Sequence[Message]) -> tuple[str, str]:
    """What the template writes before and after the words of a last user turn."""
    asked = [*history, {"role": "user", "content": _PLACEHOLDER}]
    before, found, after = render_chat(tokenizer, asked, add_generation_prompt=False).rpartition(_PLACEHOLDER)
    if not found:
        raise UserError("the target's chat template leaves a user turn out, so none can be written; use prompts")
    return before, after
