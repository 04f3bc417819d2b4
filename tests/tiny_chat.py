"""A tiny chat model with drafters on disk, and a scripted decoding loop, for the tests of the generate command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conftest import make_draft, make_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dominotree.decode.generation import Round
from dominotree.draft.checkpoint import save_draft

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[reply]{% endif %}"
)


def byte_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    pieces = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)


def save_tiny_models(folder: Path) -> None:
    """A target with a chat template, one without, a drafter that fits, a plain DFlash one, one of another size."""
    target = make_target(vocab_size=260, seed=3)
    for name, template in (("target", TEMPLATE), ("base", None)):
        target.model.save_pretrained(folder / name)
        byte_tokenizer(template).save_pretrained(folder / name)
    save_draft(make_draft(target), folder / "draft")
    save_draft(make_draft(make_target(vocab_size=13)), folder / "other_draft")
    save_draft(make_draft(target, with_head=False, shift_label=False), folder / "dflash_draft")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scripted(
    runs: list[list[int]], after: Callable[[int], None] = lambda index: None
) -> Callable[..., Iterator[Round]]:
    """A stand-in for the decoding loop that commits these runs of tokens; `after` is called when one was taken."""

    def rounds(*_: Any, stopping: Any, **__: Any) -> Iterator[Round]:
        for index, run in enumerate(runs):
            verdict = stopping.feed(run)
            yield Round(run[: verdict.kept], verdict.kept if index else None, {"commit": 0.1}, verdict.finish_reason)
            after(index)
            if verdict.finish_reason is not None:
                return

    return rounds


def ids_of(text: str) -> list[int]:
    return byte_tokenizer(None)(text)["input_ids"]
