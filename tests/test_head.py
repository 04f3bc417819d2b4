"""The Domino head: its step form, its block form and torch's own GRU agree; the correction is the published formula."""

from __future__ import annotations

import pytest
import torch
from conftest import small_draft
from torch import Tensor, nn
from torch.nn.functional import embedding, silu

from dominotree.draft.config import HeadConfig
from dominotree.draft.head import DominoHead
from dominotree.draft.model import DraftModel

HIDDEN, GRU, RANK, VOCAB = 32, 10, 6, 13


@pytest.fixture
def head() -> DominoHead:
    head = small_draft().head
    assert head is not None
    return head


@pytest.fixture
def gru(head: DominoHead) -> nn.GRU:
    """An independent GRU of torch on the published weights."""
    gru = nn.GRU(HIDDEN, GRU, batch_first=True, bias=False)
    gru.load_state_dict({name: weight.clone() for name, weight in head.prefix_gru.state_dict().items()})
    return gru.requires_grad_(False)


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_step_is_torch_s_gru_step(head: DominoHead, gru: nn.GRU) -> None:
    tokens, state = noise(5, HIDDEN), noise(5, GRU, seed=4)
    expected = gru(tokens[:, None], state[None])[1][0]
    torch.testing.assert_close(head.advance(tokens, state), expected, rtol=0, atol=1e-5)


def test_the_first_step_starts_from_zeros(head: DominoHead) -> None:
    gates = head.input_gates(noise(5, HIDDEN))
    expected = head.step(gates, head.initial_state(5))
    torch.testing.assert_close(head.first_step(gates), expected, rtol=0, atol=1e-6)


def test_the_correction_in_two_parts_is_the_correction(head: DominoHead) -> None:
    hidden, states = noise(HIDDEN), noise(4, GRU, seed=4)
    ours = head.low_rank_after(head.position_part(hidden), states)
    torch.testing.assert_close(ours, head.low_rank(hidden.expand(4, -1), states), rtol=0, atol=1e-5)


def test_products_may_be_formed_otherwise(head: DominoHead) -> None:
    tokens, states = noise(5, HIDDEN), noise(5, GRU, seed=4)

    def linear(inputs: Tensor, weight: Tensor) -> Tensor:
        return (weight @ inputs.t()).t()

    ours = head.step(head.input_gates(tokens, linear), states, linear)
    torch.testing.assert_close(ours, head.advance(tokens, states), rtol=0, atol=1e-5)


def test_a_step_takes_any_leading_dimensions(head: DominoHead) -> None:
    tokens, states = noise(2, 3, HIDDEN), noise(2, 3, GRU, seed=4)
    stepped = head.advance(tokens, states)
    for row in range(2):
        for column in range(3):
            torch.testing.assert_close(
                stepped[row, column], head.advance(tokens[row, column], states[row, column]), rtol=0, atol=1e-5
            )


def test_the_block_form_is_torch_s_gru_over_the_block(head: DominoHead, gru: nn.GRU) -> None:
    tokens = noise(3, 9, HIDDEN)
    torch.testing.assert_close(head.prefix_states(tokens), gru(tokens)[0], rtol=0, atol=1e-5)


def test_the_block_form_is_the_step_form_repeated(head: DominoHead) -> None:
    tokens = noise(3, 9, HIDDEN)
    states, state = head.prefix_states(tokens), head.initial_state(3)
    assert torch.equal(state, torch.zeros(3, GRU))
    for index in range(9):
        state = head.advance(tokens[:, index], state)
        torch.testing.assert_close(states[:, index], state, rtol=0, atol=1e-5)


def formula(head: DominoHead, hidden: Tensor, state: Tensor) -> Tensor:
    """`W2 SiLU(W1 [H; S])`, hidden before state."""
    weights = head.state_dict()
    low_rank = silu(torch.cat([hidden, state], dim=-1) @ weights["embed_proj.0.weight"].T)
    return low_rank @ weights["embed_proj.2.weight"].T


def test_the_correction_is_the_published_formula(head: DominoHead) -> None:
    hidden, state = noise(2, 4, HIDDEN), noise(2, 4, GRU, seed=4)
    expected = formula(head, hidden, state)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(head.correction(hidden, state), expected, rtol=1e-5, atol=1e-5)


def test_the_correction_of_some_rows_is_those_of_the_whole(head: DominoHead) -> None:
    hidden, state = noise(4, HIDDEN), noise(4, GRU, seed=4)
    rows = torch.tensor([12, 0, 5, 5])
    whole = head.correction(hidden, state)
    chosen = head.correction(hidden, state, head.output_rows[rows])
    torch.testing.assert_close(chosen, whole[:, rows], rtol=1e-5, atol=1e-5)


def test_rows_of_another_dtype_decide_the_correction_s(head: DominoHead) -> None:
    hidden, state = noise(HIDDEN).bfloat16(), noise(GRU).bfloat16()
    half = head.bfloat16()
    assert half.correction(hidden, state).dtype == torch.bfloat16
    assert half.correction(hidden, state, half.output_rows[:3].float()).dtype == torch.float32


def drafter(shift_label: bool, prefix: int) -> DraftModel:
    return small_draft(shift_label=shift_label, head=HeadConfig(GRU, RANK, pure_draft_prefix_len=prefix))


CASES = [(True, prefix) for prefix in range(5)] + [(False, prefix) for prefix in range(4)]


@pytest.mark.parametrize(("shift_label", "prefix"), CASES)
def test_teacher_forced_logits_are_the_chain_s_step_by_step(shift_label: bool, prefix: int) -> None:
    draft = drafter(shift_label, prefix)
    assert draft.head is not None
    length = 4 if shift_label else 3  # of a block of 4
    hidden, base = noise(2, length, HIDDEN), noise(2, length, VOCAB, seed=4)
    table = noise(VOCAB, HIDDEN, seed=5)
    prefix_ids = torch.tensor([[3, 0, 12, 7], [9, 9, 1, 4]])[:, :length]
    logits = draft.teacher_forced_logits(hidden, base, prefix_ids, lambda ids: embedding(ids, table))
    for row in range(2):
        state = torch.zeros(GRU)
        for slot in range(length):
            state = draft.head.advance(table[prefix_ids[row, slot]], state)
            expected = base[row, slot]
            if slot >= prefix:
                expected = expected + formula(draft.head, hidden[row, slot], state)
            torch.testing.assert_close(logits[row, slot], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift_label", [True, False])
def test_a_prediction_depends_only_on_the_tokens_before_it(shift_label: bool) -> None:
    draft = drafter(shift_label, prefix=0)
    length = draft.config.draft_length
    hidden, base, table = noise(1, length, HIDDEN), noise(1, length, VOCAB), noise(VOCAB, HIDDEN, seed=5)
    ids = torch.tensor([[3, 0, 12, 7]])[:, :length]
    before = draft.teacher_forced_logits(hidden, base, ids, lambda ids: embedding(ids, table))
    for changed in range(length):
        other = ids.clone()
        other[0, changed] = 8
        after = draft.teacher_forced_logits(hidden, base, other, lambda ids: embedding(ids, table))
        differs = (after != before).any(dim=-1)[0].tolist()
        assert differs == [slot >= changed for slot in range(length)]


def test_without_a_head_the_base_logits_are_final() -> None:
    draft = small_draft(head=None, shift_label=False)
    base = noise(1, 3, VOCAB)
    ids = torch.tensor([[1, 2, 3]])
    table = noise(VOCAB, HIDDEN)
    final = draft.teacher_forced_logits(noise(1, 3, HIDDEN), base, ids, lambda ids: embedding(ids, table))
    assert torch.equal(final, base)


@pytest.mark.parametrize(("shift_label", "prefix"), [(True, 0), (True, 2), (False, 1)])
def test_embeddings_of_another_dtype_are_cast_for_the_head(shift_label: bool, prefix: int) -> None:
    draft = drafter(shift_label, prefix)
    length = draft.config.draft_length
    hidden, base, table = noise(1, length, HIDDEN), noise(1, length, VOCAB), noise(VOCAB, HIDDEN).bfloat16()
    ids = torch.tensor([[3, 0, 12, 7]])[:, :length]
    half = draft.teacher_forced_logits(hidden, base, ids, lambda ids: embedding(ids, table))
    full = draft.teacher_forced_logits(hidden, base, ids, lambda ids: embedding(ids, table.float()))
    assert torch.equal(half, full)
