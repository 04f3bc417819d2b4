"""Half precision: where a method departs from plain decoding, the target's two choices were all but equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import READY_METHODS, make_target

from dominotree.decode.loop import decode
from dominotree.decode.methods import make_method
from dominotree.decode.sampling import Sampling
from dominotree.draft.fresh import fresh_draft
from dominotree.draft.model import DraftModel
from dominotree.target import Target

COUNT = 36
PROMPTS = [[3, 1, 4], [15, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
DRAFTING = [name for name in READY_METHODS if name != "ar"]
# A bfloat16 step is 2^-8 of the value. Behind four layers of wide weights two ways to compute one logit lie a few
# steps apart; fewer than one in ten of the target's choices is closer than the eight allowed here.
RELATIVE_TIE = 8 * 2**-8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Random weights, written in float32 and loaded as bfloat16."""
    directory: Path = tmp_path_factory.mktemp("target")
    made = make_target(vocab_size=17)
    made.model.save_pretrained(directory)
    model = type(made.model).from_pretrained(directory, dtype=torch.bfloat16)
    return Target(model)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    """Plain decoding of every prompt."""
    return [decode(target, None, make_method("ar"), prompt, max_new_tokens=COUNT).token_ids for prompt in PROMPTS]


def relative_gap(target: Target, prefix: list[int], first: int, second: int) -> float:
    """How far apart the target's logits of two tokens lie, relative to its largest logit."""
    logits = target.logits_at(prefix).float()
    return abs(float(logits[first] - logits[second])) / float(logits.abs().max())


def draft_for(target: Target, dtype: torch.dtype) -> DraftModel:
    return fresh_draft(target, seed=2, num_features=3, gru_hidden_dim=12, emb_dim=8).to(dtype)


def test_most_choices_are_far_from_a_tie(target: Target, plain: list[list[int]]) -> None:
    """Else the tests below would forgive anything."""
    gaps = []
    for prompt, ids in zip(PROMPTS, plain, strict=True):
        for place in range(0, COUNT, 3):
            prefix = prompt + ids[:place]
            runner_up = int(target.logits_at(prefix).topk(2).indices[1])
            gaps.append(relative_gap(target, prefix, ids[place], runner_up))
    assert sum(gap > RELATIVE_TIE for gap in gaps) > 0.8 * len(gaps)


@pytest.mark.parametrize("draft_dtype", [torch.bfloat16, torch.float32], ids=["bf16 draft", "fp32 draft"])
@pytest.mark.parametrize("method", DRAFTING)
def test_every_departure_from_plain_decoding_is_a_near_tie(
    target: Target, plain: list[list[int]], method: str, draft_dtype: torch.dtype
) -> None:
    draft = draft_for(target, draft_dtype)
    agreed = 0
    accepted: list[int] = []
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        ours = decode(target, draft, make_method(method), prompt, max_new_tokens=COUNT)
        accepted += ours.accepted_lengths
        assert len(ours.token_ids) == COUNT
        differing = [place for place in range(COUNT) if ours.token_ids[place] != expected[place]]
        if differing:
            place = differing[0]
            prefix = prompt + expected[:place]
            assert relative_gap(target, prefix, expected[place], ours.token_ids[place]) <= RELATIVE_TIE
        agreed += differing[0] if differing else COUNT
    assert agreed > 0.2 * COUNT * len(PROMPTS)
    assert sum(accepted) > len(accepted) or method in ("dflash", "domino")


def test_plain_decoding_departs_from_transformers_at_near_ties_only(target: Target, plain: list[list[int]]) -> None:
    for prompt, ids_of_plain in zip(PROMPTS, plain, strict=True):
        ids = torch.tensor([prompt])
        output = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT, pad_token_id=0
        )
        expected = output[0, len(prompt) :].tolist()
        for place, (ours, theirs) in enumerate(zip(ids_of_plain, expected, strict=True)):
            if ours != theirs:
                assert relative_gap(target, prompt + expected[:place], ours, theirs) <= RELATIVE_TIE
                break


def test_a_target_and_a_drafter_keep_their_own_number_formats(target: Target) -> None:
    draft = draft_for(target, torch.float32)
    decode(target, draft, make_method("dominotree"), PROMPTS[0], max_new_tokens=4)
    assert target.dtype == torch.bfloat16
    assert draft.dtype == torch.float32


def test_sampling_in_half_precision_is_reproducible_and_in_range(target: Target) -> None:
    draft = draft_for(target, torch.bfloat16)
    outputs = [
        decode(
            target, draft, make_method("dominotree"), PROMPTS[0], max_new_tokens=30, sampling=Sampling(0.8, seed=4)
        ).token_ids
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]
    assert all(0 <= token < 17 for token in outputs[0])
