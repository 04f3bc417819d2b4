"""From a conversation, or raw text, to prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from .errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # with `role` and `content`


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Prompt ids of a conversation: the chat template with the generation prompt.

    Raises UserError for a tokenizer without a template, and where the template refuses the messages (a system
    message, say).
    """
    return text_ids(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=True))


def encode_raw(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Prompt ids of text as it is, with the special tokens that the tokenizer adds by itself."""
    return list(tokenizer(text)["input_ids"])


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    """The conversation's text, thinking off where the template knows of it; keys beside role and content are left out.

    Raises UserError for a tokenizer without a chat template, and where the template refuses the messages.
    """
    require_template(tokenizer)
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=add_generation_prompt, enable_thinking=False
        )
    except (TemplateError, ValueError) as error:
        roles = [message["role"] for message in plain]
        raise UserError(f"the target's chat template refuses these messages (roles {roles}): {error}") from error
    assert isinstance(text, str)
    return text


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise UserError(
            "the target's tokenizer has no chat template; use a chat model, or, to generate, give the text as it is "
            "with raw=true"
        )


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of rendered text: the template has written the special tokens already."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
