"""The test sets of the papers: where each lies, and the exact words in which it is asked (DFlash, DDTree, Domino)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LIVE_CODE_ROLE = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program"
)
LIVE_CODE_FILES = "https://huggingface.co/datasets/livecodebench/code_generation_lite/resolve/main/test{}.jsonl"


@dataclass(frozen=True)
class Benchmark:
    """One test set; `turns` makes the user turns of a row. `count` prompts are asked in the papers."""

    path: str
    split: str
    count: int
    turns: Callable[[Row], tuple[str, ...]]
    config: str | None = None
    data_files: tuple[str, ...] = ()


def _gsm8k(row: Row) -> tuple[str, ...]:
    return (f"{row['question']}{STEP_BY_STEP}",)


def _problem(row: Row) -> tuple[str, ...]:
    return (f"{row['problem']}{STEP_BY_STEP}",)


def _humaneval(row: Row) -> tuple[str, ...]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return (f"{task}\n```python\n{row['prompt']}\n```",)


def _livecodebench(row: Row) -> tuple[str, ...]:
    if row["starter_code"]:
        form = f"Use the following code structure:\n```python\n{row['starter_code']}\n```"
    else:
        form = "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```"
    question = f"### Question:\n{row['question_content']}\n\n### Format: {form}"
    return (f"{LIVE_CODE_ROLE}\n\n{question}\n\n### Answer: (use the provided format with backticks)",)


def _swe_bench(row: Row) -> tuple[str, ...]:
    return (f"Problem Statement:\n{row['problem_statement']}\nPlease fix the issue described above.",)


def _alpaca(row: Row) -> tuple[str, ...]:
    return (row["instruction"] + (f"\n\nInput:\n{row['input']}" if row["input"] else ""),)


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark("openai/gsm8k", "test", 128, _gsm8k, "main"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", 128, _problem),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", 30, _problem),
    "aime25": Benchmark("MathArena/aime_2025", "train", 30, _problem),
    "humaneval": Benchmark("openai/openai_humaneval", "test", 164, _humaneval),
    "mbpp": Benchmark("google-research-datasets/mbpp", "test", 128, lambda row: (row["prompt"],), "sanitized"),
    "lbpp": Benchmark(
        "parquet",
        "train",
        128,
        lambda row: (row["instruction"],),
        data_files=("hf://datasets/CohereLabs/lbpp/python/test.parquet",),
    ),
    "livecodebench": Benchmark(
        "json",
        "train",
        128,
        _livecodebench,
        data_files=tuple(LIVE_CODE_FILES.format(number) for number in ("", 2, 3, 4, 5, 6)),
    ),
    "swe_bench": Benchmark("princeton-nlp/SWE-bench_Lite", "test", 128, _swe_bench),
    "mt_bench": Benchmark("HuggingFaceH4/mt_bench_prompts", "train", 80, lambda row: tuple(row["prompt"])),
    "alpaca": Benchmark("tatsu-lab/alpaca", "train", 128, _alpaca),
}
