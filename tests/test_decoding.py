"""Decoding side by side gives every row the tokens it would have alone."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, greedy, make_target

from data.decoding import BatchDecoder, Job, Result, sample
from dominotree.decode.sampling import Sampling
from dominotree.errors import UserError
from dominotree.target import Target

NEVER: frozenset[int] = frozenset()


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 15, (count,), generator=generator).tolist()
    return [torch.randint(0, 13, (length,), generator=generator).tolist() for length in lengths]


def job(key: int, prompt: list[int], count: int, ends: frozenset[int] = NEVER, sampling: Sampling | None = None) -> Job:
    return Job(key, prompt, count, ends, sampling or Sampling())


def run(target: Target, jobs: list[Job], batch_size: int) -> dict[int, Result]:
    decoder = BatchDecoder(target, batch_size)
    for one in jobs:
        decoder.add(one)
    results = []
    while not decoder.is_idle:
        results += decoder.step()
    assert len(results) == len(jobs)
    return {result.key: result for result in results}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_are_those_of_plain_greedy_decoding(family: str) -> None:
    target = make_target(family)
    asked = prompts(9)
    counts = [3 + 5 * (index % 4) for index in range(9)]
    found = run(target, [job(i, ids, counts[i]) for i, ids in enumerate(asked)], batch_size=4)
    for index, ids in enumerate(asked):
        assert found[index] == Result(index, greedy(target, ids, counts[index]), "length")


def test_an_end_token_ends_a_row_and_is_left_out() -> None:
    target = make_target()
    asked = prompts(8)
    free = [greedy(target, ids, 12) for ids in asked]
    ends = frozenset({free[0][0], free[1][5]})
    found = run(target, [job(i, ids, 12, ends) for i, ids in enumerate(asked)], batch_size=3)
    for index, tokens in enumerate(free):
        stop = next((place for place, token in enumerate(tokens) if token in ends), None)
        assert found[index].token_ids == tokens[:stop]
        assert found[index].finish_reason == ("length" if stop is None else "stop")


def test_equal_prompts_share_their_prefill() -> None:
    target = make_target()
    asked = [prompts(2)[index % 2] for index in range(6)]
    found = run(target, [job(i, ids, 6) for i, ids in enumerate(asked)], batch_size=6)
    assert all(found[i].token_ids == greedy(target, ids, 6) for i, ids in enumerate(asked))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_a_row_goes_on_where_its_next_prompt_does(
    batch_size: int, ends_by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    first, others = [1, 2, 3], prompts(2)
    tokens = greedy(target, first, 8)
    ends = frozenset({tokens[-1]}) if ends_by_itself else NEVER
    kept = tokens[: tokens.index(tokens[-1])] if ends_by_itself else tokens
    decoder = BatchDecoder(target, batch_size)
    decoder.add(job(0, first, len(tokens), ends))
    for index, ids in enumerate(others, start=1):
        decoder.add(job(index, ids, 30))
    while not (results := decoder.step()):
        pass
    assert results[0].token_ids == kept
    follow = first + kept + [7, 8, 9]
    prefilled: list[int] = []
    monkeypatch.setattr(
        BatchDecoder,
        "_prefill",
        lambda self, jobs, prefill=BatchDecoder._prefill: (
            prefilled.extend(one.key for one in jobs),
            prefill(self, jobs),
        )[1],
    )
    decoder.add(job(9, follow, 6))
    while not decoder.is_idle:
        results += decoder.step()
    assert 9 not in prefilled
    found = {result.key: result.token_ids for result in results}
    assert found[9] == greedy(target, follow, 6)
    assert [found[1], found[2]] == [greedy(target, ids, 30) for ids in others]


def test_a_row_that_was_fed_on_is_not_continued() -> None:
    target = make_target()
    decoder = BatchDecoder(target, 4)
    decoder.add(job(0, [1, 2, 3], 2))
    decoder.add(job(1, [4, 5], 40))
    results = []
    while not results:
        results += decoder.step()
    decoder.step()
    follow = [1, 2, 3, *results[0].token_ids, 6]
    decoder.add(job(2, follow, 5))
    while not decoder.is_idle:
        results += decoder.step()
    assert {result.key: result.token_ids for result in results}[2] == greedy(target, follow, 5)


def test_samples_follow_from_their_seed_whatever_shares_the_batch() -> None:
    target = make_target()
    asked = prompts(7)
    kinds = [Sampling(1.0), Sampling(0.7, top_k=5), Sampling(1.3, top_p=0.8), Sampling()]
    jobs = [
        job(i, ids, 9, NEVER, Sampling(kind.temperature, kind.top_k, kind.top_p, seed=i))
        for i, ids in enumerate(asked)
        for kind in [kinds[i % 4]]
    ]
    together, apart = run(target, jobs, 7), run(target, jobs[::-1], 2)
    assert together == apart
    other_seeds = run(target, [job(i, ids, 9, NEVER, Sampling(1.0, seed=50 + i)) for i, ids in enumerate(asked)], 7)
    assert other_seeds[0] != together[0]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.5, 0.25, 0.125, 0.0, 0.125]),
        (Sampling(0.5), [0.25 / 0.34375, 0.0625 / 0.34375, 0.015625 / 0.34375, 0.0, 0.015625 / 0.34375]),
        (Sampling(1.0, top_k=2), [2 / 3, 1 / 3, 0, 0, 0]),
        (Sampling(1.0, top_p=0.6), [2 / 3, 1 / 3, 0, 0, 0]),
        (Sampling(1.0, top_k=2, top_p=0.6), [1, 0, 0, 0, 0]),
        (Sampling(1.0, top_p=1e-9), [1, 0, 0, 0, 0]),
        (Sampling(1.0, top_k=99), [0.5, 0.25, 0.125, 0.0, 0.125]),
    ],
)
def test_draws_give_tokens_their_share(sampling: Sampling, expected: list[float]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.125]).log()
    draws = torch.arange(4800, dtype=torch.float64) / 4800
    tokens = sample(logits.expand(4800, -1), draws, sampling)
    assert torch.bincount(tokens, minlength=5) / 4800 == pytest.approx(expected, abs=1e-3)


def test_the_last_draw_still_picks_a_possible_token() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0, float("-inf")]])
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert sample(logits, last, Sampling(1.0)).tolist() == [2]
    assert sample(logits, last * 0, Sampling(1.0)).tolist() == [0]


@pytest.mark.parametrize(
    ("prompt", "count", "what"),
    [([], 3, "at least one prompt token"), ([1], 0, "one new token"), ([1] * 250, 7, "257 tokens exceed .* 256")],
)
def test_impossible_jobs_are_refused(prompt: list[int], count: int, what: str) -> None:
    decoder = BatchDecoder(make_target(), 2)
    with pytest.raises(UserError, match=what):
        decoder.add(job(0, prompt, count))
    assert decoder.is_idle
    assert decoder.step() == []


def test_a_batch_holds_at_least_one() -> None:
    with pytest.raises(UserError, match="batch_size must be at least 1, got 0"):
        BatchDecoder(make_target(), 0)


def test_room_counts_the_rows_that_are_free() -> None:
    decoder = BatchDecoder(make_target(), 3)
    assert decoder.room == 3
    for index in range(5):
        decoder.add(job(index, [1], 2 + index))
    assert decoder.room == 0
    while not decoder.is_idle:
        decoder.step()
    assert decoder.room == 3


def test_long_prompts_are_run_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.decoding.PREFILL_TOKENS", 20)
    target = make_target()
    asked = prompts(6)
    found = run(target, [job(i, ids, 4) for i, ids in enumerate(asked)], batch_size=6)
    assert all(found[i].token_ids == greedy(target, ids, 4) for i, ids in enumerate(asked))
