"""From a conversation, or raw text, to prompt tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import TemplateError

from .errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Prompt ids of a conversation: the chat template with the generation prompt, thinking off where it knows of it.

    messages: dictionaries with `role` and `content`, in order. Raises UserError for a tokenizer without a template
    (raw text is the way there), and where the template refuses the messages (a system message, say).
    """
    if not tokenizer.chat_template:
        raise UserError(
            "the target's tokenizer has no chat template; give the text as it is with raw=true, or use a chat model"
        )
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    except (TemplateError, ValueError) as error:
        roles = [message.get("role") for message in messages]
        raise UserError(f"the target's chat template refuses these messages (roles {roles}): {error}") from error
    assert isinstance(text, str)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_raw(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Prompt ids of text as it is, with the special tokens that the tokenizer adds by itself."""
    return list(tokenizer(text)["input_ids"])
