"""Drafters and targets that do not fit are refused with both values; a fresh drafter fits, and comes from its seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FAMILIES, READY_METHODS, make_target, small_config
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dominotree.decode.loop import decode
from dominotree.decode.methods import make_method
from dominotree.draft.checkpoint import check_fits
from dominotree.draft.fresh import choose_mask_token, fresh_draft
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError
from dominotree.target import Target


@pytest.mark.parametrize(
    ("options", "drafted", "offered"),
    [
        ({"hidden_size": 40}, "hidden size is 40", "32"),
        ({"vocab_size": 14}, "vocabulary is 14", "13"),
        ({"vocab_size": 12, "mask_token_id": 11}, "vocabulary is 12", "13"),
        ({"num_target_layers": 6}, "number of target layers is 6", "4"),
        ({"mask_token_id": 13}, "mask token id 13", "13 embeddings"),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(
    options: dict[str, Any], drafted: str, offered: str
) -> None:
    target = make_target()
    check_fits(DraftModel(small_config()), target)
    draft = DraftModel(small_config(**options))
    with pytest.raises(UserError) as caught:
        check_fits(draft, target)
    message = str(caught.value)
    assert drafted in message and message.rstrip().endswith(offered) and "\n" not in message
    with pytest.raises(UserError):
        decode(target, draft, make_method("dflash"), [1, 2], max_new_tokens=3)


def test_the_mask_may_lie_past_the_tokenizer_but_not_past_the_embeddings() -> None:
    target = make_target()
    target.model.resize_token_embeddings(20)
    check_fits(DraftModel(small_config(vocab_size=20, mask_token_id=19)), target)


def test_a_fresh_drafter_comes_from_its_seed_alone() -> None:
    target = make_target()
    torch.manual_seed(1)
    first = fresh_draft(target, seed=7).state_dict()
    torch.manual_seed(2)
    again, other = fresh_draft(target, seed=7).state_dict(), fresh_draft(target, seed=8).state_dict()
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first if first[key].dim() == 2)


def test_a_fresh_drafter_leaves_the_global_generator_alone() -> None:
    target = make_target()
    before = torch.random.get_rng_state()
    fresh_draft(target, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_drafter_fits_its_target_and_drafts_for_it(family: str) -> None:
    target = make_target(family)
    draft = fresh_draft(target, seed=0, block_size=5, gru_hidden_dim=8, emb_dim=4)
    check_fits(draft, target)
    assert draft.dtype == target.dtype and not draft.training
    assert not any(weight.requires_grad for weight in draft.parameters())
    for name in READY_METHODS:
        assert len(decode(target, draft, make_method(name), [1, 2, 3], max_new_tokens=7).token_ids) == 7


def test_a_fresh_drafter_takes_the_target_s_dtype() -> None:
    whole = fresh_draft(make_target(), seed=0).backbone
    half = fresh_draft(Target(make_target().model.bfloat16()), seed=0).backbone
    assert half.fc.weight.dtype == torch.bfloat16
    like, positions = torch.zeros(1), torch.tensor([[0, 100, 255]])
    for rough, exact in zip(half.rotary_emb(like, positions), whole.rotary_emb(like, positions), strict=True):
        assert torch.equal(rough, exact)  # angles are computed in float32 all the same


def test_a_fresh_drafter_takes_the_target_s_shapes_and_the_options_given() -> None:
    target = make_target("gemma3", vocab_size=17)
    config = fresh_draft(
        target, seed=0, block_size=9, num_layers=3, num_features=2, gru_hidden_dim=7, emb_dim=5, shift_label=False
    ).config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (32, 48, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.vocab_size, config.num_target_layers, config.max_position_embeddings) == (17, 4, 256)
    assert (config.block_size, config.draft_length, len(config.target_layer_ids)) == (9, 8, 2)
    assert config.head is not None and (config.head.gru_hidden_dim, config.head.emb_dim) == (7, 5)
    assert config.rope_parameters["rope_theta"] == 1e6  # of the global layers, the local ones have 1e4
    assert fresh_draft(target, seed=0, with_head=False).head is None


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"block_size": 1}, "block_size"),
        ({"num_layers": 0}, "num_hidden_layers"),
        ({"num_features": 0}, "target_layer_ids"),
        ({"gru_hidden_dim": 0}, "gru_hidden_dim"),
        ({"emb_dim": -3}, "emb_dim"),
        ({"block_size": 4, "pure_draft_prefix_len": 5}, "pure_draft_prefix_len"),
        ({"block_size": 4, "pure_draft_prefix_len": 4, "shift_label": False}, "pure_draft_prefix_len"),
    ],
)
def test_a_fresh_drafter_of_impossible_sizes_is_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        fresh_draft(make_target(), seed=0, **options)


def tokenizer_of(size: int, **special: str) -> PreTrainedTokenizerFast:
    words = {f"t{index}": index for index in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), **special)


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (None, 12),  # without a tokenizer, the last row
        (tokenizer_of(13, mask_token="t5", pad_token="t2"), 5),
        (tokenizer_of(10, mask_token="t5"), 5),
        (tokenizer_of(10, pad_token="t2"), 10),  # the first row past the vocabulary
        (tokenizer_of(13, pad_token="t2", eos_token="t3"), 2),
        (tokenizer_of(13, pad_token="t3", eos_token="t3"), 12),  # padding that ends texts would mark ends
        (tokenizer_of(13), 12),
    ],
)
def test_the_mask_token_is_the_least_used_id_there_is(tokenizer: PreTrainedTokenizerFast | None, expected: int) -> None:
    target = Target(make_target().model, tokenizer)
    assert choose_mask_token(target) == expected
    assert fresh_draft(target, seed=0).config.mask_token_id == expected
