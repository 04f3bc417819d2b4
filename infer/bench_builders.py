"""What building a conditional tree costs: every builder at several budgets, beside the public scheme and a floor.

python -m infer.bench_builders
python -m infer.bench_builders shapes=smollm2 budgets=[16,64] output=builders.json

A measurement, not a test: compare figures of one run only.
"""

from __future__ import annotations

import heapq
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dominotree.checked import at_least, one_of
from dominotree.command import Command, run_command
from dominotree.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dominotree.draft.head import DominoHead
    from dominotree.tree.builders import Builder, Kept
    from dominotree.tree.children import Proposal
    from dominotree.tree.lanes import PreparedHead
    from dominotree.tree.nodes import DraftTree

USAGE = """python -m infer.bench_builders KEY=VALUE...

Times the builders of the conditional tree on random weights and prints milliseconds a round, beside the public scheme
(a heap that advances the state of every child) and the least that memory and arithmetic allow."""

SHAPES = {  # hidden size, vocabulary, GRU state, rank
    "qwen3_4b": (2560, 151936, 1024, 256),
    "qwen3_8b": (4096, 151936, 1024, 256),
    "smollm2": (576, 49152, 1024, 256),
    "tiny": (64, 2000, 32, 16),
}
SLOTS, UNCORRECTED = 16, 1
BUILDERS = ("baseline", "heap", "graph", "frontier")
PROBE_BYTES, PROBE_SIZE, PROBES = 256 << 20, 1024, 5


@dataclass(frozen=True)
class BenchConfig:
    """Everything `conf/bench_builders.yaml` holds; that file explains the keys."""

    shapes: str
    budgets: tuple[int, ...]
    builders: tuple[str, ...]
    candidate_width: int
    node_topk: int
    input_table: bool
    sharpness: float
    rounds: int
    repeats: int
    dtype: str
    device: str
    seed: int
    output: str | None
    debug: bool

    def __post_init__(self) -> None:
        one_of("shapes", self.shapes, tuple(SHAPES))
        for name in self.builders:
            one_of("builders", name, BUILDERS)
        if not self.builders or not self.budgets:
            raise UserError("give at least one of builders and one of budgets")
        for key, value, lowest in (
            *(("budgets", budget, 1) for budget in self.budgets),
            ("candidate_width", self.candidate_width, 1),
            ("node_topk", self.node_topk, 1),
            ("rounds", self.rounds, 1),
            ("repeats", self.repeats, 1),
        ):
            at_least(key, value, lowest)


BENCH = Command(name="bench_builders", config=BenchConfig, usage=USAGE, free_text=("output",))


@dataclass(frozen=True)
class Row:
    """One builder at one budget: milliseconds a round."""

    builder: str
    node_budget: int
    median: float
    fastest: float
    speedup: float | None  # over the baseline of this run, by medians
    same_nodes: bool  # as the first builder of this run, in every round
    floor: float  # by memory and arithmetic, for the nodes of these trees


class PublicScheme:
    """The published reference builder: a heap whose every pop scores a node and advances the state of all its children,
    each through the whole GRU."""

    def __init__(self, node_budget: int, candidate_width: int, node_topk: int) -> None:
        self._budget, self._width, self._topk = node_budget, candidate_width, node_topk

    def build(self, proposal: Proposal) -> DraftTree:
        import torch

        from dominotree.tree.nodes import DraftTree

        assert proposal.head is not None
        head, base = proposal.head, proposal.base_logits
        candidates = base.topk(self._width).indices  # [K, M]
        rows = head.output_rows[candidates].float()  # [K, M, R]
        base_of_candidates = base.gather(1, candidates).float()

        def advance(token_ids: Tensor, state: Tensor) -> Tensor:  # [k], [1, G] -> [k, G]
            embeds = proposal.embed_for_head(token_ids)[:, None]
            return head.prefix_gru(embeds, state.expand(len(token_ids), -1)[None].contiguous())[1][0]

        def children(state: Tensor, slot: int) -> tuple[list[int], list[float], Tensor]:
            if slot < proposal.uncorrected_length:
                best = base[slot].float().log_softmax(-1).topk(self._topk)
                token_ids = best.indices
            else:
                low_rank = head.low_rank(proposal.hidden[slot], state[0]).float()
                best = (base_of_candidates[slot] + rows[slot] @ low_rank).log_softmax(-1).topk(self._topk)
                token_ids = candidates[slot][best.indices]
            return token_ids.tolist(), best.values.tolist(), advance(token_ids, state)

        nodes: list[tuple[int, int, int, float]] = []
        heap: list[tuple[float, int, int, int, int, Tensor]] = []
        counter = itertools.count()  # ties go to what was pushed first

        def push(state: Tensor, parent: int, depth: int, score: float) -> None:
            for token, log_prob, child in zip(*children(state, depth), strict=True):
                heapq.heappush(heap, (-score - log_prob, next(counter), token, parent, depth + 1, child[None]))

        push(advance(proposal.root_id[None], head.initial_state(1)), -1, 0, 0.0)
        while heap and len(nodes) < self._budget:
            negative, _, token, parent, depth, state = heapq.heappop(heap)
            nodes.append((token, parent, depth, -negative))
            if depth < len(proposal.hidden):
                push(state, len(nodes) - 1, depth, -negative)
        token_ids, parents, depths, scores = zip(*nodes, strict=True)
        return DraftTree.from_lists(token_ids, parents, depths, scores, torch.device(base.device))


def random_blocks(config: BenchConfig) -> list[Proposal]:
    """Drafted blocks of a random head: slots with 64 likely tokens each, which the correction reorders."""
    import torch

    from dominotree.draft.head import DominoHead
    from dominotree.dtypes import parse_device, parse_dtype
    from dominotree.tree.children import Proposal

    hidden_size, vocab_size, state_size, rank = SHAPES[config.shapes]
    device, dtype = parse_device(config.device), parse_dtype(config.dtype)
    generator = torch.Generator(device).manual_seed(config.seed)

    def noise(*shape: int) -> Tensor:
        return torch.empty(*shape, device=device, dtype=dtype).normal_(generator=generator)

    head = DominoHead(hidden_size, state_size, rank, vocab_size).to(device, dtype).requires_grad_(False)
    for weight in head.parameters():
        weight.copy_(noise(*weight.shape).div_(weight.shape[1] ** 0.5))
    table = noise(vocab_size, hidden_size)
    blocks = []
    for _ in range(config.rounds):
        likely = torch.empty(SLOTS, 64, device=device).exponential_(generator=generator) * config.sharpness + 8
        places = torch.rand(SLOTS, vocab_size, device=device, generator=generator).topk(64).indices
        base_logits = noise(SLOTS, vocab_size).scatter_(1, places, likely.to(dtype))
        root = torch.randint(vocab_size, (), device=device, generator=generator)
        hidden = noise(SLOTS, hidden_size)
        blocks.append(Proposal(root, hidden, base_logits, head, UNCORRECTED, table.__getitem__))
    return blocks


def measure(
    config: BenchConfig, blocks: Sequence[Proposal], budget: int, machine: Machine, prepared: Kept[PreparedHead]
) -> list[Row]:
    """All builders at one budget, taking turns so that other load on the machine falls on all of them."""
    device = blocks[0].hidden.device
    builders = {name: _builder(name, config, budget, device, prepared) for name in config.builders}
    trees = {name: [_nodes(builder.build(block)) for block in blocks] for name, builder in builders.items()}
    times: dict[str, list[float]] = {name: [] for name in builders}
    for _ in range(config.repeats):
        for block in blocks:
            for name, builder in builders.items():
                times[name].append(machine.milliseconds(lambda: builder.build(block)))  # noqa: B023 - called at once
    medians = {name: statistics.median(values) for name, values in times.items()}
    expected = trees[config.builders[0]]
    floor = machine.floor(config, expected)
    baseline = medians.get("baseline")
    return [
        Row(
            name,
            budget,
            medians[name],
            min(times[name]),
            None if baseline is None else baseline / medians[name],
            trees[name] == expected,
            floor,
        )
        for name in builders
    ]


def _builder(
    name: str, config: BenchConfig, budget: int, device: torch.device, prepared: Kept[PreparedHead]
) -> Builder:
    from dominotree.tree.builders import ConditionalTree, make_builder

    if name == "baseline":
        return PublicScheme(budget, config.candidate_width, config.node_topk)
    return make_builder(name, device, ConditionalTree(budget, config.candidate_width, config.node_topk), prepared)


def _nodes(tree: DraftTree) -> list[tuple[int, int, int]]:
    columns = (tree.token_ids[0].tolist(), tree.parents[0].tolist(), tree.depths[0].tolist())
    return [node for node in zip(*columns, strict=True) if node[2] > 0]


class Machine:
    """A clock for the device, and its measured memory bandwidth and arithmetic."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        import torch

        self._device, self._width = device, dtype.itemsize
        buffer = torch.ones(PROBE_BYTES // dtype.itemsize, device=device, dtype=dtype)
        square = torch.ones(PROBE_SIZE, PROBE_SIZE, device=device, dtype=dtype)
        self.bytes_per_ms = PROBE_BYTES / min(self.milliseconds(buffer.sum) for _ in range(PROBES))
        self.flops_per_ms = 2 * PROBE_SIZE**3 / min(self.milliseconds(lambda: square @ square) for _ in range(PROBES))

    def milliseconds(self, work: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def floor(self, config: BenchConfig, trees: Sequence[list[tuple[int, int, int]]]) -> float:
        """Mean milliseconds a round if each input were read once a depth and nothing cost more than its arithmetic:
        the base logits and gathered rows once, the recurrent weights once a depth, a table row a node."""
        hidden, vocab, state, rank = SHAPES[config.shapes]
        corrected = SLOTS - UNCORRECTED
        once = SLOTS * (vocab + hidden) + rank * hidden + corrected * config.candidate_width * rank
        floors = []
        for nodes in trees:
            steps, opened = max(depth for _, _, depth in nodes), len(nodes)
            numbers = once + steps * (3 * state + rank) * state + opened * 3 * state
            flops = 2 * corrected * rank * hidden + 2 * opened * (
                (3 * state + rank) * state + rank * config.candidate_width
            )
            floors.append(max(numbers * self._width / self.bytes_per_ms, flops / self.flops_per_ms))
        return statistics.mean(floors)

    def _wait(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def bench(config: BenchConfig) -> int:
    """Measure, print, write; returns the exit code."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from dominotree.dtypes import parse_device, parse_dtype
    from dominotree.tree.builders import builder_for, kept_head

    device = parse_device(config.device)
    with torch.no_grad():
        blocks = random_blocks(config)
        machine = Machine(device, parse_dtype(config.dtype))
        prepared = kept_head(config.input_table)
        rows = [row for budget in config.budgets for row in measure(config, blocks, budget, machine, prepared)]
    assert blocks[0].head is not None
    about = _about(config, device, machine, blocks[0].head)
    title = f"{config.shapes}, {about['device']}, {about['threads']} threads, torch {torch.__version__}"
    table = Table("nodes", "builder", "ms a round", "fastest", "speedup", "floor", "same nodes", title=title)
    for row in rows:
        speedup = "" if row.speedup is None else f"{row.speedup:.1f}×"
        values = (f"{row.median:.2f}", f"{row.fastest:.2f}", speedup, f"{row.floor:.2f}", str(row.same_nodes).lower())
        table.add_row(str(row.node_budget), row.builder, *values)
    console = Console(width=100)
    console.print(table)
    console.print(
        f"auto picks {builder_for('auto', device)} on {device.type}; memory {about['gb_per_s']:.1f} GB/s, "
        f"arithmetic {about['gflop_per_s']:.0f} GFLOP/s; input table {about['table_bytes'] / 1e9:.2f} GB"
    )
    if config.output is not None:
        record = {**about, "config": asdict(config), "rows": [asdict(row) for row in rows]}
        Path(config.output).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _about(config: BenchConfig, device: torch.device, machine: Machine, head: DominoHead) -> dict[str, Any]:
    import torch

    from dominotree.tree.lanes import input_table_bytes

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "gb_per_s": machine.bytes_per_ms / 1e6,
        "gflop_per_s": machine.flops_per_ms / 1e6,
        "table_bytes": input_table_bytes(head, SHAPES[config.shapes][1]) if config.input_table else 0,
    }


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(BENCH, bench, argv)


if __name__ == "__main__":
    sys.exit(main())
