"""Budgets chosen round by round: the trees, losslessness, and the files that may not be trusted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import draft_block, greedy, make_draft, make_target
from measured_files import ADAPTIVE, CAP, Measured, write_measured

from data.models import SMOLLM2_DRAFTER
from dominotree.decode.adaptive import CondAdaptive
from dominotree.decode.base import CANDIDATE_WIDTH
from dominotree.decode.cache import TargetCache
from dominotree.decode.loop import decode, decode_rounds
from dominotree.decode.measured import CALIBRATION, FittedCalibration, Profile
from dominotree.decode.methods import Method, make_method
from dominotree.decode.sampling import Sampling
from dominotree.draft.checkpoint import load_draft
from dominotree.errors import UserError
from dominotree.identity import speed_identity, weights_fingerprint
from dominotree.tree.budget import StoppingRule
from dominotree.tree.builders import CapturedFrontier
from dominotree.tree.children import Proposal
from dominotree.tree.nodes import DraftTree

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    target = make_target()
    return write_measured(target, make_draft(target), tmp_path)


def proposal_of(measured: Measured, **values: Any) -> Proposal:
    layers = measured.draft.config.target_layer_ids
    features = measured.target.forward(torch.tensor([PROMPT]), TargetCache(8), layer_ids=layers).features
    assert features is not None
    return dataclasses.replace(draft_block(measured.target, measured.draft, features, root_id=9), **values)


def nodes(tree: DraftTree) -> list[tuple[int, int]]:
    return list(zip(tree.token_ids[0].tolist(), tree.parents[0].tolist(), strict=True))


@pytest.mark.parametrize("name", ADAPTIVE)
def test_every_rule_gives_the_target_s_own_greedy_tokens(measured: Measured, name: str) -> None:
    generation = decode(measured.target, measured.draft, measured.method(name), PROMPT, max_new_tokens=24)
    assert generation.token_ids == greedy(measured.target, PROMPT, 24)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_round_in_which_no_node_is_worth_its_cost_is_a_plain_step(measured: Measured, name: str) -> None:
    steep = [[0.1 + 9.0 * n for n in range(9)]] * 2
    measured.change("profile.json", greedy=steep)
    generation = decode(measured.target, measured.draft, measured.method(name), PROMPT, max_new_tokens=8)
    assert generation.token_ids == greedy(measured.target, PROMPT, 8)
    assert generation.accepted_lengths == [1] * 7


@pytest.mark.parametrize("context_length", [10, 505, 5000])
@pytest.mark.parametrize(("name", "full"), [("caddtree", "ddtree"), ("condadaptive", "dominotree")])
def test_the_tree_is_the_full_tree_cut_by_the_rule(
    measured: Measured, name: str, full: str, context_length: int
) -> None:
    proposal = proposal_of(measured, context_length=context_length)
    whole = make_method(full, node_budget=CAP).build(proposal)
    assert whole.path_log_probs is not None
    costs = Profile.read(str(measured.folder / "profile.json")).costs(0.0, with_build=False)
    size = StoppingRule(costs.round_seconds(context_length, CAP)).size(whole.path_log_probs[0].tolist())
    assert nodes(measured.checked(name).build(proposal)) == nodes(whole.first(size))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("context_length", [10, 505])
@pytest.mark.parametrize("name", ["condadaptive", "adaptive"])
def test_builders_agree(measured: Measured, name: str, context_length: int, temperature: float) -> None:
    proposal = proposal_of(measured, context_length=context_length, temperature=temperature)
    by_heap = measured.checked(name, builder="heap").build(proposal)
    assert by_heap.size > 0
    assert nodes(measured.checked(name).build(proposal)) == nodes(by_heap)
    method = measured.checked(name)
    assert isinstance(method, CondAdaptive)
    captured = CapturedFrontier(dataclasses.replace(method.tree, steps=method.steps(temperature)))
    assert nodes(captured.build(proposal, method.rule(proposal))) == nodes(by_heap)


def test_the_graph_builder_takes_no_calibration(measured: Measured) -> None:
    with pytest.raises(UserError, match="builder=graph takes no calibration"):
        measured.method("adaptive", builder="graph")


def test_longer_contexts_that_cost_more_a_node_get_smaller_trees(measured: Measured) -> None:
    method = measured.checked("condadaptive")
    sizes = [method.build(proposal_of(measured, context_length=length)).size for length in (10, 505, 1000)]
    assert sizes[0] > sizes[-1] and sizes == sorted(sizes, reverse=True)


def test_calibrated_chances_decide_and_follow_the_temperature(measured: Measured) -> None:
    method, raw = measured.checked("adaptive"), measured.checked("condadaptive")
    sizes = [method.build(proposal_of(measured, temperature=temperature)).size for temperature in (0.0, 0.5, 1.0)]
    assert sizes[0] <= sizes[1] <= sizes[2] and sizes[0] < sizes[2]
    assert sizes[0] < raw.build(proposal_of(measured)).size


def test_the_identity_calibration_changes_nothing(measured: Measured) -> None:
    steps = [{"slope": 1.0, "offsets": [0.0]}] * 2
    measured.change("calibration.json", calibration={"candidate_width": 64, "temperatures": [0.0, 1.0], "steps": steps})
    proposal = proposal_of(measured)
    assert nodes(measured.checked("adaptive").build(proposal)) == nodes(
        measured.checked("condadaptive").build(proposal)
    )


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_same_round_gets_the_same_tree_and_no_more_than_the_cap(measured: Measured, name: str) -> None:
    flat = [[0.1] * 9] * 2
    measured.change("profile.json", greedy=flat)
    method, proposal = measured.checked(name), proposal_of(measured)
    assert nodes(method.build(proposal)) == nodes(method.build(proposal))
    assert method.build(proposal).size == CAP


def test_builders_are_told_the_committed_tokens_and_the_temperature(measured: Measured) -> None:
    seen: list[tuple[int, float]] = []

    class Looking(Method):
        name = "looking"

        def build(self, proposal: Proposal) -> DraftTree:
            seen.append((proposal.context_length, proposal.temperature))
            return make_method("ddtree").build(proposal)

    expected, length = [], len(PROMPT)
    for index, round_ in enumerate(
        decode_rounds(
            measured.target, measured.draft, Looking(), PROMPT, max_new_tokens=9, sampling=Sampling(0.7, seed=1)
        )
    ):
        expected += [(length, 0.7)] if index else []
        length += len(round_.token_ids) if index else 0
    # The root is the last committed token; what stands before it is the context. A last round may draft nothing.
    assert seen == expected[: len(seen)] and len(seen) >= len(expected) - 1


@pytest.mark.parametrize(
    "key",
    [
        "processor",
        "device",
        "threads",
        "tree builder",
        "dtype",
        "torch",
        "transformers",
        "target shapes",
        "draft shapes",
    ],
)
@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_profile_of_another_machine_or_model_is_refused_by_name(measured: Measured, name: str, key: str) -> None:
    made_on = speed_identity(measured.target, measured.draft) | {key: "another"}
    measured.change("profile.json", made_on=made_on)
    with pytest.raises(UserError, match=f"made with {key} another, this run has .*python -m infer.profile"):
        decode(measured.target, measured.draft, measured.method(name), PROMPT, max_new_tokens=4)


def test_a_calibration_of_other_weights_is_refused(measured: Measured) -> None:
    method = measured.method("adaptive")
    assert measured.draft.head is not None
    with torch.no_grad():
        measured.draft.head.output_rows.mul_(2.0)
    with pytest.raises(UserError, match=r"calibration.json was made with draft weights .*python -m infer.calibrate"):
        decode(measured.target, measured.draft, method, PROMPT, max_new_tokens=4)


def test_the_calibration_that_ships_is_of_the_drafter_that_ships() -> None:
    draft = load_draft(SMOLLM2_DRAFTER)
    fitted = FittedCalibration.read(str(SMOLLM2_DRAFTER / CALIBRATION))
    assert fitted.made_on["draft weights"] == weights_fingerprint(draft)
    assert fitted.calibration.candidate_width == CANDIDATE_WIDTH
    assert {len(steps.offsets) for steps in fitted.calibration.steps} == {draft.config.draft_length}


def test_a_calibration_of_another_normalisation_is_refused(measured: Measured) -> None:
    with pytest.raises(UserError, match="made with candidate_width 64, this run has 0"):
        measured.checked("adaptive", candidate_width=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no profile .*; measure again with python -m infer.profile"),
        ("{", "cannot read the profile"),
        ("[]", "is no profile: it holds no JSON object"),
        ('{"draft_seconds": 1.0}', "is no profile that this version reads: made_on has no value"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_as_the_method_is_made(
    measured: Measured, content: str | None, message: str
) -> None:
    path = measured.folder / "profile.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=message):
        measured.method("caddtree")


def test_impossible_costs_are_refused(measured: Measured) -> None:
    measured.change("profile.json", draft_seconds=-1.0)
    with pytest.raises(UserError, match="seconds are finite and positive"):
        measured.method("caddtree")


@pytest.mark.parametrize("name", ADAPTIVE)
def test_without_a_path_the_files_beside_the_drafter_are_taken(measured: Measured, name: str) -> None:
    method = make_method(name, cap=CAP)
    with pytest.raises(UserError, match=r"not loaded from a directory .* give method.profile=FILE"):
        method.check(measured.target, measured.draft)
    measured.draft.directory = measured.folder
    method.check(measured.target, measured.draft)
    proposal = proposal_of(measured)
    assert nodes(method.build(proposal)) == nodes(measured.checked(name).build(proposal))


def test_sizes_differ_from_round_to_round(measured: Measured) -> None:
    """Or choosing them would be idle: a drafter that is sometimes sure."""
    method = measured.checked("condadaptive")
    sizes = []
    for scale in (0.1, 1.0, 10.0):
        proposal = proposal_of(measured)
        sizes.append(method.build(dataclasses.replace(proposal, base_logits=proposal.base_logits * scale)).size)
    assert len(np.unique(sizes)) > 1


@pytest.mark.parametrize("value", [0, -1, 1.5, "8"])
def test_a_cap_below_one_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=f"method.cap must be an integer of at least 1, got {value}"):
        make_method("caddtree", cap=value)
