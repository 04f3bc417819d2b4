"""Training samples: a conversation's tokens, and which of them the target wrote.

What the target wrote is found from the chat template alone: an answer begins where the template, asked for a prompt,
ends.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from filelock import FileLock

from data.chat_text import special_ids
from data.conversations import FILE_NAME, ConversationStore, Dropped
from data.download import say
from data.progress import progress_bar
from data.provenance import tokenizer_fingerprint, write_json
from dominotree.chat import render_chat, require_template, text_ids
from dominotree.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASK_VERSION = 1  # raise when the same conversation gives other tokens or another mask, so that nothing stale is used


@dataclass(frozen=True)
class Sample:
    sample_id: int  # of the conversation
    token_ids: list[int]  # [S]
    loss_mask: list[bool]  # [S] True on tokens the target wrote: its answers, each with its end-of-turn token


def make_sample(
    tokenizer: PreTrainedTokenizerBase,
    sample_id: int,
    messages: Sequence[Mapping[str, Any]],
    max_length: int,
    min_supervised: int = 2,
) -> Sample:
    """The conversation as the target reads it, at most `max_length` tokens of it.

    An answer whose message has `"finish_reason": "length"` was cut off, so its end token is not the target's. An answer
    that a template shows otherwise than it was given (earlier thinking left out, say) stays unsupervised.
    Raises Dropped when fewer than `min_supervised` tokens, or no two in a row, are the target's: `no_assistant_turn`,
    `empty_answer`, `template_refused`, `template_not_prefix`, `content_changed`, `prompt_tokens_differ`, `too_long`,
    `too_short`. Raises UserError for a tokenizer without a chat template, or one that gives no character offsets.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise Dropped("no_assistant_turn")
    if not any(messages[index]["content"].strip() for index in answers):
        raise Dropped("empty_answer")
    text = _Rendered(tokenizer, messages)
    loss_mask = [False] * len(text.token_ids)
    fault = None
    for index in answers:
        try:
            for place in text.answer_tokens(index):
                loss_mask[place] = True
        except Dropped as dropped:
            fault = fault or dropped.reason
    if not any(loss_mask):
        raise Dropped(fault or "too_short")
    if not _is_enough(loss_mask, min_supervised):
        raise Dropped("too_short")
    if not _is_enough(loss_mask[:max_length], min_supervised):
        raise Dropped("too_long")
    return Sample(sample_id, text.token_ids[:max_length], loss_mask[:max_length])


class SampleSet(Sequence[Sample]):
    """Samples ordered by id, read from the disk as they are asked for.

    `fingerprint` stands for everything that they follow from; `dropped` counts conversations without one by reason,
    with the prompts that gave no conversation; `lengths` are in tokens, one a sample.
    """

    def __init__(self, path: Path, index: Mapping[str, Any]) -> None:
        self.fingerprint: str = index["fingerprint"]
        self.dropped: dict[str, int] = dict(index["dropped"])
        self.lengths: list[int] = list(index["lengths"])
        self._ids: list[int] = list(index["ids"])
        self._starts: list[int] = list(index["starts"])
        self._tokens = np.memmap(path, dtype=np.int32, mode="r")  # twice the token id, plus 1 where supervised

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        start = self._starts[index]
        packed = self._tokens[start : start + self.lengths[index]]
        return Sample(self._ids[index], (packed >> 1).tolist(), (packed & 1).astype(bool).tolist())


def load_samples(
    directory: Path, tokenizer: PreTrainedTokenizerBase, *, max_length: int, min_supervised: int = 2
) -> SampleSet:
    """The samples of a data directory. They are made once for each tokenizer, template and setting, and kept beside
    the conversations, when the counts by reason are printed too; several processes may ask at once.

    Raises UserError where there are no conversations, for a tokenizer without a chat template, when nothing is left
    (with the counts by reason), and when the disk takes no more.
    """
    require_template(tokenizer)
    conversations = directory / FILE_NAME
    if not conversations.is_file():
        raise UserError(f"there is no {conversations}; write it with python -m data.prepare output={directory}")
    fingerprint = _fingerprint(conversations, tokenizer, max_length, min_supervised)
    folder = directory / "samples"
    path, index = folder / f"{fingerprint}.tokens", folder / f"{fingerprint}.json"
    try:
        folder.mkdir(exist_ok=True)
        with FileLock(folder / "lock"):
            if not index.exists():
                made = _write_samples(conversations, path, tokenizer, max_length, min_supervised)
                write_json(index, {"fingerprint": fingerprint} | made)
    except OSError as error:
        raise UserError(f"cannot keep samples in {folder}: {error.strerror or error}; make room for them") from error
    return SampleSet(path, json.loads(index.read_text(encoding="utf-8")))


def _write_samples(
    conversations: Path,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    min_supervised: int,
) -> dict[str, Any]:
    """Make every sample, put the tokens one after the other into `path`, and return where each lies."""
    store = ConversationStore(conversations)
    dropped = Counter(store.dropped)
    found: list[tuple[int, int, int]] = []  # id, start, length
    end = 0
    with path.open("wb") as file, progress_bar("samples", store.kept) as advance:
        for record in store:
            if "dropped" in record:
                continue
            try:
                sample = make_sample(tokenizer, record["id"], record["messages"], max_length, min_supervised)
            except Dropped as reason:
                dropped[reason.reason] += 1
            else:
                packed = np.array(sample.token_ids, np.int32) * 2 + np.array(sample.loss_mask, np.int32)
                file.write(packed.tobytes())
                found.append((sample.sample_id, end, len(packed)))
                end += len(packed)
            advance(1, "")
    if not found:
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.most_common()) or "it is empty"
        raise UserError(f"no conversation of {conversations} gives a sample: {reasons}")
    ids, starts, lengths = zip(*sorted(found), strict=True)
    counts = dict(dropped.most_common())
    if counts:
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items())
        say(f"{conversations}: {len(ids)} samples, {dropped.total()} dropped ({reasons})")
    return {"dropped": counts, "ids": ids, "starts": starts, "lengths": lengths}


def _fingerprint(path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int, min_supervised: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # a half-written line is none yet
                digest.update(line)
    settings = f"{tokenizer_fingerprint(tokenizer)}/{max_length}/{min_supervised}/{MASK_VERSION}"
    return hashlib.blake2b(digest.digest() + settings.encode(), digest_size=16).hexdigest()


class _Rendered:
    """A whole conversation as text and tokens, and the tokens of each answer in it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> None:
        if not tokenizer.is_fast:
            raise UserError(f"training needs a tokenizer with character offsets, {type(tokenizer).__name__} has none")
        self._tokenizer = tokenizer
        self._messages = messages
        self._special_ids = special_ids(tokenizer)
        self._text = self._render(len(messages), add_generation_prompt=False)
        encoded = tokenizer(self._text, add_special_tokens=False, return_offsets_mapping=True)
        self.token_ids: list[int] = list(encoded["input_ids"])
        self._starts = [start for start, _ in encoded["offset_mapping"]]
        self._ends = [end for _, end in encoded["offset_mapping"]]

    def answer_tokens(self, index: int) -> range:
        """Places of the tokens that the target wrote as message `index`. Raises Dropped where that cannot be known."""
        prompt = self._render(index, add_generation_prompt=True)
        if not self._text.startswith(prompt):
            raise Dropped("template_not_prefix")
        end = self._content_end(len(prompt), self._messages[index]["content"])
        first = bisect_right(self._ends, len(prompt))
        # In use the prompt is cut into tokens by itself; here it must have given the same ones.
        if text_ids(self._tokenizer, prompt) != self.token_ids[:first]:
            raise Dropped("prompt_tokens_differ")
        behind = bisect_right(self._ends, end)  # a token that reaches beyond the answer is not of it
        if self._messages[index].get("finish_reason") != "length" and self._ends_turn(behind, end):
            behind += 1
        return range(first, behind)

    def _ends_turn(self, place: int, end: int) -> bool:
        """Whether the token at `place` follows the answer at once and is one that decoding would show as no text."""
        inside = place < len(self.token_ids)
        return inside and self._starts[place] == end and self.token_ids[place] in self._special_ids

    def _content_end(self, start: int, content: str) -> int:
        """The character behind the answer; templates may strip it, and put space before it."""
        if not content.strip():
            raise Dropped("empty_answer")
        if self._text.startswith(content, start):
            return start + len(content)
        while start < len(self._text) and self._text[start].isspace():
            start += 1
        if not self._text.startswith(content.strip(), start):
            raise Dropped("content_changed")
        return start + len(content.strip())

    def _render(self, count: int, *, add_generation_prompt: bool) -> str:
        require_template(self._tokenizer)
        try:
            return render_chat(self._tokenizer, self._messages[:count], add_generation_prompt=add_generation_prompt)
        except UserError as error:
            raise Dropped("template_refused") from error


def _is_enough(loss_mask: Sequence[bool], least: int) -> bool:
    has_pair = any(one and other for one, other in pairwise(loss_mask))
    return sum(loss_mask) >= least and has_pair
