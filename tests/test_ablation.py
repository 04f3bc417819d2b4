"""The ablation script: every variant trained with its own recipe, and a table that says how sure it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dominotree.errors import UserError
from train import ablation


def test_every_variant_runs_with_every_seed_and_its_tau_reaches_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def pretend(words: list[str]) -> int:
        seen.append(words)
        given = dict(word.split("=", 1) for word in words)
        tau = 2.0 + float(given.get("lambda_start", 0)) + 0.1 * int(given["seed"])
        figures = {"tau/dflash": 1.5, "tau/domino": tau} if given["stage"] == "domino" else {"tau/dflash": 1.5}
        folder = Path(given["output"])
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"loss": 1}) + "\n" + json.dumps(figures) + "\n")
        return 0

    monkeypatch.setattr(ablation, "train", pretend)
    assert ablation.main([str(tmp_path), "2", "experiment=x"]) == 0
    assert len(seen) == 8 and all(words[0] == "experiment=x" for words in seen)
    assert sum("prefixes=self_generated" in words for words in seen) == 2
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in table.splitlines()[2:]}
    assert [cell.strip() for cell in rows["no head (DFlash)"]] == ["1.500", "", "", "", "", ""]
    # Two values 0.1 apart: the 95% Student interval is the mean ± 12.706 * 0.05.
    assert rows["teacher forcing, curriculum"][1].strip() == "3.050 [2.415, 3.685]"
    assert rows["teacher forcing"][1].strip() == "2.050 [1.415, 2.685]"


def test_the_gain_over_the_row_above_is_paired_by_seed() -> None:
    above = [{"dominotree": 2.0}, {"dominotree": 4.0}]
    below = [{"dominotree": 2.5}, {"dominotree": 4.7}]
    (_, _, first, second) = ablation.table({"a": above, "b": below}).splitlines()
    assert first.split("|")[-2].strip() == ""
    # 0.5 and 0.7: the mean ± 12.706 * 0.1.
    assert second.split("|")[-2].strip() == "0.600 [-0.671, 1.871]"


def test_a_run_that_fails_stops_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "train", lambda words: 2)
    with pytest.raises(UserError, match="exit code 2"):
        ablation.main([str(tmp_path), "1"])
    with pytest.raises(UserError, match="number of seeds"):
        ablation.main([str(tmp_path), "many"])


@given(st.lists(st.floats(1, 8), min_size=1, max_size=5))
def test_an_interval_holds_its_mean(values: list[float]) -> None:
    text = ablation.interval(values)
    mean, _, rest = text.partition(" ")
    if rest:
        low, high = (float(part) for part in rest.strip("[]").split(", "))
        assert low <= float(mean) <= high
