"""Prompt tokens: the chat template where there is one, the text itself where it is raw."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dominotree.chat import encode_chat, encode_raw
from dominotree.errors import UserError

TEMPLATE = """{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\
<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant:{% if enable_thinking is defined and enable_thinking is false %}\
[no thinking]{% endif %}{% endif %}"""


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """One token a byte; by itself it puts <|start|> in front of a text."""
    pieces = ["<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


def test_the_template_is_applied_with_thinking_off() -> None:
    tokenizer = tokenizer_with(TEMPLATE)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo\n 🦀 "}]
    ids = encode_chat(tokenizer, messages)
    assert tokenizer.decode(ids) == (
        "<|start|>system:Be brief.<|end|><|start|>user:Héllo\n 🦀 <|end|><|start|>assistant:[no thinking]"
    )


def test_the_template_s_own_tokens_are_not_doubled() -> None:
    ids = encode_chat(tokenizer_with(TEMPLATE), [{"role": "user", "content": "x"}])
    assert ids.count(0) == 2


def test_a_tokenizer_without_template_names_raw() -> None:
    with pytest.raises(UserError, match="raw=true"):
        encode_chat(tokenizer_with(None), [{"role": "user", "content": "x"}])


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(UserError, match="no tools here"):
        encode_chat(tokenizer_with(TEMPLATE), [{"role": "tool", "content": "x"}])


def test_raw_text_is_tokenized_as_it_is() -> None:
    tokenizer = tokenizer_with(None)
    ids = encode_raw(tokenizer, "  a=b, {c}\n")
    assert ids[0] == 0
    assert tokenizer.decode(ids[1:]) == "  a=b, {c}\n"
