"""Timing real rounds of the decoding loop, tree sizes in turn, and fitting costs to the times."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from rich.console import Console as Screen
from rich.table import Table

from data.models import load_drafter, load_target
from data.provenance import versions, write_json
from dominotree.decode.loop import decode_rounds
from dominotree.decode.measured import PROFILE, Profile
from dominotree.decode.methods import Method, make_method
from dominotree.decode.sampling import Sampling
from dominotree.decode.stopping import Stopping
from dominotree.draft.model import DraftModel
from dominotree.dtypes import parse_device
from dominotree.errors import UserError
from dominotree.identity import speed_identity
from dominotree.target import Target
from dominotree.tree.budget import fit_monotone_convex
from dominotree.tree.children import Proposal
from dominotree.tree.nodes import DraftTree
from infer.measured_config import ProfileConfig, output_path

WARM_UP_ROUNDS = 2  # the first round drafts behind the whole prompt; after these comes each size once, to prepare it
Seconds = dict[str, float]


@dataclass(frozen=True)
class SizedTrees(Method):
    """Trees of the wanted sizes, one round after the other."""

    name = "profile"
    scoring: str  # the method whose trees they are
    sizes: Iterator[int]
    methods: dict[int, Method] = field(default_factory=dict)  # by size; they keep what they prepare

    def build(self, proposal: Proposal) -> DraftTree:
        size = next(self.sizes)
        if size not in self.methods:
            self.methods[size] = make_method(self.scoring, node_budget=max(1, size))
        return self.methods[size].build(proposal).first(size)


@dataclass
class Times:
    """Seconds of rounds by node count, at one context length and temperature."""

    context_lengths: list[int] = field(default_factory=list)
    rounds: dict[int, list[Seconds]] = field(default_factory=lambda: defaultdict(list))

    @property
    def context_length(self) -> int:
        return round(statistics.fmean(self.context_lengths))

    def medians(self, *stages: str) -> dict[int, float]:
        return {
            count: statistics.median(sum(seconds[stage] for stage in stages) for seconds in rounds)
            for count, rounds in sorted(self.rounds.items())
        }


def profile_and_write(config: ProfileConfig) -> None:
    """Measure, fit, write the profile and show it. Raises UserError."""
    parse_device(config.device)
    dtype = config.target.effective_dtype(config.dtype)
    target = load_target(config.target, dtype=dtype, device=config.device)
    draft = load_drafter(config.draft, target, dtype=dtype)
    path = output_path(config.output, draft, PROFILE)
    by_temperature = {
        temperature: [
            time_rounds(target, draft, length, Sampling(temperature, seed=config.seed), config)
            for length in config.context_lengths
        ]
        for temperature in (0.0, 1.0)
    }
    fitted = fit_profile(target, draft, by_temperature[0.0], by_temperature[1.0])
    write_json(path, asdict(fitted))
    measured = path.with_name(f"{path.stem}_measured.json")
    write_json(measured, _raw(config, by_temperature))
    _show(fitted, by_temperature)
    print(f"wrote {path}, and what was measured to {measured}")


def time_rounds(
    target: Target, draft: DraftModel, context_length: int, sampling: Sampling, config: ProfileConfig
) -> Times:
    """One generation behind random tokens, around `context_length` of them, with tree sizes in a new order each pass.

    Raises UserError where it might not fit into the target's context.
    """
    shuffled = random.Random(config.seed)
    sizes = [config.node_counts[-1]] * WARM_UP_ROUNDS + list(config.node_counts)
    warm_up = len(sizes)
    for _ in range(config.repeats):
        sizes += shuffled.sample(config.node_counts, len(config.node_counts))
    longest = (len(sizes) + 1) * (draft.config.draft_length + 1)
    if target.context_length is not None and context_length + longest > target.context_length:
        raise UserError(
            f"context_lengths has {context_length}, and up to {longest} tokens measured behind it, which exceed the "
            f"target's context of {target.context_length}; lower context_lengths, repeats or the number of node_counts"
        )
    generator = torch.Generator().manual_seed(config.seed)
    prompt = torch.randint(target.vocab_size, (context_length,), generator=generator).tolist()
    method = SizedTrees("dominotree" if draft.head is not None else "ddtree", iter(sizes))
    rounds = decode_rounds(
        target, draft, method, prompt, max_new_tokens=longest, sampling=sampling, stopping=Stopping(longest)
    )
    length, times = context_length, Times()
    for index, round_ in enumerate(islice(rounds, 1 + len(sizes))):
        if index > warm_up:
            times.rounds[sizes[index - 1]].append(round_.seconds)
            times.context_lengths.append(length)
        length += len(round_.token_ids) if index else 0
    return times


def fit_profile(target: Target, draft: DraftModel, greedy: list[Times], sampled: list[Times]) -> Profile:
    """Non-decreasing convex costs. Drafting and building hardly depend on what is before: one figure for all."""
    everything = [*greedy, *sampled]
    build: dict[int, float] = defaultdict(float)
    for times in everything:
        for count, seconds in times.medians("build").items():
            build[count] += seconds / len(everything)
    return Profile(
        made_on=speed_identity(target, draft),
        context_lengths=tuple(times.context_length for times in greedy),
        draft_seconds=statistics.median(
            seconds["draft"] for times in everything for rounds in times.rounds.values() for seconds in rounds
        ),
        build_seconds=_fit(build),
        greedy=tuple(_fit(times.medians("verify", "commit")) for times in greedy),
        sampled=tuple(_fit(times.medians("verify", "commit")) for times in sampled),
    )


def _fit(medians: dict[int, float]) -> tuple[float, ...]:
    return fit_monotone_convex(list(medians), list(medians.values()), max(medians))


def _raw(config: ProfileConfig, by_temperature: dict[float, list[Times]]) -> dict[str, Any]:
    """Every round's seconds, to look at and to fit again."""
    return {
        "config": asdict(config),
        "versions": versions(),
        "rounds": [
            {"temperature": temperature, "context_length": times.context_length, "nodes": count, "seconds": rounds}
            for temperature, all_times in by_temperature.items()
            for times in all_times
            for count, rounds in sorted(times.rounds.items())
        ],
    }


def _show(profile: Profile, by_temperature: dict[float, list[Times]]) -> None:
    """Milliseconds, measured and fitted."""
    for temperature, all_times in by_temperature.items():
        table = Table(title=f"T={temperature:g}: verification and commit, ms measured (fitted)")
        table.add_column("nodes")
        fitted = profile.greedy if temperature == 0 else profile.sampled
        for times in all_times:
            table.add_column(f"{times.context_length} tokens before", justify="right")
        for count in sorted(all_times[0].rounds):
            cells = [
                f"{1e3 * times.medians('verify', 'commit')[count]:.2f} ({1e3 * row[count]:.2f})"
                for times, row in zip(all_times, fitted, strict=True)
            ]
            table.add_row(str(count), *cells)
        Screen(width=100).print(table)
    last = len(profile.build_seconds) - 1
    seconds = (profile.draft_seconds, profile.build_seconds[1], profile.build_seconds[last])
    draft, first, all_nodes = (1e3 * value for value in seconds)
    print(f"draft {draft:.2f} ms; building a tree of 1 node {first:.2f} ms, of {last} nodes {all_nodes:.2f} ms")
