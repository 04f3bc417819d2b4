"""The paper's training ablation in small (Domino, table 5): head off and on, teacher forcing and the training-time
test, with and without the base-anchored curriculum, over several seeds.

    python -m train.ablation runs/ablation 3 experiment=tiny_backbone data_dir=runs/tiny/data optim.updates=400

The words after the number of seeds go to every run, as for train/main.py. Backbone and head are trained together from
scratch. A run that is finished is not run again. Prints a Markdown table of τ, measured by decoding held-out prompts,
with 95% intervals over the seeds, and writes it beside the runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

from dominotree.command import reporting
from dominotree.errors import UserError
from train.main import main as train

TOGETHER = ["stage=domino", "backbone=trained"]
VARIANTS = {
    "no head (DFlash)": ["stage=dflash", "backbone=trained"],
    "training-time test": [*TOGETHER, "prefixes=self_generated", "lambda_start=0.0"],
    "teacher forcing": [*TOGETHER, "lambda_start=0.0"],
    "teacher forcing, curriculum": [*TOGETHER, "lambda_start=1.0"],
}
METHODS = ("dflash", "domino", "ddtree", "static_corrected", "dominotree")


def run_variant(folder: Path, words: list[str]) -> dict[str, float]:
    """τ by method after training in `folder`, from its last validation."""
    code = train([*words, f"output={folder}"])
    if code:
        raise UserError(f"the run in {folder} ended with exit code {code}; the line above says why")
    last = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return {method: last[f"tau/{method}"] for method in METHODS if f"tau/{method}" in last}


def interval(values: list[float]) -> str:
    """Mean and 95% Student interval over the seeds; the mean alone where they do not differ, or there is one."""
    mean = float(np.mean(values))
    if not np.ptp(values):
        return f"{mean:.3f}"
    low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=stats.sem(values))
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """A row a variant. The last column compares the best tree with the row above seed by seed, on the same held-out
    prompts: how hard those are, which moves all variants alike, drops out of its interval."""
    names = ["training", *(f"τ {method}" for method in METHODS), f"{METHODS[-1]}: more than above"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    above: list[dict[str, float]] = []
    for variant, runs in results.items():
        cells = [interval([run[method] for run in runs]) if method in runs[0] else "" for method in METHODS]
        pairs = [
            (run, other) for run, other in zip(runs, above, strict=False) if METHODS[-1] in run.keys() & other.keys()
        ]
        cells.append(interval([run[METHODS[-1]] - other[METHODS[-1]] for run, other in pairs]) if pairs else "")
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
        above = runs
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    if len(argv) < 2 or not argv[1].isdigit() or not int(argv[1]):
        raise UserError("give a directory, a number of seeds, and the words of train/main.py for every run")
    output, seeds, words = Path(argv[0]), int(argv[1]), argv[2:]
    results: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for seed in range(seeds):
        for index, (variant, own) in enumerate(VARIANTS.items()):
            more = [*own, f"seed={seed}", f"draft.seed={seed}"]
            results[variant].append(run_variant(output / f"variant-{index}-seed-{seed}", [*words, *more]))
    (output / "table.md").write_text(table(results), encoding="utf-8")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(reporting(lambda: main(sys.argv[1:])))
