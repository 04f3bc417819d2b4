"""`python -m infer.calibrate`: logged rounds, reliability figures, replayed rules, and the calibration it writes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import make_draft, make_target
from measured_files import write_measured
from tiny_chat import TEMPLATE, byte_tokenizer

from dominotree.command import compose_config
from dominotree.decode.loop import decode
from dominotree.decode.measured import FittedCalibration, Profile
from dominotree.decode.methods import DominoTree
from dominotree.decode.sampling import Sampling
from dominotree.draft.checkpoint import load_draft
from dominotree.errors import UserError
from dominotree.target import Target
from dominotree.tree.budget import CostModel
from infer.calibrate import CALIBRATE, main
from infer.generate import main as generate_main
from infer.reliability import Nodes, causes, path_log_chances, raw
from infer.replay import compare_rules, flat, replay
from infer.round_log import LoggedRound, log_rounds

Capture = pytest.CaptureFixture[str]
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module", params=[0.0, 1.0])
def rounds(request: pytest.FixtureRequest) -> list[LoggedRound]:
    target = make_target()
    return list(log_rounds(target, make_draft(target), DominoTree(12, 8, 4), PROMPT, Sampling(request.param), 40))


def test_the_log_holds_what_was_accepted() -> None:
    target = make_target()
    draft, method = make_draft(target), DominoTree(12, 8, 4)
    generation = decode(target, draft, method, PROMPT, max_new_tokens=40)
    logged = list(log_rounds(target, draft, method, PROMPT, Sampling(), 40))
    assert [1 + int(one.accepted.sum()) for one in logged] == generation.accepted_lengths[:-1]
    starts = np.cumsum([len(PROMPT), *generation.accepted_lengths[:-2]])
    assert [one.context_length for one in logged] == starts.tolist()


def test_only_children_of_accepted_nodes_are_decided(rounds: list[LoggedRound]) -> None:
    for one in rounds:
        for node, parent in enumerate(one.parents):
            assert one.decided[node] == (parent < 0 or one.accepted[parent])
            assert one.decided[node] or not one.accepted[node]
        assert np.isfinite(one.full_log_probs[one.decided]).all()


def test_over_the_whole_vocabulary_two_ways_of_scoring_agree() -> None:
    """The tree's own scores against the teacher-forced logits of the path that the target took."""
    target = make_target()
    for one in log_rounds(target, make_draft(target), DominoTree(12, 0, 4), PROMPT, Sampling(1.0), 40):
        assert one.full_log_probs[one.decided] == pytest.approx(one.log_probs[one.decided], abs=1e-4)


def test_candidates_share_more_probability_than_the_whole_vocabulary_leaves_them(rounds: list[LoggedRound]) -> None:
    for row in causes(rounds, 6)["steps"]:
        assert row["candidates"] >= row["full"] - 1e-6


def test_paths_are_sums_of_their_steps() -> None:
    parents = np.array([-1, 0, -1, 1])
    assert path_log_chances(np.array([-1.0, -2.0, -3.0, -4.0]), parents).tolist() == [-1.0, -3.0, -3.0, -7.0]


def test_the_calibration_error_of_known_nodes() -> None:
    chances, accepted = np.array([0.92, 0.98, 0.05, 0.15]), np.array([True, False, False, False])
    nodes = Nodes(np.array([1, 1, 2, 2]), chances, accepted)
    assert nodes.error() == pytest.approx((2 * abs(0.95 - 0.5) + 0.05 + 0.15) / 4)
    assert nodes.at(2).error() == pytest.approx((0.05 + 0.15) / 2)


def one_round(log_probs: list[float], accepted: list[bool]) -> LoggedRound:
    """Siblings only."""
    count = len(log_probs)
    return LoggedRound(
        10, np.full(count, -1), np.ones(count, dtype=int), np.array(log_probs), np.array(accepted),
        np.array(log_probs), np.zeros(15), 1,
    )  # fmt: skip


def test_a_rule_is_replayed_at_its_costs() -> None:
    logged = [one_round([-0.1, -3.0], [True, False]), one_round([-2.5, -3.0], [False, True])]
    costs = CostModel((1,), ((0.8, 1.0, 1.2),), draft_seconds=0.2)
    chances = [raw(one) for one in logged]
    outcome = replay("rule", logged, chances, costs, cap=2)
    assert (outcome.nodes, outcome.at_cap) == (0.5, 0.0)
    assert outcome.tokens == 1.5 and outcome.tokens_per_second == pytest.approx(3 / (1.2 + 1.0))
    fixed, *_ = compare_rules(logged, chances, chances, costs, caps=[2])
    assert (fixed.nodes, fixed.at_cap, fixed.tokens) == (2.0, 1.0, 2.0)


def test_costs_made_flat_leave_every_node_free() -> None:
    seconds = flat(CostModel((1,), ((0.8, 1.0, 1.2),), draft_seconds=0.2)).round_seconds(5, 130)
    assert seconds[:129] == [1.0] * 129 and seconds[130] > seconds[129] > 1.0


@pytest.fixture(scope="module")
def calibrated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The command's words for the tiny pair, and the drafter's directory after it ran."""
    place = tmp_path_factory.mktemp("calibrated")
    shutil.copytree(folder / "draft", place / "draft")
    target, draft = Target.load(folder / "target"), load_draft(place / "draft")
    write_measured(target, draft, place / "draft")
    (place / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(3)))
    words = [f"target={folder / 'target'}", f"draft={place / 'draft'}"]
    settings = ["max_new_tokens=16", "node_budget=8", "caps=[2,8]", "candidate_width=0"]
    assert main([*words, *settings, f"prompts={place / 'prompts.jsonl'}"]) == 0
    return words, place / "draft"


def test_the_calibration_goes_beside_the_drafter_with_report_and_figure(calibrated: tuple[list[str], Path]) -> None:
    fitted = FittedCalibration.read(str(calibrated[1] / "calibration.json"))
    assert (fitted.calibration.temperatures, fitted.calibration.candidate_width) == ((0.0, 1.0), 0)
    report = json.loads((calibrated[1] / "calibration_report.json").read_text())["temperatures"]
    for temperature in ("0", "1"):
        part = report[temperature]
        for when in ("before", "after"):
            total = part[when][-1]
            assert total["depth"] is None
            assert total["predicted"] == pytest.approx(sum(row["predicted"] for row in part[when][:-1]))
        assert {row["rule"] for row in part["replay"]} >= {"fixed", "condadaptive", "adaptive", "hindsight"}
    assert (calibrated[1] / "calibration.png").read_bytes().startswith(b"\x89PNG")


def test_the_method_takes_it_and_stays_lossless(calibrated: tuple[list[str], Path], capsys: Capture) -> None:
    words = [*calibrated[0], "prompt=Hello", "max_new_tokens=10", "compare=true", "method=adaptive"]
    assert generate_main([*words, "method.candidate_width=0", "method.cap=8"]) == 0
    assert "tokens identical (10 of 10)" in capsys.readouterr().err


def test_a_data_directory_gives_the_prompts_of_its_conversations(
    calibrated: tuple[list[str], Path], folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "target", tmp_path / "target")
    byte_tokenizer(TEMPLATE.replace("[reply]", "[assistant]")).save_pretrained(tmp_path / "target")
    turns = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "an answer"}] for n in range(2)]
    lines = [json.dumps({"id": n, "messages": messages, "source": "x"}) for n, messages in enumerate(turns)]
    (tmp_path / "conversations.jsonl").write_text("\n".join(lines) + "\n")
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": messages[0]["content"]}) + "\n" for messages in turns))
    settings = [f"target={tmp_path / 'target'}", calibrated[0][1]]
    settings += ["max_new_tokens=8", "node_budget=4", "caps=[4]", "temperatures=[0.0]"]
    for name, prompts in (("a", tmp_path), ("b", asked)):
        assert main([*settings, f"prompts={prompts}", f"output={tmp_path / name}.json"]) == 0
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_a_foreign_profile_is_refused_before_anything_is_decoded(
    calibrated: tuple[list[str], Path], tmp_path: Path, capsys: Capture
) -> None:
    profile = Profile.read(str(calibrated[1] / "profile.json"))
    foreign = dataclasses.replace(profile, made_on=profile.made_on | {"processor": "another"})
    (tmp_path / "profile.json").write_text(json.dumps(dataclasses.asdict(foreign)))
    words = [f"profile={tmp_path / 'profile.json'}", f"prompts={calibrated[1].parent / 'prompts.jsonl'}"]
    assert main([*calibrated[0], *words]) == 2
    assert "made with processor another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "prompts has no value"),
        (["prompts="], "prompts= needs a file of prompts or a data directory"),
        (["prompts=x", "draft=fresh"], "output= needs a file"),
        (["prompts=x", "output=y", "temperatures=[1.0,0.5]"], "temperatures must be 1 or more ascending numbers"),
        (["prompts=x", "output=y", "temperatures=[-1.0]"], "temperatures must be at least 0, got -1.0"),
        (["prompts=x", "output=y", "caps=[0]"], "caps must be at least 1, got 0"),
        (["prompts=x", "output=y", "limit=1"], "limit must be at least 2, got 1"),
        (["prompts=x", "output=y", "node_budget=0"], "node_budget must be at least 1, got 0"),
    ],
)
def test_settings_that_calibrate_nothing_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose_config(CALIBRATE, words)
