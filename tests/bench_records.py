"""Made-up benchmark folders, for the tests of reports."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

DOMINO, DFLASH = "Huang2020/Qwen3-4B-Domino-b16", "z-lab/Qwen3-4B-DFlash-b16"
METHODS: dict[str, dict[str, Any]] = {
    "ar": {"name": "ar"},
    "dflash": {"name": "dflash", "draft": DFLASH},
    "ddtree": {"name": "ddtree", "node_budget": 16, "draft": DFLASH},
    "dominotree": {"name": "dominotree", "node_budget": 16},
}
PUBLISHED_SETS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt_bench", "alpaca")


def record(dataset: str, prompt: int, method: str, **values: Any) -> dict[str, Any]:
    """One record, four tokens in 0.3 s after the prefill where nothing else is said."""
    return {
        "dataset": dataset,
        "prompt": f"{prompt:010x}",
        "turn": 0,
        "temperature": 0.0,
        "method": method,
        "tokens": 4,
        "finish_reason": "length",
        "accepted_lengths": [1, 2],
        "seconds": [0.5, 0.05, 0.05, 0.15, 0.04, 0.01],
        "first_token_seconds": 0.5,
        "peak_mib": 100,
        **({"token_ids": [7, 8, 9, 10]} if method == "ar" else {}),
        **values,
    }


def write_run(folder: Path, records: list[dict[str, Any]], **values: Any) -> Path:
    """A benchmark's folder with these records; `values` replace those of its run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    datasets = dict.fromkeys(one["dataset"] for one in records)
    methods = values.pop("methods", METHODS)
    info = {
        "identity": {
            "methods": methods,
            "dtype": "float32",
            "device": "a <made-up> device",
            "max_new_tokens": values.pop("max_new_tokens", 2048),
        },
        "target": "Qwen/Qwen3-4B",
        "draft": DOMINO,
        "datasets": {name: {"source": name, "benchmark": True, "prompts": 1} for name in datasets},
        "sessions": [{"started": "2026-01-01T00:00:00+00:00"}],
        **values,
    }
    (folder / "run.json").write_text(json.dumps(info), encoding="utf-8")
    lines = "".join(json.dumps(one) + "\n" for one in records)
    (folder / "records.jsonl").write_text(lines, encoding="utf-8")
    return folder


def random_records(
    datasets: tuple[str, ...], *, methods: Any = METHODS, prompts: int = 5, temperatures: tuple[float, ...] = (0.0,)
) -> list[dict[str, Any]]:
    """Later methods accept more; every prompt has an ease of its own."""
    generator, records = random.Random(0), []
    for dataset in datasets:
        for prompt in range(prompts):
            ease = generator.uniform(0.3, 0.9)
            for temperature in temperatures:
                for place, method in enumerate(methods):
                    lengths = [1 + round(place * ease * generator.uniform(0.5, 1.5)) for _ in range(6)]
                    tokens, spent = 1 + sum(lengths), generator.uniform(0.9, 1.1)
                    records.append(
                        record(
                            dataset,
                            prompt,
                            method,
                            temperature=temperature,
                            tokens=tokens,
                            accepted_lengths=lengths,
                            seconds=[0.1, 0.02, 0.01, 0.1 * spent, 0.01, 0.001],
                        )
                    )
    return records
