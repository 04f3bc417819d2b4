"""The chunked objective: equal to the published implementation's values, and to plain autograd over full logits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_draft, make_target, small_draft
from safetensors.torch import load_file
from torch import Tensor

from dominotree.draft.checkpoint import load_draft
from dominotree.draft.model import DraftModel
from dominotree.target import Target
from train import objective as objective_module
from train.objective import LossVocabulary, Objective, domino_objective
from train.step import self_generated_prefixes
from train.targets import BlockTargets, block_targets

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
            assert float(out.final_loss / total) == pytest.approx(expected["final_loss"], abs=1e-4)
            assert float(out.base_loss / total) == pytest.approx(expected["base_loss"], abs=1e-4)
        for name, norm in expected.get("grad_norms", {}).items():
            gradient = found[name]
            assert gradient is not None
            assert float(gradient.norm()) == pytest.approx(norm, rel=1e-3, abs=1e-6)


def plain_loss(
    draft: DraftModel, hidden: Tensor, targets: BlockTargets, target: Target, lambda_base: float
) -> tuple[Tensor, Tensor]:
    """The same losses from whole logits by torch's own cross-entropy."""
    base = hidden @ lm_weight_of(target).to(hidden.dtype).T
    flat = base.flatten(0, 1)
    final = draft.teacher_forced_logits(
        hidden.flatten(0, 1), flat, targets.prefix_ids.flatten(0, 1), lambda ids: target.embed(ids).to(hidden.dtype)
    ).view_as(base)
    losses = [
        (
            F.cross_entropy(logits.flatten(0, 2), targets.labels.flatten(), reduction="none")
            * targets.weights.flatten()
        ).sum()
        for logits in (final, base)
    ]
    return (1 - lambda_base) * losses[0] + lambda_base * losses[1], final.argmax(dim=-1) == targets.labels


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


@pytest.mark.parametrize("lambda_base", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("options", [{}, {"shift_label": False}, {"pure_draft_prefix_len": 3}, {"with_head": False}])
def test_chunks_give_what_whole_logits_give(
    options: dict[str, Any], lambda_base: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective_module, "CHUNK_ROWS", 7)
    target, draft, hidden, targets = case(**options)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().double().requires_grad_()
    out = domino_objective(draft, ours, targets, target.embed, LossVocabulary(lm_weight_of(target)), lambda_base)
    out.loss.backward()
    found = {name: weight.grad for name, weight in draft.named_parameters() if weight.grad is not None}
    exact = copy.deepcopy(draft).double()
    exact.zero_grad()
    loss, right = plain_loss(exact, theirs, targets, target, lambda_base)
    loss.backward()
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=1e-4, atol=1e-5)
    for name, weight in exact.named_parameters():
        if weight.grad is not None and name.startswith("head"):
            torch.testing.assert_close(found[name], weight.grad.float(), rtol=1e-4, atol=1e-5)
    assert torch.equal(out.final_right, right & (targets.weights > 0))


def test_every_trainable_weight_gets_a_gradient_even_where_nothing_counts() -> None:
    target, draft, hidden, targets = case()
    nothing = BlockTargets(targets.prefix_ids, targets.labels, torch.zeros_like(targets.weights))
    out = domino_objective(draft, hidden, nothing, target.embed, LossVocabulary(lm_weight_of(target)), 1.0)
    out.loss.backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in draft.parameters())


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


def test_self_generated_prefixes_are_the_drafter_s_own_greedy_chain() -> None:
    target, draft, hidden, targets = case()
    prefixes = self_generated_prefixes(draft, hidden, targets.prefix_ids, target.embed, lm_weight_of(target))
    assert torch.equal(prefixes[..., 0], targets.prefix_ids[..., 0])
    flat_hidden, flat = hidden.flatten(0, 1), prefixes.flatten(0, 1)
    base = flat_hidden @ lm_weight_of(target).T
    final = draft.teacher_forced_logits(flat_hidden, base, flat, target.embed)
    assert torch.equal(final[:, :-1].argmax(dim=-1), flat[:, 1:])
