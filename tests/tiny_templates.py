"""Chat templates of the kinds that are about, on a byte tokenizer, and a tiny target that speaks them."""

from __future__ import annotations

from typing import Any

from conftest import make_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from dominotree.target import Target

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 3: contents are stripped.
STRIPPING = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
# As Llama 2: the answer stands behind a space that belongs to it, and no special token opens a turn.
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
# As Qwen3: an empty thought opens the answer, and is left out of earlier ones.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# No special token anywhere: nothing but a line end closes a turn.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}" + CHATML
MARKED = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")


# The byte alphabet's letters for the bytes 0..127.
ASCII = [chr(code) for code in (*range(33, 127), *range(256, 290))]


def tokenizer(
    template: str | None = CHATML, merges: tuple[tuple[str, str], ...] = (), *, ascii_only: bool = False
) -> PreTrainedTokenizerFast:
    """Bytes, special tokens, and the merges given (in the byte alphabet, where Ċ is a line end and Ġ a space)."""
    letters = ASCII if ascii_only else sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *letters, *(one + other for one, other in merges)]
    made = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=template)


def talking_target(template: str | None = CHATML, *, end_every: int = 20, **options: Any) -> Target:
    """A random target that speaks ASCII; about one token in `end_every` ends a turn, so that turns are short."""
    target = make_target(vocab_size=len(SPECIAL) + len(ASCII), **options)
    ends = list(range(1, target.vocab_size, end_every))
    target.model.generation_config = GenerationConfig(eos_token_id=ends)
    return Target(target.model, tokenizer(template, ascii_only=True))


def said(*contents: str, **extra: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn; `extra` goes into the last one."""
    messages = [
        {"role": "assistant" if index % 2 else "user", "content": content} for index, content in enumerate(contents)
    ]
    messages[-1] |= extra
    return messages
