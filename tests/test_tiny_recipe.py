"""The whole way on a CPU: a target, its data, a backbone, a head, and answers with the drafter that came out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.prepare import main as prepare
from infer.generate import main as generate
from train.main import main as train
from train.tiny_target import main as make_target


def test_the_tiny_recipe_gives_a_drafter_in_the_published_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_target([str(tmp_path / "target")]) == 0
    target, data = f"target={tmp_path / 'target'}", f"data_dir={tmp_path / 'data'}"
    prompts = tmp_path / "target" / "prompts.jsonl"
    assert prepare(["experiment=tiny_data", target, f"data.path={prompts}", f"output={tmp_path / 'data'}"]) == 0
    backbone, head = tmp_path / "backbone", tmp_path / "head"
    assert train(["experiment=tiny_backbone", target, data, f"output={backbone}", "device=cpu"]) == 0
    assert (
        train(["experiment=tiny_head", target, data, f"draft={backbone / 'last'}", f"output={head}", "device=cpu"]) == 0
    )
    tau = json.loads((head / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert 1.2 < tau["tau/dflash"] < tau["tau/domino"] < tau["tau/dominotree"]
    assert tau["tau/dflash"] < tau["tau/ddtree"] < tau["tau/static_corrected"] < tau["tau/dominotree"]
    capsys.readouterr()
    asked = [target, f"draft={head / 'last'}", "prompt=def main(argv):\n", "compare=true", "max_new_tokens=48"]
    assert generate([*asked, "device=cpu", "dtype=float32"]) == 0
    assert "tokens identical (48 of 48)" in capsys.readouterr().err
