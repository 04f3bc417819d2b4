"""`python -m infer.profile`: what it writes, that methods take it, and one-line errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dominotree.command import compose_config, help_text
from dominotree.decode.measured import Profile
from dominotree.errors import UserError
from infer.generate import main as generate_main
from infer.profile import PROFILE, main

Capture = pytest.CaptureFixture[str]
SMALL = ["context_lengths=[8,60]", "node_counts=[0,1,3,6]", "repeats=2"]


@pytest.fixture(scope="module")
def models(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tiny pair, its drafter in a directory of its own, where the profile goes."""
    draft = tmp_path_factory.mktemp("profiled") / "draft"
    shutil.copytree(folder / "draft", draft)
    return [f"target={folder / 'target'}", f"draft={draft}"]


@pytest.fixture(scope="module")
def profile_path(models: list[str]) -> Path:
    assert main([*models, *SMALL]) == 0
    return Path(models[1].partition("=")[2]) / "profile.json"


def test_costs_are_positive_and_rise_convexly(profile_path: Path) -> None:
    profile = Profile.read(str(profile_path))
    assert profile.draft_seconds > 0 and len(profile.context_lengths) == 2
    for row in (*profile.greedy, *profile.sampled, profile.build_seconds):
        curve = np.array(row)
        assert len(curve) == 7 and curve[0] > 0
        assert np.diff(curve).min() >= -1e-12 and np.diff(curve, 2).min() >= -1e-12
    for length, asked in zip(profile.context_lengths, (8, 60), strict=True):
        assert asked < length < asked + 60  # rounds go on where the ones before them ended


def test_every_round_that_was_timed_is_kept_beside_it(profile_path: Path) -> None:
    measured = json.loads(profile_path.with_name("profile_measured.json").read_text())
    assert {(each["temperature"], each["nodes"]) for each in measured["rounds"]} == {
        (temperature, nodes) for temperature in (0.0, 1.0) for nodes in (0, 1, 3, 6)
    }
    assert all(len(each["seconds"]) == 2 for each in measured["rounds"])
    assert all({"draft", "build", "verify", "commit"} <= each["seconds"][0].keys() for each in measured["rounds"])
    assert measured["versions"]["torch"]


@pytest.mark.parametrize("method", ["caddtree", "condadaptive"])
def test_methods_take_the_profile_beside_the_drafter(
    profile_path: Path, models: list[str], method: str, capsys: Capture
) -> None:
    assert profile_path.exists()
    words = [*models, "prompt=Hello", "max_new_tokens=8", "compare=true", f"method={method}", "method.cap=6"]
    assert generate_main(words) == 0
    assert "tokens identical (8 of 8)" in capsys.readouterr().err


def test_a_profile_that_is_not_there_is_one_line_that_says_what_to_do(folder: Path, capsys: Capture) -> None:
    words = [
        f"target={folder / 'target'}",
        f"draft={folder / 'draft'}",
        "prompt=x",
        "max_new_tokens=8",
        "method=caddtree",
    ]
    assert generate_main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "there is no profile" in line and "python -m infer.profile" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["draft=fresh"], "output= needs a file, as draft=fresh has no directory to write to"),
        (["draft=none"], "this measures a drafter, got draft=none"),
        (["output="], "output= needs a file, got none"),
        (["output=x", "node_counts=[4]"], "node_counts must be 2 or more ascending numbers"),
        (["output=x", "node_counts=[4,2]"], "node_counts must be 2 or more ascending numbers"),
        (["output=x", "context_lengths=[]"], "context_lengths must be 1 or more ascending numbers"),
        (["output=x", "context_lengths=[0]"], "context_lengths must be at least 1, got 0"),
        (["output=x", "repeats=0"], "repeats must be at least 1, got 0"),
    ],
)
def test_settings_that_measure_nothing_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose_config(PROFILE, words)


def test_contexts_beyond_the_target_are_refused(models: list[str], capsys: Capture) -> None:
    assert main([*models, "context_lengths=[100000]", "repeats=1"]) == 2
    assert "context_lengths has 100000" in capsys.readouterr().err


def test_help_explains_the_settings() -> None:
    assert "node_counts" in help_text(PROFILE)
