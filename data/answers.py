"""Conversations written by the target: its answers, and its user turns where there are none.

A chat model continues the bare beginning of a user turn with a user turn (the idea of Magpie), so that no data set is
needed. A conversation's random numbers follow from the seed and its id alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from data.chat_text import special_ids, user_end_ids, user_prefix
from data.conversations import Record
from data.decoding import BatchDecoder, Job, Result
from dominotree.chat import render_chat, text_ids
from dominotree.decode.sampling import Sampling
from dominotree.errors import UserError
from dominotree.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class ChatPrompt:
    """What a conversation starts from. A turn None is written by the target, behind `opener` in the first turn."""

    prompt_id: int
    turns: tuple[str | None, ...]
    source: str
    history: tuple[dict[str, str], ...] = ()
    opener: str = ""


@dataclass(frozen=True)
class WritingRules:
    """How long and how random. `max_length` bounds the tokens of a whole conversation; all lengths are in tokens."""

    seed: int
    max_length: int
    max_user_tokens: int
    max_answer_tokens: int
    user_sampling: Sampling
    answer_sampling: Sampling

    def __post_init__(self) -> None:
        for name in ("max_length", "max_user_tokens", "max_answer_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass
class _Draft:
    """A conversation under way: turns from `turn` on are still to be written or answered."""

    prompt: ChatPrompt
    messages: list[dict[str, str]]
    turn: int = 0
    user_prompt_length: int = field(default=0)

    @property
    def is_user_next(self) -> bool:
        return not self.messages or self.messages[-1]["role"] != "user"


class Writer:
    """Writes many conversations at once.

    `tokens` counts what the target wrote so far. `known` holds first user turns that are not to be written again.
    Raises UserError for a target without a chat template.
    """

    def __init__(self, target: Target, rules: WritingRules, *, batch_size: int, known: Iterable[str] = ()) -> None:
        if target.tokenizer is None:
            raise UserError("writing conversations needs the target's tokenizer, this target has none")
        self.tokens = 0
        self._tokenizer: PreTrainedTokenizerBase = target.tokenizer
        self._rules = rules
        self._decoder = BatchDecoder(target, batch_size)
        self._limit = min(rules.max_length, target.context_length or rules.max_length)
        self._end_ids = target.end_token_ids
        self._user_end_ids = user_end_ids(self._tokenizer, self._end_ids)
        self._special_ids = special_ids(self._tokenizer)
        self._known = set(known)
        self._drafts: dict[int, _Draft] = {}

    def write(self, prompts: Iterable[ChatPrompt | Record]) -> Iterator[list[Record]]:
        """Records for a ConversationStore, as they are finished: after every step of the batch those it ended.

        What comes as a record already goes out as it is.

        A record is `{"id", "messages", "source"}`, with `"cut"` naming why later turns are missing; its assistant
        messages have `"finish_reason": "length"` where the answer is cut off. A prompt that gave no answered turn is
        `{"id", "dropped": reason, "source"}`.
        """
        waiting = iter(prompts)
        exhausted = False
        while not exhausted or self._drafts:
            records: list[Record] = []
            while not exhausted and self._decoder.room:
                prompt = next(waiting, None)
                exhausted = prompt is None
                if isinstance(prompt, ChatPrompt):
                    draft = _Draft(prompt, [dict(message) for message in prompt.history])
                    self._drafts[prompt.prompt_id] = draft
                    records += self._continue(draft)
                elif prompt is not None:
                    records.append(prompt)
            for result in self._decoder.step():
                records += self._take(self._drafts[result.key], result)
            yield records

    def _continue(self, draft: _Draft) -> list[Record]:
        """Queue what comes next in a conversation; its record when nothing does."""
        try:
            if draft.is_user_next:
                if draft.turn == len(draft.prompt.turns):
                    return self._finish(draft, None)
                given = draft.prompt.turns[draft.turn]
                if given is None:
                    return self._queue_user(draft)
                draft.messages.append({"role": "user", "content": given})
            return self._queue_answer(draft)
        except UserError:  # the template refuses these messages
            return self._finish(draft, "template_refused")

    def _queue_user(self, draft: _Draft) -> list[Record]:
        opener = draft.prompt.opener if draft.turn == 0 else ""
        prompt_ids = text_ids(self._tokenizer, user_prefix(self._tokenizer, draft.messages) + opener)
        rules = self._rules
        return self._queue(draft, prompt_ids, rules.max_user_tokens, self._user_end_ids, rules.user_sampling)

    def _queue_answer(self, draft: _Draft) -> list[Record]:
        prompt_ids = text_ids(self._tokenizer, render_chat(self._tokenizer, draft.messages, add_generation_prompt=True))
        rules = self._rules
        return self._queue(draft, prompt_ids, rules.max_answer_tokens, self._end_ids, rules.answer_sampling)

    def _queue(
        self, draft: _Draft, prompt_ids: list[int], most: int, end_ids: frozenset[int], sampling: Sampling
    ) -> list[Record]:
        room = min(most, self._limit - len(prompt_ids))
        if room < 1:
            return self._finish(draft, "too_long")
        seed = _seed(self._rules.seed, draft.prompt.prompt_id, len(draft.messages))
        self._decoder.add(Job(draft.prompt.prompt_id, prompt_ids, room, end_ids, replace(sampling, seed=seed)))
        return []

    def _take(self, draft: _Draft, result: Result) -> list[Record]:
        """Add what the target wrote to its conversation."""
        self.tokens += len(result.token_ids)
        text = self._tokenizer.decode(result.token_ids, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        if draft.is_user_next:
            if draft.turn == 0:
                text = draft.prompt.opener + text
            fault = self._user_fault(draft, text, result)
            message = {"role": "user", "content": text}
        else:
            was_cut = result.finish_reason == "length"
            text = text.rstrip(REPLACEMENT) if was_cut else text  # a character may be cut in two
            fault = self._answer_fault(text, result)
            message = {"role": "assistant", "content": text} | ({"finish_reason": "length"} if was_cut else {})
        if fault is not None:
            return self._finish(draft, fault)
        draft.messages.append(message)
        if message["role"] == "assistant":
            draft.turn += 1
        return self._continue(draft)

    def _user_fault(self, draft: _Draft, text: str, result: Result) -> str | None:
        if result.finish_reason == "length":
            return "user_turn_unfinished"
        if not text.strip():
            return "user_turn_empty"
        if self._is_broken(text, result):
            return "user_turn_broken"
        if not draft.messages:
            if text in self._known:
                return "user_turn_repeated"
            self._known.add(text)
        return None

    def _answer_fault(self, text: str, result: Result) -> str | None:
        if not text.strip():
            return "answer_empty"
        return "answer_broken" if self._is_broken(text, result) else None

    def _is_broken(self, text: str, result: Result) -> bool:
        """Text cannot say what the tokens say: special tokens among them, or bytes that are no character."""
        return REPLACEMENT in text or not self._special_ids.isdisjoint(result.token_ids)

    def _finish(self, draft: _Draft, fault: str | None) -> list[Record]:
        """The record of a conversation: what is answered of it, or why there is nothing."""
        del self._drafts[draft.prompt.prompt_id]
        record: Record = {"id": draft.prompt.prompt_id}
        if draft.turn == 0:
            return [record | {"dropped": fault or "no_user_turn", "source": draft.prompt.source}]
        messages = draft.messages[:-1] if draft.messages[-1]["role"] == "user" else draft.messages
        record |= {"messages": messages, "source": draft.prompt.source}
        return [record | ({"cut": fault} if fault else {})]


def _seed(seed: int, prompt_id: int, message: int) -> int:
    """A seed for one message of one conversation."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{message}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def first_user_turns(records: Iterable[Record]) -> set[str]:
    """First user turns of stored conversations, for `Writer(known=…)`."""
    found = set()
    for record in records:
        users = [message["content"] for message in record.get("messages", ()) if message["role"] == "user"]
        found.update(users[:1])
    return found
