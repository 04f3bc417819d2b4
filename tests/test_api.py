"""The library in five lines: load a target and a drafter from disk, generate text."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import READY_METHODS, greedy, make_draft, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dominotree
from dominotree import Target, UserError, generate, load, load_draft, save_draft
from dominotree.decode.loop import decode
from dominotree.decode.methods import make_method
from dominotree.draft.model import DraftModel

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ["<end>", "<unk>", "user", "assistant", "system", *(f"w{index}" for index in range(40))]
COUNT = 12
Pair = tuple[Target, DraftModel]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token a word."""
    model = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<end>", "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="<end>", chat_template=template)


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat target, the same without a template, drafters that fit and one that does not."""
    folder: Path = tmp_path_factory.mktemp("models")
    target = make_target(vocab_size=len(WORDS) + 3, seed=4)
    for name, template in (("chat", TEMPLATE), ("base", None)):
        target.model.save_pretrained(folder / name)
        tokenizer(template).save_pretrained(folder / name)
    save_draft(make_draft(target), folder / "draft")
    save_draft(make_draft(target, with_head=False, shift_label=False), folder / "dflash")
    save_draft(make_draft(make_target(vocab_size=13)), folder / "other")
    return folder


@pytest.fixture(scope="module")
def pair(saved: Path) -> Pair:
    target, draft = load(str(saved / "chat"), str(saved / "draft"))
    assert draft is not None
    return target, draft


@pytest.fixture(scope="module")
def base(saved: Path) -> Target:
    return load(str(saved / "base"))[0]


def test_five_lines_answer_a_prompt(saved: Path) -> None:
    target, draft = load(str(saved / "chat"), str(saved / "draft"))
    answer = generate(target, draft, "w3 w1 w4", max_new_tokens=COUNT)
    assert answer.token_ids == greedy(target, ids_of("user w3 w1 w4 assistant"), COUNT)
    assert answer.method == "dominotree"
    assert answer.finish_reason == "length"
    assert answer.text == " ".join(WORDS[token] for token in answer.token_ids if 1 < token < len(WORDS))


@pytest.mark.parametrize("method", READY_METHODS)
def test_every_method_answers_with_the_same_text(pair: Pair, method: str) -> None:
    answers = [generate(*pair, "w3 w1", method=name, max_new_tokens=COUNT) for name in ("ar", method)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].text == answers[1].text
    assert answers[1].method == method


def test_the_text_is_the_tokenizer_s_decoding(pair: Pair) -> None:
    answer = generate(*pair, "w9", max_new_tokens=30)
    assert pair[0].tokenizer is not None
    assert answer.text == pair[0].tokenizer.decode(answer.token_ids, skip_special_tokens=True)


def test_messages_and_a_system_text_go_through_the_chat_template(pair: Pair) -> None:
    messages = [
        {"role": "user", "content": "w1 w2"},
        {"role": "assistant", "content": "w5"},
        {"role": "user", "content": "w6"},
    ]
    answer = generate(*pair, messages, system="w7 w8", max_new_tokens=COUNT)
    prompt = "system w7 w8 user w1 w2 assistant w5 user w6 assistant"
    assert answer.token_ids == greedy(pair[0], ids_of(prompt), COUNT)


def test_raw_text_is_continued_as_it_is(pair: Pair, base: Target) -> None:
    for target in (pair[0], base):
        answer = generate(target, pair[1], "w3 w1 w4", raw=True, max_new_tokens=COUNT)
        assert answer.token_ids == greedy(target, ids_of("w3 w1 w4"), COUNT)


def test_options_reach_the_method(pair: Pair) -> None:
    answer = generate(*pair, "w3", max_new_tokens=COUNT, node_budget=2, candidate_width=5, node_topk=2)
    method = make_method("dominotree", node_budget=2, candidate_width=5, node_topk=2)
    expected = decode(*pair, method, ids_of("user w3 assistant"), max_new_tokens=COUNT)
    assert answer.accepted_lengths == expected.accepted_lengths
    wide = generate(*pair, "w3", max_new_tokens=COUNT, node_budget=200, candidate_width=0, node_topk=48)
    assert wide.acceptance_length > answer.acceptance_length


def test_sampling_options_reach_the_target_s_choice(pair: Pair) -> None:
    def run(**options: Any) -> list[int]:
        return generate(*pair, "w3", max_new_tokens=COUNT, **options).token_ids

    assert run(temperature=2.0, seed=1) == run(temperature=2.0, seed=1)
    assert run(temperature=2.0, seed=1) != run(temperature=2.0, seed=2)
    assert run(temperature=2.0, top_k=1) == run(temperature=2.0, top_p=1e-6) == run()


def test_a_stop_string_ends_the_text_before_it_and_the_generation_with_it(pair: Pair) -> None:
    whole = generate(*pair, "w9", max_new_tokens=30)
    words = whole.text.split()
    stop = f"{words[5]} {words[6]}"
    assert whole.text.count(stop) >= 1
    for method in ("ar", "dominotree"):
        answer = generate(*pair, "w9", method=method, max_new_tokens=30, stop=[stop, "never there"])
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert answer.finish_reason == "stop"
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert sum(answer.accepted_lengths) + 1 == len(answer.token_ids)
        assert WORDS[answer.token_ids[-1]] == words[6]  # the token that completed it is the last


def test_a_tail_that_only_begins_a_stop_string_is_part_of_the_text(pair: Pair) -> None:
    whole = generate(*pair, "w9", max_new_tokens=30)
    stop = f"{whole.text.split()[-1]} never there"
    assert generate(*pair, "w9", max_new_tokens=30, stop=[stop]).text == whole.text


def test_the_end_tokens_of_tokenizer_and_model_end_the_text_unseen(pair: Pair, saved: Path) -> None:
    whole = generate(*pair, "w9", max_new_tokens=30)
    end = whole.token_ids[8]
    target = load(str(saved / "chat"))[0]
    assert target.end_token_ids == {0}  # the tokenizer's
    target.model.generation_config.eos_token_id = [end]
    assert target.end_token_ids == {0, end}
    answer = generate(target, pair[1], "w9", max_new_tokens=30)
    assert answer.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
    assert answer.finish_reason == "stop"


def test_no_tokens_asked_for_is_an_empty_text(pair: Pair) -> None:
    answer = generate(*pair, "w9", max_new_tokens=0)
    assert (answer.token_ids, answer.text, answer.accepted_lengths) == ([], "", [])
    assert (answer.finish_reason, answer.acceptance_length, answer.seconds["total"]) == ("length", 0.0, 0.0)


def test_the_record_of_a_generation_adds_up(pair: Pair) -> None:
    answer = generate(*pair, "w9", max_new_tokens=COUNT)
    stages = {"prefill", "draft", "build", "verify", "commit"}
    assert set(answer.seconds) == stages | {"total"}
    assert all(answer.seconds[stage] > 0 for stage in stages)
    assert answer.seconds["total"] == pytest.approx(sum(answer.seconds[stage] for stage in stages))
    assert answer.acceptance_length == sum(answer.accepted_lengths) / len(answer.accepted_lengths)
    decoding = answer.seconds["total"] - answer.seconds["prefill"]
    assert answer.tokens_per_second == pytest.approx((COUNT - 1) / decoding)


def test_a_target_alone_decodes_plainly(saved: Path) -> None:
    target, draft = load(str(saved / "chat"))
    assert draft is None
    answer = generate(target, draft, "w3", method="ar", max_new_tokens=COUNT)
    assert answer.token_ids == greedy(target, ids_of("user w3 assistant"), COUNT)
    assert answer.accepted_lengths == [1] * (COUNT - 1)


def test_a_dflash_drafter_serves_the_methods_without_a_head(saved: Path) -> None:
    target, draft = load(str(saved / "chat"), str(saved / "dflash"))
    expected = greedy(target, ids_of("user w3 assistant"), COUNT)
    for method in ("dflash", "ddtree"):
        assert generate(target, draft, "w3", method=method, max_new_tokens=COUNT).token_ids == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_number_format_holds_for_both_models(saved: Path, dtype: str) -> None:
    target, draft = load(str(saved / "chat"), str(saved / "draft"), dtype=dtype, device="cpu")
    assert draft is not None
    assert target.dtype == draft.dtype == getattr(torch, dtype)


def test_the_alignment_may_be_stated_by_the_caller(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "draft", tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    del config["dflash_config"]["shift_label"]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="shift_label"):
        load(str(saved / "chat"), str(tmp_path / "draft"))
    draft = load(str(saved / "chat"), str(tmp_path / "draft"), shift_label=True)[1]
    assert draft is not None and draft.config.shift_label


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fast"}, "unknown method 'fast'"),
        ({"method": "ar", "node_budget": 4}, "method ar has no node_budget"),
        ({"node_budget": 0}, "node_budget must be an integer of at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"top_p": 0.0}, "top_p must lie above 0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, got -1"),
        ({"max_new_tokens": 10_000}, "exceed the target's context of 256 tokens"),
        ({"stop": [""]}, "a stop string must not be empty"),
        ({"stop": "w3"}, "stop must be a list of strings"),
        ({"raw": True, "system": "w3"}, "raw=true takes one text as it is"),
        ({"raw": True, "prompt": [{"role": "user", "content": "w3"}]}, "raw=true takes one text as it is"),
        ({"raw": True, "prompt": ""}, "the prompt is empty"),
        ({"draft": None}, "method dominotree needs a drafter"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_work(
    pair: Pair, options: dict[str, Any], message: str
) -> None:
    calls: list[Any] = []
    request: dict[str, Any] = {"target": pair[0], "draft": pair[1], "prompt": "w3", "max_new_tokens": COUNT} | options
    hook = pair[0].model.register_forward_pre_hook(lambda *arguments: calls.append(arguments))
    with pytest.raises(UserError, match=message) as caught:
        generate(**request)
    hook.remove()
    assert "\n" not in str(caught.value)
    assert not calls


def test_a_target_without_a_chat_template_names_raw(pair: Pair, base: Target) -> None:
    with pytest.raises(UserError, match="raw=true"):
        generate(base, pair[1], "w3")


def test_a_target_without_a_tokenizer_generates_no_text(pair: Pair) -> None:
    with pytest.raises(UserError, match="tokenizer"):
        generate(Target(pair[0].model), pair[1], "w3")


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ("nowhere", "draft", "cannot load the target"),
        ("draft/config.json", "draft", "cannot load the target"),
        ("chat", "nowhere", "no draft checkpoint at .*nowhere"),
        ("chat", "chat", "dflash_config|architectures"),
        ("chat", "other", "the drafter does not fit the target: its vocabulary is 13, the target's 48"),
    ],
)
def test_models_that_cannot_be_loaded_are_one_line(saved: Path, target: str, draft: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(str(saved / target), str(saved / draft))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "value"), [("dtype", "float64"), ("device", "abacus"), ("device", "cuda:99")])
def test_a_number_format_or_device_there_is_none_of(saved: Path, option: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{option} .*{value}"):
        load(str(saved / "chat"), **{option: value})


def test_what_is_saved_is_what_is_loaded(saved: Path, pair: Pair) -> None:
    again = load_draft(saved / "draft")
    assert dataclasses.asdict(again.config) == dataclasses.asdict(pair[1].config)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), pair[1].parameters(), strict=True))


def test_the_package_names_what_it_offers() -> None:
    assert all(getattr(dominotree, name) is not None for name in dominotree.__all__)
    with pytest.raises(AttributeError, match="no attribute 'decode_faster'"):
        dominotree.decode_faster  # noqa: B018
