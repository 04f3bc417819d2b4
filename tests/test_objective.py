"""The chunked objective: equal to the published implementation's values, and to plain autograd over full logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_draft, make_target, small_draft
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from dominotree.draft.checkpoint import load_draft
from dominotree.draft.model import DraftModel
from dominotree.target import Target
from train.objective import TORCH, LossVocabulary, Objective, _chunks, domino_objective
from train.step import StepInput, TrainStep, self_generated_prefixes
from train.targets import BlockTargets, block_targets, sampled_blocks

VARIANTS = ["dflash", "shift_p1", "shift_p0", "noshift_p0", "noshift_p1"]


def lm_weight_of(target: Target) -> Tensor:
    weight = target.model.get_output_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def predicting(draft: DraftModel, hidden: Tensor) -> Tensor:
    return hidden[:, :, hidden.shape[2] - draft.config.draft_length :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradients_are_the_published_ones(
    variant: str, reference: Path, reference_target: Target, reference_expected: dict[str, Any]
) -> None:
    tensors = load_file(reference / "tensors.safetensors")
    ids, mask, features = (tensors[name] for name in ("input_ids", "loss_mask", "target_features"))
    anchors, keep = tensors[f"{variant}/anchors"], tensors[f"{variant}/keep"]
    for lambda_name, expected in reference_expected["variants"][variant]["losses"].items():
        weight_lambda = 0.0 if variant == "dflash" else float(lambda_name)
        draft = load_draft(reference / f"draft_{variant}").requires_grad_(True)
        targets = block_targets(ids, mask, anchors, keep, draft.config.draft_length, 7.0)
        hidden = draft.train_hidden(ids.gather(1, anchors), anchors, keep, features, reference_target.embed)
        vocabulary = LossVocabulary(lm_weight_of(reference_target))
        out = domino_objective(
            draft, predicting(draft, hidden), targets, reference_target.embed, vocabulary, weight_lambda
        )
        total = targets.weights.sum() + 1e-6
        (out.loss / total).backward()
        found = {name.partition(".")[2]: weight.grad for name, weight in draft.named_parameters()}
        assert float(out.loss.detach() / total) == pytest.approx(expected["loss"], abs=1e-4)
        if "final_loss" in expected:
            counts = targets.weights > 0
            assert torch.equal(out.final_measured, counts) == (weight_lambda < 1)
            assert torch.equal(out.base_measured, counts) == (weight_lambda > 0)
            if weight_lambda < 1:
                assert float(out.final_loss / total) == pytest.approx(expected["final_loss"], abs=1e-4)
            if weight_lambda > 0:
                assert float(out.base_loss / total) == pytest.approx(expected["base_loss"], abs=1e-4)
        for name, norm in expected.get("grad_norms", {}).items():
            gradient = found[name]
            assert gradient is not None
            assert float(gradient.norm()) == pytest.approx(norm, rel=1e-3, abs=1e-6)


def plain_logits(draft: DraftModel, hidden: Tensor, targets: BlockTargets, target: Target) -> tuple[Tensor, Tensor]:
    """Whole final and base logits."""
    base = hidden @ lm_weight_of(target).to(hidden.dtype).T
    flat = base.flatten(0, 1)
    final = draft.teacher_forced_logits(
        hidden.flatten(0, 1), flat, targets.prefix_ids.flatten(0, 1), lambda ids: target.embed(ids).to(hidden.dtype)
    )
    return final.view_as(base), base


def cross_entropies(logits: Tensor, targets: BlockTargets) -> Tensor:  # [B, A, K, V] -> [B, A, K], weighted
    losses = F.cross_entropy(logits.flatten(0, 2), targets.labels.flatten(), reduction="none")
    return losses.view_as(targets.weights) * targets.weights


def case(seed: int = 0, **options: Any) -> tuple[Target, DraftModel, Tensor, BlockTargets]:
    target = make_target()
    draft = make_draft(target, **options).requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(13, (2, 20), generator=generator)
    mask = torch.rand(2, 20, generator=generator) < 0.8
    anchors = torch.tensor([[1, 4, 9, 0], [2, 6, 15, 18]])
    keep = torch.tensor([[True, True, True, False], [True, True, True, True]])
    targets = block_targets(ids, mask, anchors, keep, draft.config.draft_length, 5.0)
    hidden = torch.randn(2, 4, draft.config.draft_length, 32, generator=generator)
    return target, draft, hidden, targets


OPTIONS: list[dict[str, Any]] = [{}, {"shift_label": False}, {"pure_draft_prefix_len": 3}, {"with_head": False}]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("lambda_base", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("options", OPTIONS)
def test_chunks_give_the_gradients_of_whole_logits(options: dict[str, Any], lambda_base: float, frozen: bool) -> None:
    """In float64, where nothing but the formula can differ."""
    target, draft, hidden, targets = case(**options)
    draft.double()
    ours, theirs = (hidden.double().requires_grad_(not frozen) for _ in range(2))
    vocabulary = LossVocabulary(lm_weight_of(target).double())
    if not frozen or draft.head is not None:
        out = domino_objective(draft, ours, targets, target.embed, vocabulary, lambda_base, logits_bytes=13 * 8 * 7)
        out.loss.backward()
    found = {name: weight.grad for name, weight in draft.named_parameters()}
    draft.zero_grad()
    final, base = (cross_entropies(logits, targets) for logits in plain_logits(draft, theirs, targets, target))
    loss = (1 - lambda_base) * final.sum() + lambda_base * base.sum()
    if loss.requires_grad:
        loss.backward()
    for name, weight in draft.named_parameters():
        if name.startswith("head"):
            assert found[name] is not None
            torch.testing.assert_close(found[name], torch.zeros_like(weight) if weight.grad is None else weight.grad)
    if not frozen:
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert out.loss.item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("lambda_base", "frozen"), [(0.0, False), (0.4, False), (0.4, True), (1.0, False), (1.0, True)]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_measured_is_what_whole_logits_give(options: dict[str, Any], lambda_base: float, frozen: bool) -> None:
    target, draft, hidden, targets = case(**options)
    hidden.requires_grad_(not frozen)
    vocabulary = LossVocabulary(lm_weight_of(target))
    out = domino_objective(draft, hidden, targets, target.embed, vocabulary, lambda_base, logits_bytes=13 * 4 * 7)
    final, base = plain_logits(draft, hidden, targets, target)
    counts = targets.weights > 0
    for logits, loss, right, measured in (
        (final, out.final_loss, out.final_right, out.final_measured),
        (base, out.base_loss, out.base_right, out.base_measured),
    ):
        losses = cross_entropies(logits.detach(), targets)
        assert loss.item() == pytest.approx(losses[measured].sum().item(), rel=1e-5)
        assert torch.equal(right, (logits.argmax(dim=-1) == targets.labels) & measured)
        assert measured.any() and not (measured & ~counts).any()
    has_head = draft.head is not None
    assert torch.equal(out.final_measured, counts) == (lambda_base < 1 or not has_head)
    assert torch.equal(out.base_measured, counts) == ((lambda_base > 0 and not frozen) or not has_head)


def test_a_sample_of_blocks_does_not_depend_on_the_other_rows() -> None:
    counts = torch.rand(5, 40, 4, generator=torch.Generator().manual_seed(0)) < 0.3
    counts[1] = False
    counts[2, 3:] = False
    counts[2, :3] = True
    together = sampled_blocks(counts)
    assert torch.equal(together, torch.cat([sampled_blocks(row[None]) for row in counts]))
    assert not (together & ~counts.any(dim=-1)).any()
    assert together.sum(dim=1).tolist()[1:3] == [0, 1] and set(together.sum(dim=1).tolist()[3:]) <= {3, 4, 5}


@pytest.mark.parametrize("lambda_base", [0.0, 0.4, 1.0])  # base or final logits of a sample only, or of all rows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_nearly_the_same(dtype: torch.dtype, lambda_base: float) -> None:
    target, draft, hidden, targets = case()
    outs, gradients = [], []
    for kind in (torch.float32, dtype):
        own = hidden.clone().requires_grad_()
        draft.zero_grad()
        vocabulary = LossVocabulary(lm_weight_of(target).to(kind))
        outs.append(
            domino_objective(draft, own, targets, target.embed, vocabulary, lambda_base, logits_bytes=13 * 8 * 5)
        )
        outs[-1].loss.backward()
        assert own.grad is not None and draft.head is not None and draft.head.output_rows.grad is not None
        assert draft.head.output_rows.grad.dtype == torch.float32
        gradients.append((own.grad, draft.head.output_rows.grad))
    for name in ("loss", "final_loss", "base_loss"):
        assert getattr(outs[1], name).item() == pytest.approx(getattr(outs[0], name).item(), rel=0.02)
    assert torch.equal(outs[1].base_measured, outs[0].base_measured)
    for exact, half in zip(*gradients, strict=True):
        assert (half - exact).norm() <= 0.03 * exact.norm()  # 0 at λ = 1: W2 gets none


def test_a_label_of_vanishing_probability_costs_what_it_should() -> None:
    target, draft, hidden, targets = case(with_head=False)
    hidden = (300 * hidden).requires_grad_()
    vocabulary = LossVocabulary(lm_weight_of(target))
    out = domino_objective(draft, hidden, targets, target.embed, vocabulary, 0.0)
    _, base = plain_logits(draft, hidden, targets, target)
    assert cross_entropies(base, targets).max() > 200
    assert out.loss.item() == pytest.approx(cross_entropies(base, targets).sum().item(), rel=1e-6)


@pytest.mark.parametrize("lambda_base", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("counting", [False, True])
def test_every_trainable_weight_gets_a_gradient_whatever_counts(counting: bool, lambda_base: float) -> None:
    """Or data-parallel processes with nothing to learn would wait for the others for ever."""
    target, draft, _, targets = case()
    if not counting:
        targets = BlockTargets(targets.prefix_ids, targets.labels, torch.zeros_like(targets.weights))
    ids, anchors = torch.arange(24).view(2, 12) % 13, torch.tensor([[1, 4, 5, 0], [2, 6, 8, 9]])
    features = torch.randn(2, 12, draft.backbone.fc.in_features, generator=torch.Generator().manual_seed(1))
    step = TrainStep(
        draft, target.embed, lm_weight_of(target), LossVocabulary(lm_weight_of(target)), self_generated=False
    )
    inputs = StepInput(ids.gather(1, anchors), anchors, torch.ones(2, 4, dtype=torch.bool), features, targets)
    step(inputs, lambda_base).loss.backward()
    assert all(weight.grad is not None for weight in draft.parameters())
    assert counting == any(weight.grad.any() for weight in draft.parameters() if weight.grad is not None)


def test_the_gradients_are_given_once() -> None:
    target, draft, hidden, targets = case()
    out = run(LossVocabulary(lm_weight_of(target)), target, draft, hidden, targets)
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        out.loss.backward()


def test_fifty_updates_lose_what_they_lose_on_whole_logits() -> None:
    target = make_target()
    generator = torch.Generator().manual_seed(3)
    batches = [batch(generator) for _ in range(50)]
    curves = []
    for whole in (False, True):
        draft = make_draft(target, gru_hidden_dim=6).train().requires_grad_(True)
        optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
        vocabulary = LossVocabulary(lm_weight_of(target))
        curve = []
        for update, (ids, anchors, features) in enumerate(batches, start=1):
            keep, mask = torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 20, dtype=torch.bool)
            targets = block_targets(ids, mask, anchors, keep, draft.config.draft_length, 7.0)
            every = draft.train_hidden(ids.gather(1, anchors), anchors, keep, features, target.embed)
            hidden, weight_lambda = predicting(draft, every), 1 - update / 50
            if whole:
                final, base = (cross_entropies(x, targets) for x in plain_logits(draft, hidden, targets, target))
                loss = (1 - weight_lambda) * final.sum() + weight_lambda * base.sum()
            else:
                out = domino_objective(draft, hidden, targets, target.embed, vocabulary, weight_lambda, 13 * 8 * 9)
                loss = out.loss
            loss = loss / targets.weights.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)
    assert sum(curves[0][-5:]) < 0.8 * sum(curves[0][:5])


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences that count up, so that there is something to learn; anchors and features."""
    ids = (torch.randint(13, (2, 1), generator=generator) + torch.arange(20)) % 13
    anchors = torch.randint(1, 18, (2, 4), generator=generator).sort().values
    return ids, anchors, torch.randn(2, 20, 3 * 32, generator=generator)


def run(
    vocabulary: LossVocabulary, target: Target, draft: DraftModel, hidden: Tensor, targets: BlockTargets
) -> Objective:
    return domino_objective(draft, hidden, targets, target.embed, vocabulary, 0.3)


def test_a_vocabulary_subset_normalises_over_itself_and_leaves_other_labels_out() -> None:
    target, draft, hidden, targets = case()
    ids = torch.tensor([0, 2, 3, 5, 8, 12])
    vocabulary = LossVocabulary(lm_weight_of(target), ids)
    inside = torch.isin(targets.labels, ids) & (targets.weights > 0)
    assert torch.equal(vocabulary.restrict(targets).weights > 0, inside)
    out = run(vocabulary, target, draft, hidden, vocabulary.restrict(targets))
    assert draft.head is not None
    states = draft.head.prefix_states(target.embed(targets.prefix_ids.flatten(0, 1))).view(2, 4, 6, -1)
    correction = draft.head.correction(hidden, states).detach()
    correction[:, :, : draft.config.uncorrected_length] = 0
    final = (hidden @ lm_weight_of(target).T + correction)[..., ids].log_softmax(dim=-1)
    places = torch.searchsorted(ids, targets.labels.clamp(max=12))
    picked = final.gather(-1, places.clamp(max=5)[..., None])[..., 0]
    assert out.final_loss.item() == pytest.approx(float(-(picked * targets.weights)[inside].sum()), rel=1e-4)
    everything = run(LossVocabulary(lm_weight_of(target), torch.arange(13)), target, draft, hidden, targets)
    whole = run(LossVocabulary(lm_weight_of(target)), target, draft, hidden, targets)
    torch.testing.assert_close(everything.loss, whole.loss)


@pytest.mark.parametrize("shift_label", [True, False])
def test_targets_follow_the_two_alignments(shift_label: bool) -> None:
    draft = small_draft(shift_label=shift_label)
    ids = torch.arange(10, 20)[None]
    mask = torch.ones(1, 10, dtype=torch.bool)
    mask[0, 6] = False
    length = draft.config.draft_length
    targets = block_targets(ids, mask, torch.tensor([[4, 7]]), torch.tensor([[True, False]]), length, 2.0)
    assert targets.prefix_ids[0, 0, :3].tolist() == [14, 15, 16]
    assert targets.labels[0, 0, :3].tolist() == [15, 16, 17]
    expected = [float(torch.exp(torch.tensor(-i / 2.0))) * (4 + i + 1 < 10 and i != 1) for i in range(length)]
    assert targets.weights[0, 0].tolist() == pytest.approx(expected)
    assert not targets.weights[0, 1].any()


@pytest.mark.parametrize("logits_bytes", [1, 13 * 4 * 3 * 5, 1 << 20])  # chunks of one row, of five, and all
def test_self_generated_prefixes_are_the_drafter_s_own_greedy_chain(logits_bytes: int) -> None:
    target, draft, hidden, targets = case()
    lm_weight = lm_weight_of(target)
    prefixes = self_generated_prefixes(draft, hidden, targets.prefix_ids, target.embed, lm_weight, logits_bytes)
    assert torch.equal(prefixes[..., 0], targets.prefix_ids[..., 0])
    flat_hidden, flat = hidden.flatten(0, 1), prefixes.flatten(0, 1)
    base = flat_hidden @ lm_weight.T
    final = draft.teacher_forced_logits(flat_hidden, base, flat, target.embed)
    assert torch.equal(final[:, :-1].argmax(dim=-1), flat[:, 1:])


@given(
    final_rows=st.integers(0, 40),
    base_rows=st.integers(0, 40),
    logits_bytes=st.integers(1, 4000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_chunks_hold_each_row_once_and_keep_to_the_memory_they_may_take(
    final_rows: int, base_rows: int, logits_bytes: int, dtype: torch.dtype
) -> None:
    lm_weight = torch.zeros(13, 4, dtype=dtype)
    reached = finals = bases = 0
    for rows, final, base, scratch in _chunks(final_rows, base_rows, lm_weight, logits_bytes, TORCH):
        assert rows.start == reached and rows.stop - rows.start == max(len(final), len(base)) > 0
        for formed, whole in ((final, final_rows), (base, base_rows)):
            assert len(formed) == max(0, min(whole, rows.stop) - rows.start)
        taken = final.nbytes + base.nbytes + (0 if scratch is None else scratch.nbytes)
        assert taken <= logits_bytes or rows.stop - rows.start == 1
        reached, finals, bases = rows.stop, finals + len(final), bases + len(base)
    assert (reached, finals, bases) == (max(final_rows, base_rows), final_rows, base_rows)
