"""The builder benchmark: what it compares builds the same trees, and its figures and its mistakes are plain to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dominotree.command import compose_config
from dominotree.tree.builders import ConditionalTree, HeapBuilder
from infer.bench_builders import BENCH, PublicScheme, main, random_blocks

TINY = ["shapes=tiny", "budgets=[1,6]", "rounds=2", "repeats=1"]


@pytest.mark.parametrize("budget", [1, 16, 100])
@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_the_public_scheme_selects_the_nodes_of_the_reference(budget: int, sharpness: float) -> None:
    config = compose_config(BENCH, [*TINY, f"sharpness={sharpness}"])
    with torch.no_grad():
        for block in random_blocks(config):
            ours = PublicScheme(budget, 64, 8).build(block)
            expected = HeapBuilder(ConditionalTree(budget, 64, 8)).build(block)
            assert torch.equal(ours.token_ids, expected.token_ids)
            assert torch.equal(ours.parents, expected.parents)
            torch.testing.assert_close(ours.path_log_probs, expected.path_log_probs, rtol=1e-5, atol=1e-5)


def test_the_figures_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "builders.json"
    assert main([*TINY, f"output={output}"]) == 0
    record = json.loads(output.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = record["rows"]
    builders = ["baseline", "heap", "graph", "frontier"]
    assert [(row["node_budget"], row["builder"]) for row in rows] == [(b, name) for b in (1, 6) for name in builders]
    assert all(row["same_nodes"] for row in rows)
    assert all(0 < row["fastest"] <= row["median"] and row["floor"] > 0 for row in rows)
    assert all(row["speedup"] == pytest.approx(1) for row in rows if row["builder"] == "baseline")
    assert record["table_bytes"] == 2000 * 3 * 32 * 4
    printed = capsys.readouterr().out
    assert "auto picks frontier on cpu" in printed
    assert all(name in printed for name in builders)


def test_without_the_baseline_there_is_no_speedup(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "builders=[frontier]", "input_table=false"]) == 0
    assert "×" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shapes=huge"], "shapes must be one of qwen3_4b, qwen3_8b, smollm2, tiny, got huge"),
        (["builders=[best]"], "builders must be one of baseline, heap, graph, frontier, got best"),
        (["builders=[]"], "give at least one of builders and one of budgets"),
        (["budgets=[0]"], "budgets must be at least 1, got 0"),
        (["repeats=0"], "repeats must be at least 1, got 0"),
        (["dtype=int8"], "dtype must be"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
