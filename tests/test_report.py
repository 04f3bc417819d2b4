"""Reports: the papers' tables from raw records, the authors' figures beside them, one page that needs nothing else."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench_records import DFLASH, DOMINO, METHODS, PUBLISHED_SETS, random_records, record, write_run

import infer.published
from dominotree.command import compose_config
from dominotree.decode.methods import make_method
from infer.benchmark import BENCHMARK
from infer.published import Published
from infer.report import main
from infer.sheets import Sheet

Capture = pytest.CaptureFixture[str]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WHAT_IS_THERE = """<script>
const resources = performance.getEntriesByType("resource").map(entry => entry.name);
const images = [...document.images];
document.body.dataset.found = JSON.stringify({
  tables: document.querySelectorAll("table").length,
  cells: document.querySelectorAll("td").length,
  drawn: images.filter(image => image.complete && image.naturalWidth > 100).length,
  images: images.length,
  outside: resources.filter(name => !name.startsWith("data:") && !name.startsWith("file:")),
});
</script>"""


def cells(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return {(row["dataset"], row["method"]): row for row in csv.DictReader(file)}


def table(markdown: str, title: str) -> dict[str, list[str]]:
    """The rows of one table by their first cell."""
    part = markdown.split(f"### {title}\n\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in part.splitlines()]
    return {row[0]: row[1:] for row in rows if not row[0].startswith("---")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run whose setting is the published one."""
    run = write_run(tmp_path_factory.mktemp("run"), random_records(PUBLISHED_SETS, prompts=3))
    assert main([f"run={run}", "paper=true", "resamples=300"]) == 0
    return run / "report"


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a report's time."""
    monkeypatch.setattr("infer.plots.draw_figures", lambda run, folder: [])


@pytest.mark.usefixtures("no_figures")
def test_the_cells_are_the_papers_definitions(tmp_path: Path) -> None:
    plain, tree = METHODS["ar"], METHODS["dominotree"]
    records = [
        # 3 tokens after the first in 0.3 and 0.6 s, against 0.1 and 0.2 s: 0.15 s a token over 0.05 s
        record("a", 0, "ar"),
        record("a", 1, "ar", seconds=[1, 0, 0, 0.5, 0, 0.1]),
        record("a", 0, "dominotree", seconds=[1, 0.02, 0.02, 0.04, 0.01, 0.01], accepted_lengths=[3]),
        record("a", 1, "dominotree", seconds=[1, 0.2, 0, 0, 0, 0], accepted_lengths=[1, 1, 1]),
        record("b", 0, "ar"),
        record("b", 0, "dominotree", accepted_lengths=[2, 1]),
    ]
    run = write_run(tmp_path, records, methods={"ar": plain, "dominotree": tree}, max_new_tokens=4)
    assert main([f"run={run}", "resamples=50"]) == 0
    rows = table((run / "report" / "report.md").read_text(encoding="utf-8"), "Speedup and τ at temperature 0")
    assert rows["Qwen3-4B"] == ["a", "b", "Avg."]
    assert rows["ar"] == ["1.00/1.50", "1.00/1.50", "1.00/1.50"]
    assert rows["dominotree"] == ["3.00/2.00", "1.00/1.50", "2.00/1.75"]
    written = cells(run / "report" / "cells.csv")
    assert float(written["a", "dominotree"]["speedup"]) == pytest.approx(3.0)
    assert float(written["a", "dominotree"]["tokens_per_second"]) == pytest.approx(20.0)
    assert written["a", "dominotree"]["generations"] == "2"
    times = table((run / "report" / "report.md").read_text(encoding="utf-8"), "Time and memory")
    assert times["ar, T=0"][-3:] == ["200.00", "500.0", "100"]


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path, random_records(("a", "b"), prompts=2))
    digests = []
    for name in ("first", "second"):
        assert main([f"run={run}", f"output={tmp_path / name}", "resamples=40"]) == 0
        digests.append(
            {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / name).iterdir()}
        )
    assert digests[0] == digests[1]
    endings = {Path(name).suffix for name in digests[0]}
    assert endings == {".md", ".tex", ".csv", ".html", ".png", ".svg"}


def test_every_figure_of_a_sweep_is_drawn(tmp_path: Path) -> None:
    methods = {"ar": {"name": "ar"}} | {
        f"dominotree@{budget}": {"name": "dominotree", "node_budget": budget, "node_topk": 8} for budget in (4, 8)
    }
    records = random_records(("a",), methods=methods, prompts=2, temperatures=(0.0, 0.5, 1.0))
    assert main([f"run={write_run(tmp_path, records, methods=methods)}", "resamples=20"]) == 0
    figures = {path.stem for path in (tmp_path / "report").glob("*.png")}
    assert figures == {path.stem for path in (tmp_path / "report").glob("*.svg")}
    kinds = ("speedup", "positions", "lengths", "stages", "node_budget")
    assert figures == {f"{kind}_t{temperature}" for kind in kinds for temperature in ("0", "0.5", "1")} | {
        "temperatures"
    }


# The authors' figures


def test_the_published_averages_are_those_of_their_cells() -> None:
    content = yaml.safe_load(Path(infer.published.__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    rows = [(entry, row["cells"].split()) for entry in content["tables"] for row in entry["rows"]]
    assert len(rows) == 50
    for entry, texts in rows:
        assert [*PUBLISHED_SETS, "Avg."] == entry["columns"] and len(texts) == 9
        if "-" not in texts:
            for place in (0, 1):
                *each, average = (float(text.split("/")[place]) for text in texts)
                assert sum(each) / 8 == pytest.approx(average, abs=0.02)


def test_published_rows_stand_below_the_same_rows_of_ours(made: Path) -> None:
    rows = table((made / "report.md").read_text(encoding="utf-8"), "Speedup and τ at temperature 0")
    names = list(rows)
    place = names.index("dominotree")
    assert names[place + 1].startswith("DominoTree, authors' figures: DominoTree (arXiv 2607.08642)")
    assert rows[names[place + 1]][0] == "6.63/10.67"
    assert sum("authors' figures" in name for name in names) == 10


def test_paper_marks_what_lies_outside_the_published_range(made: Path) -> None:
    text = (made / "report.md").read_text(encoding="utf-8")
    rows = table(text, "Speedup and τ at temperature 0")
    assert "†" in "".join(rows["dominotree"]) and "†" not in "".join(rows["ar"])
    (cell,) = table(text, "Differences in speed at temperature 0")["dominotree over ddtree"][-1:]
    assert re.fullmatch(r"\+[\d.]+ \[.*\]† \(A \+7\.7 \[5\.6, 9\.8\]\)", cell)


@pytest.mark.usefixtures("no_figures")
def test_nothing_is_marked_unless_asked(tmp_path: Path) -> None:
    run = write_run(tmp_path, random_records(("gsm8k",), prompts=2))
    assert main([f"run={run}", "resamples=20"]) == 0
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "authors' figures" in text and "†" not in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"dflash", "ddtree", "dominotree"}),
        ({"max_new_tokens": 512}, set()),
        ({"target": "/models/Qwen3-4B"}, {"dflash", "ddtree", "dominotree"}),
        ({"target": "smollm2"}, set()),
        ({"draft": "somebody/else"}, {"dflash", "ddtree"}),
        ({"methods": {"ar": {"name": "ar"}, "dominotree@8": {"name": "dominotree", "node_budget": 8}}}, set()),
        ({"datasets": {"gsm8k": {"source": "gsm8k.jsonl", "benchmark": False}}}, set()),
    ],
)
def test_only_the_same_setting_is_compared(changes: dict[str, Any], expected: set[str], tmp_path: Path) -> None:
    run = write_run(tmp_path, random_records(("gsm8k",), prompts=1), **changes)
    published = Published(json.loads((run / "run.json").read_text(encoding="utf-8")))
    assert {row.ours for row in published.rows if row.cells and row.ours} == expected


def test_an_average_over_other_data_sets_is_not_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path, random_records(("gsm8k", "math500"), prompts=1))
    published = Published(json.loads((run / "run.json").read_text(encoding="utf-8")))
    assert {column for row in published.rows for column in row.cells} == {"gsm8k", "math500"}
    assert published.gain(0.0, "Avg.", "dominotree", "ddtree") is None


@pytest.mark.parametrize("size", ["4b", "8b"])
@pytest.mark.parametrize(
    ("paper", "matched"),
    [("domino", {"dflash", "domino"}), ("dominotree", {"dflash", "ddtree", "domino", "dominotree"})],
)
def test_a_paper_s_recipe_meets_every_row_of_its_table(paper: str, matched: set[str], size: str) -> None:
    config = compose_config(BENCHMARK, [f"experiment=bench_paper_{paper}_{size}"])
    methods = {
        row.title: {"name": row.name, **asdict(make_method(row.name, **row.options))}
        | ({"draft": row.draft} if row.draft else {})
        for row in config.rows()
    }
    published = Published(
        {
            "target": config.target.path,
            "draft": config.draft.path,
            "datasets": {name: {"benchmark": True} for name in config.datasets},
            "identity": {"methods": methods, "max_new_tokens": config.max_new_tokens},
        }
    )
    source = {"domino": "Domino (", "dominotree": "DominoTree ("}[paper]
    for temperature in config.temperatures:
        rows = [row for row in published.rows if row.temperature == temperature and row.source.startswith(source)]
        assert {row.ours for row in rows if row.ours} == matched
        assert all("Avg." in row.cells for row in rows)


# The lossless check, pairs and mistakes


@pytest.mark.usefixtures("no_figures")
def test_chosen_budgets_are_summed_up_with_their_cap(tmp_path: Path) -> None:
    methods = {"ar": METHODS["ar"], "adaptive": {"name": "adaptive", "cap": 8}}
    records = [
        record("a", 0, "ar"),
        record("a", 0, "adaptive", accepted_lengths=[1, 1, 1], tree_sizes=[0, 8, 8]),
        record("a", 1, "ar"),
        record("a", 1, "adaptive", accepted_lengths=[3], tree_sizes=[4]),
    ]
    assert main([f"run={write_run(tmp_path, records, methods=methods)}", "resamples=5"]) == 0
    rows = table((tmp_path / "report" / "report.md").read_text(encoding="utf-8"), "Budgets chosen round by round")
    assert rows["adaptive, T=0"] == ["8", "5.0", "3 / 6 / 8", "50.0"]


@pytest.mark.usefixtures("no_figures")
def test_the_lossless_table_counts_by_method(tmp_path: Path) -> None:
    difference = {"first": 1, "tokens": 3, "logit_gap": 0.1, "near_tie": True, "allowed": True}
    records = [
        record("a", 0, "ar"),
        record("a", 0, "ddtree", token_ids=[7, 1, 2, 3], difference=difference),
        record("a", 0, "dominotree"),
        record("a", 1, "ar"),
        record("a", 1, "dominotree", token_ids=[1, 1, 1, 1], difference={**difference, "allowed": False}),
    ]
    assert main([f"run={write_run(tmp_path, records)}", "resamples=5"]) == 0
    rows = table((tmp_path / "report" / "report.md").read_text(encoding="utf-8"), "Lossless check")
    assert rows["ddtree"] == ["1", "0", "1", "0"]
    assert rows["dominotree"] == ["2", "1", "0", "1"]
    assert "dflash" not in rows


@pytest.mark.usefixtures("no_figures")
def test_a_prompt_that_not_all_methods_have_answered_does_not_count(tmp_path: Path) -> None:
    whole = random_records(("a", "b"), prompts=2)
    cut = [record("a", 9, "ar"), record("a", 9, "dflash", seconds=[0, 99, 0, 0, 0, 0])]
    for name, records in (("whole", whole), ("cut", whole + cut)):
        assert main([f"run={write_run(tmp_path / name, records)}", "resamples=5"]) == 0
    written = [(tmp_path / name / "report" / "cells.csv").read_text(encoding="utf-8") for name in ("whole", "cut")]
    assert written[0] == written[1]
    assert "(2 more left out" in (tmp_path / "cut" / "report" / "index.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("no_figures")
def test_pairs_are_chosen_by_name(tmp_path: Path, capsys: Capture) -> None:
    run = write_run(tmp_path, random_records(("a",), prompts=2))
    assert main([f"run={run}", "resamples=5", 'pairs=["ddtree over dflash"]']) == 0
    rows = table((tmp_path / "report" / "report.md").read_text(encoding="utf-8"), "Differences in τ at temperature 0")
    assert list(rows) == ["difference", "ddtree over dflash"]
    assert main([f"run={run}", "pairs=[ddtree over nothing]"]) == 2
    assert "pairs= has 'ddtree over nothing'" in capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert main([f"run={tmp_path}"]) == 2
    assert "holds no benchmark" in capsys.readouterr().err
    run = write_run(tmp_path, [])
    assert main([f"run={run}"]) == 2
    assert "holds no prompt that every method has answered" in capsys.readouterr().err
    (run / "records.jsonl").write_text('{"dataset": "a"}\n{"half', encoding="utf-8")
    assert main([f"run={run}"]) == 2
    err = capsys.readouterr().err
    assert "records.jsonl line 1 is no benchmark record" in err and err.count("\n") == 1


def test_texts_are_escaped_in_every_format() -> None:
    sheet = Sheet("A & B", "50 %", ["<m>", "a_b"], [["x|y", "1, 2"]])
    assert r"x\|y" in sheet.markdown()
    assert r"a\_b" in sheet.latex() and r"A \& B" in sheet.latex() and r"50 \%" in sheet.latex()
    assert sheet.csv() == '<m>,a_b\nx|y,"1, 2"\n'
    assert "&lt;m&gt;" in sheet.html() and "A &amp; B" in sheet.html()


# The page


def test_the_page_refers_to_nothing_outside(made: Path) -> None:
    page = (made / "index.html").read_text(encoding="utf-8")
    links = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", page)
    assert links and all(link.startswith("data:image/svg+xml;base64,") for link in links)
    for text in (DOMINO, DFLASH, "a &lt;made-up&gt; device", "2026-01-01T00:00:00+00:00", "Lossless check"):
        assert text in page


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium to open the page in")
def test_a_browser_shows_every_table_and_figure(made: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = (made / "index.html").read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", WHAT_IS_THERE + "</body>"), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", "--virtual-time-budget=5000", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = json.loads(re.search(r'data-found="([^"]*)"', dom)[1].replace("&quot;", '"'))  # type: ignore[index]
    assert found["outside"] == []
    assert found["tables"] == text.count("<table>") == 5
    assert found["drawn"] == found["images"] == 4
    assert found["cells"] > 100
