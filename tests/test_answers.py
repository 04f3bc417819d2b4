"""The target writes whole conversations; what it writes badly is dropped under a name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from conftest import greedy
from tiny_templates import CHATML, NO_SYSTEM, PLAIN, SPECIAL, talking_target, tokenizer

from data.answers import ChatPrompt, Writer, WritingRules, first_user_turns
from data.chat_text import user_end_ids, user_prefix
from data.decoding import Job, Result
from dominotree.chat import encode_chat
from dominotree.decode.sampling import Sampling
from dominotree.errors import UserError
from dominotree.target import Target

SYSTEM = {"role": "system", "content": "Be kind."}


def rules(**options: Any) -> WritingRules:
    defaults: dict[str, Any] = {
        "seed": 0,
        "max_length": 200,
        "max_user_tokens": 40,
        "max_answer_tokens": 40,
        "user_sampling": Sampling(1.0),
        "answer_sampling": Sampling(),
    }
    return WritingRules(**(defaults | options))


def write(
    target: Target, prompts: list[Any], *, batch_size: int = 4, known: tuple[str, ...] = (), **options: Any
) -> list[Any]:
    writer = Writer(target, rules(**options), batch_size=batch_size, known=known)
    return sorted((record for records in writer.write(prompts) for record in records), key=lambda record: record["id"])


class Scripted:
    """A batch decoder whose results are given: texts that end by themselves, unless too long for the job."""

    def __init__(self, answer: Callable[[Job], str]) -> None:
        self.room = 99
        self.jobs: deque[Job] = deque()
        self.answer = answer

    def add(self, job: Job) -> None:
        self.jobs.append(job)

    def step(self) -> list[Result]:
        if not self.jobs:
            return []
        job = self.jobs.popleft()
        ids = tokenizer()(self.answer(job), add_special_tokens=False)["input_ids"]
        cut = len(ids) >= job.max_new_tokens
        return [Result(job.key, ids[: job.max_new_tokens], "length" if cut else "stop")]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Write prompts with a target that says, in order, what a list holds."""

    def run(prompts: list[Any], says: list[str], template: str = CHATML, **options: Any) -> list[Any]:
        words = iter(says)
        monkeypatch.setattr("data.answers.BatchDecoder", lambda *_: Scripted(lambda job: next(words)))
        return write(Target(talking_target().model, tokenizer(template)), prompts, **options)

    return run


def test_given_turns_are_answered_one_after_the_other() -> None:
    target = talking_target(end_every=300)
    prompts = [ChatPrompt(3, ("hi", "and?"), "t"), ChatPrompt(1, ("hello there",), "t", (SYSTEM,))]
    first, second = write(target, prompts, max_answer_tokens=9)
    assert (first["id"], second["id"]) == (1, 3)
    messages: list[dict[str, str]] = []
    for turn in ("hi", "and?"):
        messages.append({"role": "user", "content": turn})
        produced = greedy(target, encode_chat(target.tokenizer, messages), 9)
        stop = next((i for i, token in enumerate(produced) if token in target.end_token_ids), None)
        text = target.tokenizer.decode(produced[:stop]).rstrip("\ufffd")
        messages.append({"role": "assistant", "content": text})
    found = [{key: message[key] for key in ("role", "content")} for message in second["messages"]]
    assert found == messages
    assert first["messages"][0] == SYSTEM
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant"]
    assert first["source"] == "t"


def test_the_same_ids_give_the_same_conversations_whatever_the_batch() -> None:
    target = talking_target()
    prompts = [ChatPrompt(index, (None, None), "synthesis", opener="abc"[index % 3]) for index in range(12)]
    together = write(target, prompts, batch_size=7)
    apart = write(target, prompts[::-1], batch_size=2)
    assert len(together) == 12
    kept = [record for record in together if "messages" in record]
    assert len(kept) > 5
    assert together == apart
    assert write(target, prompts, seed=1) != together


def test_user_turns_begin_where_the_template_begins_them() -> None:
    cutter = tokenizer()
    assert user_prefix(cutter, []) == "<|im_start|>user\n"
    history = [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\n"
    )
    assert user_prefix(cutter, history) == expected
    assert user_end_ids(cutter, frozenset({99})) == {99, SPECIAL.index("<|im_end|>")}
    assert user_end_ids(tokenizer(PLAIN), frozenset({99})) == {99}
    silent = "{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="leaves a user turn out"):
        user_prefix(tokenizer(silent), [])


def test_an_opener_begins_the_first_user_turn_only(scripted: Callable[..., list[Any]]) -> None:
    prompt = ChatPrompt(0, (None, None), "s", opener="Why")
    (record,) = scripted([prompt], [" so?", "so", "and?", "yes"])
    assert [message["content"] for message in record["messages"]] == ["Why so?", "so", "and?", "yes"]
    assert "cut" not in record


@pytest.mark.parametrize(
    ("turns", "says", "reason"),
    [
        ((None,), ["x" * 41], "user_turn_unfinished"),
        ((None,), [" \n"], "user_turn_empty"),
        ((None,), ["a<s>b"], "user_turn_broken"),
        ((None,), ["seen before"], "user_turn_repeated"),
        (("q",), [" "], "answer_empty"),
        (("q",), ["a<|im_start|>b"], "answer_broken"),
        (("q",), ["a\ufffdb"], "answer_broken"),
        (("q" * 190,), [], "too_long"),
        ((), [], "no_user_turn"),
    ],
)
def test_a_prompt_without_an_answered_turn_says_why(
    scripted: Callable[..., list[Any]], turns: tuple[str | None, ...], says: list[str], reason: str
) -> None:
    assert scripted([ChatPrompt(5, turns, "s")], says, known=("seen before",)) == [
        {"id": 5, "dropped": reason, "source": "s"}
    ]


def test_a_template_that_refuses_the_messages_is_a_reason(scripted: Callable[..., list[Any]]) -> None:
    refused, fine = scripted(
        [ChatPrompt(0, ("q",), "s", (SYSTEM,)), ChatPrompt(1, ("q",), "s")], ["answer"], template=NO_SYSTEM
    )
    assert refused["dropped"] == "template_refused"
    assert fine["messages"][-1]["content"] == "answer"


def test_a_later_turn_that_fails_leaves_the_earlier_ones(scripted: Callable[..., list[Any]]) -> None:
    (record,) = scripted([ChatPrompt(0, ("q", None), "s")], ["answer", "x" * 41])
    assert [message["content"] for message in record["messages"]] == ["q", "answer"]
    assert record["cut"] == "user_turn_unfinished"
    (record,) = scripted([ChatPrompt(0, ("q", "r"), "s")], ["answer", ""])
    assert [message["content"] for message in record["messages"]] == ["q", "answer"]
    assert record["cut"] == "answer_empty"


def test_an_answer_that_is_cut_off_says_so(scripted: Callable[..., list[Any]]) -> None:
    whole, cut = scripted([ChatPrompt(0, ("q",), "s"), ChatPrompt(1, ("q",), "s")], ["done", "x" * 38 + "🦀"])
    assert "finish_reason" not in whole["messages"][-1]
    assert cut["messages"][-1] == {"role": "assistant", "content": "x" * 38, "finish_reason": "length"}


def test_a_user_turn_is_written_once(scripted: Callable[..., list[Any]]) -> None:
    prompts = [ChatPrompt(index, (None,), "s") for index in range(2)]
    first, second = scripted(prompts, ["same", "same", "answer"])
    assert first["messages"][0]["content"] == "same"
    assert second["dropped"] == "user_turn_repeated"
    assert first_user_turns([first, second]) == {"same"}


def test_records_pass_through(scripted: Callable[..., list[Any]]) -> None:
    dropped = {"id": 1, "dropped": "no_user_turn", "source": "s"}
    assert scripted([dropped, ChatPrompt(2, ("q",), "s")], ["answer"])[0] == dropped


def test_impossible_rules_are_refused() -> None:
    with pytest.raises(UserError, match="max_answer_tokens must be at least 1, got 0"):
        rules(max_answer_tokens=0)
    bare = talking_target(None)
    with pytest.raises(UserError, match="no chat template"):
        Writer(bare, rules(), batch_size=1)
    with pytest.raises(UserError, match="needs the target's tokenizer"):
        Writer(Target(bare.model), rules(), batch_size=1)
