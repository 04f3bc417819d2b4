"""The command as a user meets it: answers on standard output, everything else on standard error, records in a file."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import READY_METHODS
from tiny_chat import ids_of, records, scripted

import dominotree.decode.stream
from dominotree import generate, load
from dominotree.decode.generation import Round
from infer.generate import main

KEYS = {
    "prompt",
    "text",
    "token_ids",
    "finish_reason",
    "method",
    "acceptance_length",
    "accepted_lengths",
    "tree_sizes",
    "seconds",
}
Capture = pytest.CaptureFixture[str]


# Answers and records


@pytest.mark.parametrize("method", READY_METHODS)
def test_every_method_gives_the_library_s_answer(
    method: str, words: list[str], folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out.jsonl"
    assert main([*words, f"method={method}", "prompt= Hé, a=b {c} ", f"output={output}"]) == 0
    target, draft = load(str(folder / "target"), str(folder / "draft"))
    plain = generate(target, None, " Hé, a=b {c} ", method="ar", max_new_tokens=12)
    expected = generate(target, draft, " Hé, a=b {c} ", method=method, max_new_tokens=12)
    (record,) = records(output)
    assert record.keys() >= KEYS
    assert record["prompt"] == " Hé, a=b {c} "
    assert record["token_ids"] == expected.token_ids == plain.token_ids
    assert record["text"] == expected.text
    assert record["accepted_lengths"] == expected.accepted_lengths
    assert len(record["tree_sizes"]) == len(record["accepted_lengths"])
    assert all(
        size + 1 >= length for size, length in zip(record["tree_sizes"], record["accepted_lengths"], strict=True)
    )
    assert record["acceptance_length"] == expected.acceptance_length
    assert (record["method"], record["finish_reason"]) == (method, "length")
    assert set(record["seconds"]) == {"prefill", "draft", "build", "verify", "commit", "total"}
    captured = capsys.readouterr()
    assert captured.out == record["text"] + "\n"
    assert ("tree builder" in captured.err) == (method == "dominotree")
    assert captured.err.splitlines()[-1].startswith(f"{method}: τ {record['acceptance_length']:.2f} over ")
    for part in ("rounds", "12 tokens (length)", "tokens/s", "first token after", "peak memory"):
        assert part in captured.err


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7])
def test_exactly_as_many_tokens_as_asked_for(count: int, words: list[str], tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out.jsonl"
    assert main([*words, "prompt=a", f"max_new_tokens={count}", f"output={output}"]) == 0
    (record,) = records(output)
    assert (len(record["token_ids"]), record["finish_reason"]) == (count, "length")
    assert capsys.readouterr().out == record["text"] + "\n"


def test_the_accepted_lengths_are_the_reference_ones(reference: Path, tmp_path: Path, capsys: Capture) -> None:
    trained = reference / "trained"
    expected = json.loads((trained / "expected.json").read_text(encoding="utf-8"))["sequences"][:3]
    target, _ = load(str(trained / "target"))
    assert target.tokenizer is not None
    prompts = tmp_path / "prompts.jsonl"
    texts = [target.tokenizer.decode(sequence["prompt"]) for sequence in expected]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    common = [f"target={trained / 'target'}", f"draft={trained / 'draft'}", "raw=true", f"prompt_file={prompts}"]
    for name in expected[0]["accepted_lengths"]:
        method = name.rstrip("0123456789")
        budget = [f"method.node_budget={name[len(method) :]}"] if name != method else []
        output = tmp_path / f"{name}.jsonl"
        assert main([*common, f"method={method}", *budget, "max_new_tokens=96", f"output={output}"]) == 0
        for record, sequence in zip(records(output), expected, strict=True):
            lengths = sequence["accepted_lengths"][name]
            assert record["token_ids"] == sequence["greedy"]
            assert record["accepted_lengths"][: len(lengths)] == lengths


def test_stop_strings_end_the_text_before_them(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        dominotree.decode.stream, "decode_rounds", scripted([[ids] for ids in ids_of("one\n\ntwo ## three")])
    )
    output = tmp_path / "out.jsonl"
    assert main([*words, "prompt=a", "max_new_tokens=30", 'stop=["##", "\\n\\n"]', f"output={output}"]) == 0
    assert capsys.readouterr().out == "one\n"
    (record,) = records(output)
    assert (record["text"], record["finish_reason"], record["token_ids"]) == ("one", "stop", ids_of("one\n\n"))


def test_text_streams_in_whole_characters(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(
        dominotree.decode.stream, "decode_rounds", scripted([ids_of("é🦀")[:4], ids_of("é🦀")[4:], ids_of("!")])
    )
    monkeypatch.setattr(sys.stdout, "write", lambda text: pieces.append(text) or len(text))
    assert main([*words, "prompt=a"]) == 0
    assert pieces == ["é", "🦀", "!", "\n"]


def test_the_chat_template_and_the_system_text_are_applied(
    words: list[str], folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out.jsonl"
    assert main([*words, "prompt=hi", "system=Be, brief.", f"output={output}"]) == 0
    assert main([*words, "prompt=[system]Be, brief.\n[user]hi\n[reply]", "raw=true", f"output={output}"]) == 0
    with_template, by_hand = records(output)
    assert with_template["token_ids"] == by_hand["token_ids"]


def test_turns_are_answered_in_turn_with_the_replies_fed_back(
    words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]
    prompts.write_text(f"{json.dumps({'turns': ['a', 'b']})}\n{json.dumps({'messages': messages})}\n", encoding="utf-8")
    assert main([*words, f"prompt_file={prompts}", f"output={output}"]) == 0
    first, second, other = records(output)
    assert [(r["prompt"], r["prompt_index"], r["turn"]) for r in (first, second, other)] == [
        ("a", 0, 0),
        ("b", 0, 1),
        ("c", 1, 0),
    ]
    captured = capsys.readouterr()
    assert captured.out == f"[1/2] a\n{first['text']}\n\n> b\n{second['text']}\n\n[2/2] c\n{other['text']}\n"
    assert "all 2 prompts: τ" in captured.err
    for text, reply in (
        (f"[user]a\n[assistant]{first['text']}\n[user]b\n[reply]", second),
        ("[system]s\n[user]c\n[reply]", other),
    ):
        assert main([*words, "raw=true", f"prompt={text}", f"output={output}"]) == 0
        assert records(output)[-1]["token_ids"] == reply["token_ids"]


@pytest.mark.parametrize("word", ["prompt=-", "-", "prompt_file=-"])
def test_standard_input_is_a_prompt(
    word: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" a, b\r\n")))
    assert main([*words, word, f"output={tmp_path / 'out.jsonl'}"]) == 0
    assert records(tmp_path / "out.jsonl")[0]["prompt"] == " a, b\r\n"


def test_a_text_file_is_a_prompt(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "p, =.txt").write_bytes(b"two\r\nlines")
    assert main([*words, f"prompt_file={tmp_path / 'p, =.txt'}", f"output={tmp_path / 'out.jsonl'}"]) == 0
    assert records(tmp_path / "out.jsonl")[0]["prompt"] == "two\r\nlines"


def test_chat_goes_on_until_quit(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO("b\n\n/quit\nnever\n"))
    assert main([*words, "chat=true", "prompt=a", f"output={output}"]) == 0
    assert [(record["prompt"], record["turn"]) for record in records(output)] == [("a", 0), ("b", 1)]
    captured = capsys.readouterr()
    assert captured.out == "".join(record["text"] + "\n" for record in records(output))
    assert "/quit" in captured.err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main([*words, "chat=true"]) == 0


def test_sampling_follows_the_seed(words: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for seed in (1, 1, 2):
        assert (
            main([*words, "prompt=a", "temperature=1.5", "top_k=50", "top_p=0.9", f"seed={seed}", f"output={output}"])
            == 0
        )
    first, again, other = (record["token_ids"] for record in records(output))
    assert first == again != other


def test_a_fresh_drafter_says_that_it_is_untrained(words: list[str], capsys: Capture) -> None:
    sizes = ["draft=fresh", "draft.gru_hidden_dim=8", "draft.emb_dim=8"]
    assert main([words[0], "prompt=a", "max_new_tokens=4", *sizes]) == 0
    assert "the drafter is untrained (draft=fresh, drawn from seed 0)" in capsys.readouterr().err


def test_plain_decoding_loads_no_drafter(words: list[str], capsys: Capture) -> None:
    for draft in ("draft=none", "draft=nobody/not-there"):
        assert main([words[0], "prompt=a", "max_new_tokens=4", "method=ar", draft]) == 0


# Comparing with plain decoding


def test_compare_shows_both_speeds_and_that_tokens_are_identical(
    words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out.jsonl"
    assert main([*words, "prompt=a", "compare=true", f"output={output}"]) == 0
    captured = capsys.readouterr()
    assert "compare: plain decoding " in captured.err
    assert "times as fast" in captured.err
    assert "compare: tokens identical (12 of 12)" in captured.err
    (record,) = records(output)
    assert captured.out == record["text"] + "\n"
    assert record["compare"]["identical"] is True
    assert record["compare"]["speedup"] == pytest.approx(
        record["tokens_per_second"] / record["compare"]["plain_tokens_per_second"]
    )


def test_compare_claims_nothing_about_sampled_tokens(words: list[str], capsys: Capture) -> None:
    assert main([*words, "prompt=a", "compare=true", "temperature=1"]) == 0
    err = capsys.readouterr().err
    assert "sampled tokens are not compared" in err
    assert "identical" not in err


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compare_counts_differences_and_gives_the_logit_gap(
    dtype: str, words: list[str], folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other = ids_of("abcdefg"), ids_of("abXdeYg")

    def rounds(target: Any, draft: Any, method: Any, prompt_ids: list[int], **options: Any) -> Iterator[Round]:
        return scripted([[token] for token in (plain if method.name == "ar" else other)])(**options)

    monkeypatch.setattr(dominotree.decode.stream, "decode_rounds", rounds)
    output = tmp_path / "out.jsonl"
    assert main([*words, "prompt=a", "raw=true", "compare=true", f"dtype={dtype}", f"output={output}"]) == 0
    target, _ = load(str(folder / "target"), dtype=dtype)
    logits = target.logits_at([*ids_of("a"), *plain[:2]])
    result = records(output)[0]["compare"]
    assert (result["identical"], result["differing_tokens"], result["first_difference"]) == (False, 2, 2)
    gap = abs(float(logits[plain[2]] - logits[other[2]]))
    assert result["logit_gap"] == pytest.approx(gap)
    assert result["near_tie"] is (gap <= 8 * torch.finfo(target.dtype).eps * max(1, abs(float(logits[plain[2]]))))
    err = capsys.readouterr().err
    assert "tokens DIFFER from token 3 on, at 2 of 7 positions" in err
    assert f"{result['logit_gap']:.4g} apart" in err
    explained = "a near-tie" if result["near_tie"] else "more than half precision explains"
    assert (explained if dtype == "bfloat16" else "a fault in float32") in err
