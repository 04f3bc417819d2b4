"""The benchmark of the objective compares like with like: three ways to the same gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.bench_objective import VARIANTS, main


def test_all_ways_are_measured_and_give_the_same_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "objective.json"
    assert main(["shapes=tiny", "logits_mib=1", "repeats=2", "device=cpu", f"output={output}"]) == 0
    written = json.loads(output.read_text(encoding="utf-8"))
    records = written["records"]
    assert [(record["variant"], record["backbone"]) for record in records] == [
        (name, backbone) for backbone in ("trained", "frozen") for name in VARIANTS
    ]
    for record in records:
        assert record["gradient_difference"] < 1e-5 and len(record["seconds"]) == 2
        assert record["peak_mib"] >= record["beside_gradients_mib"]
    assert written["config"]["shapes"] == "tiny" and written["threads"] >= 1
    assert "checkpointed chunks" in capsys.readouterr().out


def test_one_pass_keeps_to_the_memory_it_is_given(tmp_path: Path) -> None:
    """16 MiB of logits in chunks of 8, where whole logits, their like and their gradients take several times 16."""
    output = tmp_path / "objective.json"
    words = ["shapes=tiny", "rows=8192", "logits_mib=8", "repeats=1", "device=cpu", f"output={output}"]
    assert main(words) == 0
    used = {
        (record["variant"], record["backbone"]): record["beside_gradients_mib"]
        for record in json.loads(output.read_text(encoding="utf-8"))["records"]
    }
    for backbone in ("trained", "frozen"):
        assert used["one pass", backbone] < 8 + 6  # and what is of the rows, not of their logits
        assert used["whole logits", backbone] > 40


@pytest.mark.parametrize(("word", "part"), [("shapes=huge", "shapes"), ("repeats=0", "repeats"), ("rows=0", "rows")])
def test_a_mistake_is_one_line(word: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and part in lines[0]
