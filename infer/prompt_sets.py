"""The prompts of a benchmark run, by data set, and the digests that name them in records."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass

from data.answers import ChatPrompt
from data.benchmarks import BENCHMARKS
from data.config import DataChoice
from data.prompts import Prompt, read_prompts
from data.sources import open_source
from dominotree.chat import encode_chat
from dominotree.errors import UserError
from dominotree.target import Target
from infer.benchmark_config import dataset_label


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt of a data set. Its digest does not depend on its place; of two alike the second has another one."""

    dataset: str
    digest: str
    prompt: Prompt


def load_prompt_sets(datasets: tuple[str, ...], limit: int | None) -> dict[str, list[NamedPrompt]]:
    """At most `limit` prompts of each, None standing for the papers' number or the whole file. Raises UserError."""
    return {dataset_label(dataset): _named(dataset_label(dataset), _load(dataset, limit)) for dataset in datasets}


def check_lengths(prompts: list[NamedPrompt], target: Target, max_new_tokens: int) -> None:
    """Raises UserError for a prompt whose turns and answers might not fit into the target's context."""
    assert target.tokenizer is not None
    limit = target.context_length
    for named in prompts if limit is not None else []:
        history = [dict(message) for message in named.prompt.history]
        turns = [{"role": "user", "content": turn} for turn in named.prompt.turns]
        length = len(encode_chat(target.tokenizer, [*history, turns[0]]))
        length += sum(len(encode_chat(target.tokenizer, [turn])) for turn in turns[1:])
        most = length + len(turns) * max_new_tokens
        if limit is not None and most > limit:
            raise UserError(
                f"{named.prompt.source}: {length} prompt tokens and {len(turns)} answers of max_new_tokens="
                f"{max_new_tokens} may exceed the target's context of {limit}; lower max_new_tokens, "
                "or leave this prompt out"
            )


def _load(dataset: str, limit: int | None) -> list[Prompt]:
    if dataset not in BENCHMARKS:
        if not dataset.endswith(".jsonl"):
            raise UserError(
                f"datasets= has {dataset}, which is neither one of {', '.join(BENCHMARKS)} nor a .jsonl file"
            )
        return read_prompts(dataset)[:limit]
    source = open_source(DataChoice("benchmark", name=dataset), limit)
    return [
        Prompt(tuple(map(str, prompt.turns)), f"{dataset} prompt {prompt.prompt_id + 1}", prompt.history)
        for prompt in source.prompts(())
        if isinstance(prompt, ChatPrompt)
    ]


def _named(dataset: str, prompts: list[Prompt]) -> list[NamedPrompt]:
    seen: Counter[str] = Counter()
    named = []
    for prompt in prompts:
        text = json.dumps([prompt.history, prompt.turns])
        digest = hashlib.blake2b(f"{seen[text]}{text}".encode(), digest_size=5).hexdigest()
        named.append(NamedPrompt(dataset, digest, prompt))
        seen[text] += 1
    return named
