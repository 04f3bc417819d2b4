"""What is supervised is what the target wrote, with any template: checked against the texts themselves."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_templates import CHATML, MARKED, NO_SYSTEM, PLAIN, SPACED, STRIPPING, THINKING, said, tokenizer
from transformers import PreTrainedTokenizerFast

from data.conversations import ConversationStore, Dropped
from data.samples import Sample, load_samples, make_sample
from dominotree.chat import encode_chat
from dominotree.errors import UserError

ENDED = {CHATML: "<|im_end|>", STRIPPING: "<|im_end|>", THINKING: "<|im_end|>", SPACED: "</s>", PLAIN: ""}
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1, max_size=12)


def supervised_runs(made: Sample, cutter: PreTrainedTokenizerFast) -> list[str]:
    """The supervised tokens as text, one string a run."""
    runs: list[list[int]] = []
    before = False
    for token, own in zip(made.token_ids, made.loss_mask, strict=True):
        if own and not before:
            runs.append([])
        if own:
            runs[-1].append(token)
        before = own
    return [str(cutter.decode(run)) for run in runs]


@pytest.mark.parametrize("template", [CHATML, STRIPPING, SPACED, PLAIN])
def test_every_answer_and_its_end_token_is_supervised(template: str) -> None:
    cutter = tokenizer(template)
    made = make_sample(cutter, 4, said("hi", "Héllo\n\nyou", "and?", "🦀 bye."), 999)
    space = " " if template == SPACED else ""
    end = ENDED[template]
    assert supervised_runs(made, cutter) == [f"{space}Héllo\n\nyou{end}", f"{space}🦀 bye.{end}"]
    assert made.sample_id == 4


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(WORDS, min_size=2, max_size=6), template=st.sampled_from([CHATML, STRIPPING, SPACED, PLAIN]))
def test_any_text_is_masked_as_written_or_dropped(contents: list[str], template: str) -> None:
    cutter = tokenizer(template)
    try:
        made = make_sample(cutter, 0, said(*contents), 9999, min_supervised=1)
    except Dropped:
        return
    answers = [content for content in contents[1::2] if content.strip()]
    found = [run.removesuffix(ENDED[template]) for run in supervised_runs(made, cutter)]
    assert [run.strip() for run in found] == [answer.strip() for answer in answers]


@pytest.mark.parametrize("template", [CHATML, STRIPPING, SPACED, PLAIN, THINKING])
def test_what_comes_before_an_answer_is_the_prompt_that_inference_uses(template: str) -> None:
    cutter = tokenizer(template)
    messages = said("hi", "Hello", "and?", "bye")
    made = make_sample(cutter, 0, messages, 999)
    last = len(made.loss_mask) - 1 - made.loss_mask[::-1].index(True)
    start = last
    while made.loss_mask[start - 1]:
        start -= 1
    assert made.token_ids[:start] == encode_chat(cutter, messages[:3])


def test_earlier_answers_without_their_thought_are_context_only() -> None:
    cutter = tokenizer(THINKING)
    made = make_sample(cutter, 0, said("hi", "Hello", "and?", "bye"), 999)
    assert supervised_runs(made, cutter) == ["bye<|im_end|>"]
    one_turn = make_sample(cutter, 0, said("hi", "Hello"), 999)
    assert supervised_runs(one_turn, cutter) == ["Hello<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, SPACED])
def test_the_end_token_of_a_cut_answer_is_not_the_targets(template: str) -> None:
    cutter = tokenizer(template)
    made = make_sample(cutter, 0, said("a", "one", "b", "two", finish_reason="length"), 999)
    runs = [run.strip() for run in supervised_runs(made, cutter)]
    assert runs == [f"one{ENDED[template]}", "two"]


def test_a_system_text_is_never_supervised() -> None:
    cutter = tokenizer(CHATML)
    made = make_sample(cutter, 0, [{"role": "system", "content": "Be kind."}, *said("q", "answer")], 999)
    assert supervised_runs(made, cutter) == ["answer<|im_end|>"]


def test_space_around_an_answer_is_kept_where_the_template_keeps_it() -> None:
    cutter = tokenizer(CHATML)
    assert supervised_runs(make_sample(cutter, 0, said("q", " a \n"), 999), cutter) == [" a \n<|im_end|>"]
    stripping = tokenizer(STRIPPING)
    assert supervised_runs(make_sample(stripping, 0, said("q", " a \n"), 999), stripping) == ["a<|im_end|>"]


def test_an_answer_whose_first_token_reaches_into_the_prompt_is_dropped() -> None:
    merging = tokenizer(CHATML, merges=(("Ċ", "Ċ"),))
    with pytest.raises(Dropped, match="prompt_tokens_differ"):
        make_sample(merging, 0, said("q", "\nindeed"), 999)
    assert supervised_runs(make_sample(merging, 0, said("q", "a\n\nb"), 999), merging) == ["a\n\nb<|im_end|>"]


def test_a_token_that_reaches_beyond_the_answer_is_not_of_it() -> None:
    merging = tokenizer(PLAIN, merges=((".", "Ċ"),))
    made = make_sample(merging, 0, said("q", "yes. no."), 999)
    assert supervised_runs(made, merging) == ["yes. no"]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML, said("q"), "no_assistant_turn"),
        (CHATML, said("q", " \n"), "empty_answer"),
        (MARKED, said("q", "answer"), "content_changed"),
        (THINKING, said("q", "<think>\nwell\n</think>\n\nanswer"), "content_changed"),
        (NO_SYSTEM, [{"role": "system", "content": "s"}, *said("q", "answer")], "template_refused"),
        (PLAIN, said("q", "a"), "too_short"),
        (CHATML, said("q" * 400, "answer"), "too_long"),
        (CHATML, said("q" * 280, "answer"), "too_long"),
    ],
)
def test_what_gives_no_sample_says_why(template: str, messages: list[dict[str, str]], reason: str) -> None:
    with pytest.raises(Dropped) as dropped:
        make_sample(tokenizer(template), 0, messages, 300)
    assert dropped.value.reason == reason


def test_a_template_that_writes_answers_and_prompts_differently_is_dropped() -> None:
    odd = CHATML.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}now:")
    with pytest.raises(Dropped, match="template_not_prefix"):
        make_sample(tokenizer(odd), 0, said("q", "answer"), 999)


def test_one_empty_answer_does_not_cost_the_others() -> None:
    cutter = tokenizer(CHATML)
    made = make_sample(cutter, 0, said("q", " ", "q", "answer"), 999)
    assert supervised_runs(made, cutter) == ["answer<|im_end|>"]


def test_a_long_conversation_is_cut_where_enough_is_left() -> None:
    cutter = tokenizer(CHATML)
    whole = make_sample(cutter, 0, said("q", "a" * 50), 999)
    first = whole.loss_mask.index(True)
    cut = make_sample(cutter, 0, said("q", "a" * 50), first + 20, min_supervised=20)
    assert (cut.token_ids, cut.loss_mask) == (whole.token_ids[: first + 20], whole.loss_mask[: first + 20])
    with pytest.raises(Dropped, match="too_long"):
        make_sample(cutter, 0, said("q", "a" * 50), first + 19, min_supervised=20)
    with pytest.raises(Dropped, match="too_short"):
        make_sample(cutter, 0, said("q", "a" * 50), 999, min_supervised=52)


def test_a_tokenizer_that_cannot_serve_is_refused() -> None:
    with pytest.raises(UserError, match="no chat template"):
        make_sample(tokenizer(None), 0, said("q", "answer"), 99)
    slow = tokenizer(CHATML)
    slow.__class__ = type("Slow", (PreTrainedTokenizerFast,), {"is_fast": False})
    with pytest.raises(UserError, match="character offsets"):
        make_sample(slow, 0, said("q", "answer"), 99)


def write(folder: Path, *messages: list[dict[str, str]], dropped: tuple[str, ...] = ()) -> None:
    store = ConversationStore(folder / "conversations.jsonl")
    start = len(store.done_ids)
    lines: list[dict[str, Any]] = [{"id": start + i, "messages": one, "source": "t"} for i, one in enumerate(messages)]
    lines += [{"id": 100 + start + i, "dropped": reason, "source": "t"} for i, reason in enumerate(dropped)]
    store.append(lines[::-1])
    store.close()


def test_a_directory_gives_its_samples_ordered_by_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cutter = tokenizer()
    kept = [said("a", "one"), said("b", "two", "c", "three")]
    write(tmp_path, kept[0], said("alone"), kept[1], said("q", " "), dropped=("too_long",))
    found = load_samples(tmp_path, cutter, max_length=99)
    assert list(found) == [make_sample(cutter, 0, kept[0], 99), make_sample(cutter, 2, kept[1], 99)]
    assert found[-1] == found[1] == found[1:][0]
    assert found.lengths == [len(sample.token_ids) for sample in found]
    assert found.dropped == {"too_long": 1, "no_assistant_turn": 1, "empty_answer": 1}
    assert "2 samples, 3 dropped (too_long 1, " in capsys.readouterr().err
    with pytest.raises(IndexError):
        found[2]


def test_samples_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cutter = tokenizer()
    write(tmp_path, said("a", "one"))
    first = load_samples(tmp_path, cutter, max_length=99)
    with monkeypatch.context() as patch:
        patch.setattr("data.samples.make_sample", None)
        again = load_samples(tmp_path, cutter, max_length=99)
    assert (list(again), again.fingerprint) == (list(first), first.fingerprint)


def test_a_stale_sample_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, said("a", "one"))
    seen = {load_samples(tmp_path, tokenizer(), max_length=99).fingerprint}
    for template in (STRIPPING, THINKING):
        seen.add(load_samples(tmp_path, tokenizer(template), max_length=99).fingerprint)
    seen.add(load_samples(tmp_path, tokenizer(), max_length=98).fingerprint)
    seen.add(load_samples(tmp_path, tokenizer(), max_length=99, min_supervised=3).fingerprint)
    seen.add(load_samples(tmp_path, tokenizer(merges=(("o", "n"),)), max_length=99).fingerprint)
    monkeypatch.setattr("data.samples.MASK_VERSION", 99)
    seen.add(load_samples(tmp_path, tokenizer(), max_length=99).fingerprint)
    write(tmp_path, said("b", "two"))
    grown = load_samples(tmp_path, tokenizer(), max_length=99)
    seen.add(grown.fingerprint)
    assert len(seen) == 8
    assert len(grown) == 2


def test_a_line_being_written_is_not_a_sample_yet(tmp_path: Path) -> None:
    write(tmp_path, said("a", "one"))
    before = load_samples(tmp_path, tokenizer(), max_length=99)
    with (tmp_path / "conversations.jsonl").open("a") as file:
        file.write(json.dumps({"id": 1, "messages": said("b", "two"), "source": "t"}))
    assert load_samples(tmp_path, tokenizer(), max_length=99).fingerprint == before.fingerprint


def test_processes_that_ask_at_once_get_the_same(tmp_path: Path) -> None:
    write(tmp_path, *(said("a", f"answer {index}") for index in range(20)))
    found: list[list[Sample]] = []
    asking = [
        threading.Thread(target=lambda: found.append(list(load_samples(tmp_path, tokenizer(), max_length=99))))
        for _ in range(4)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(found) == 4
    assert all(samples == found[0] for samples in found)


def test_a_directory_without_samples_is_an_error_with_the_counts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*conversations.jsonl; write it with python -m data.prepare"):
        load_samples(tmp_path, tokenizer(), max_length=99)
    write(tmp_path, said("alone"), said("q", " "), said("again"), dropped=("answer_empty",))
    with pytest.raises(UserError, match=r"no conversation .* gives a sample: no_assistant_turn 2, ") as error:
        load_samples(tmp_path, tokenizer(), max_length=99)
    assert "empty_answer 1" in str(error.value)
    assert "answer_empty 1" in str(error.value)
    with pytest.raises(UserError, match="no chat template"):
        load_samples(tmp_path, tokenizer(None), max_length=99)


def test_a_folder_that_takes_no_samples_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, said("a", "one"))
    (tmp_path / "samples").touch()
    with pytest.raises(UserError, match="cannot keep samples in"):
        load_samples(tmp_path, tokenizer(), max_length=99)
