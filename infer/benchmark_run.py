"""One run of `infer.benchmark`: check, load, go on where the records end, and say what came of it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from data.benchmarks import BENCHMARKS
from data.models import DraftChoice, load_drafter, load_target, target_path
from data.provenance import target_fingerprint, tokenizer_fingerprint, versions, write_json
from data.tracking import start_wandb
from dominotree.chat import require_template
from dominotree.decode.loop import check_request
from dominotree.decode.methods import Method, make_method
from dominotree.decode.sampling import Sampling
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError
from dominotree.identity import weights_fingerprint
from dominotree.target import Target
from infer.aggregate import AVERAGE, tabulate
from infer.benchmark_config import BASELINE, BenchmarkConfig, MethodRow, dataset_label
from infer.console import Console
from infer.measurements import RUN_FILE, Key, Measurement, cut_half_line, read_measurements
from infer.measuring import Bench, Contender
from infer.models import check_loading, note_untrained
from infer.processes import find_processes, share_out
from infer.progress import Progress
from infer.prompt_sets import NamedPrompt, check_lengths, load_prompt_sets
from infer.records import RecordWriter

BROKEN_CODE = 1


class BenchmarkRun:
    """Made from checked settings; `run` does the work. Raises UserError for whatever cannot be had or written."""

    def __init__(self, config: BenchmarkConfig) -> None:
        self._config = config
        self._folder = Path(config.output).expanduser()
        self._rows = config.rows()
        self._methods = {row.title: make_method(row.name, **row.options) for row in self._rows}
        for row in self._rows:
            if row.draft is None:
                check_loading(config.draft, self._methods[row.title], config.dtype, config.device)
        self._sampling = Sampling(0.0, config.top_k, config.top_p, config.seed)
        for temperature in config.temperatures:
            Sampling(temperature)
        self._processes = find_processes(config.device)
        self._console = Console()

    def run(self) -> int:
        """Returns the exit code: 1 where a method's tokens differ from plain decoding's beyond the contract."""
        sets = load_prompt_sets(self._config.datasets, self._config.limit)
        with self._claimed() as path:
            target, contenders = self._load()
            bench = Bench(target, contenders, self._sampling, max_new_tokens=self._config.max_new_tokens)
            prompts = list(_in_turn(sets))
            self._check(target, contenders, prompts)
            provenance = self._check_provenance(target, contenders, sets)
            done = read_measurements(self._folder)
            self._processes.wait()  # from here on the others write
            bench.warm_up(self._config.temperatures)
            self._measure(bench, prompts, done, RecordWriter(str(path)), provenance)
            self._processes.wait()
        return self._report(target.dtype) if self._processes.is_main else 0

    def _measure(
        self,
        bench: Bench,
        prompts: list[NamedPrompt],
        done: dict[Key, Measurement],
        writer: RecordWriter,
        provenance: dict[str, Any],
    ) -> None:
        """Records for this process's share of the prompts, each written before the next is measured."""
        temperatures = self._config.temperatures
        keys = [[key for each in temperatures for key in bench.keys(named, each)] for named in prompts]
        takers = share_out(map(len, keys), self._processes.count)
        mine = [place for place, taker in enumerate(takers) if taker == self._processes.index]
        total = sum(len(keys[place]) for place in mine)
        finished = sum(key in done for place in mine for key in keys[place])
        tracker = start_wandb(self._config.tracking, self._folder, provenance) if self._processes.is_main else None
        with Progress(total, finished, shown=self._processes.is_main, processes=self._processes.count) as progress:
            for place in mine:
                for temperature in temperatures:
                    for measurement in bench.measure(prompts[place], temperature, place, done):
                        writer.write(measurement.record())
                        progress.step(measurement)
                        if tracker is not None:
                            tracker.log(_tracked(measurement))
        if tracker is not None:
            tracker.finish()

    @contextmanager
    def _claimed(self) -> Iterator[Path]:
        """This process's own record file, whole and not written to by another process."""
        index = self._processes.index
        path = self._folder / ("records.jsonl" if index == 0 else f"records-{index}.jsonl")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")).acquire(timeout=0):
                if cut_half_line(path):
                    self._console.note(f"{path}: the last line was unfinished; that generation is measured again")
                yield path
        except Timeout as error:
            raise UserError(f"another process is writing to {path}; wait for it, or name another output") from error

    def _load(self) -> tuple[Target, list[Contender]]:
        """The target, and for every row its method with its drafter; a drafter of several rows is loaded once."""
        config, device = self._config, self._processes.device
        path = target_path(config.target)
        drafts: dict[str | None, DraftModel] = {}
        with self._console.loading() as step:
            step(f"loading the target {path}")
            target = load_target(config.target, dtype=config.effective_dtype, device=device)
            for row in self._rows:
                if self._methods[row.title].drafts and row.draft not in drafts:
                    choice = config.draft if row.draft is None else DraftChoice("path", row.draft)
                    step(f"loading the drafter {choice.path or choice.source}")
                    drafts[row.draft] = load_drafter(choice, target, dtype=config.effective_dtype)
        if None in drafts and self._processes.is_main:
            note_untrained(config.draft, self._console)
        contenders = []
        for row in self._rows:
            method = self._methods[row.title]
            contenders.append(Contender(row.title, method, drafts[row.draft] if method.drafts else None))
        return target, contenders

    def _check(self, target: Target, contenders: list[Contender], prompts: list[NamedPrompt]) -> None:
        if target.tokenizer is None:
            raise UserError("a benchmark needs the target's tokenizer, this target has none")
        require_template(target.tokenizer)
        check_lengths(prompts, target, self._config.max_new_tokens)
        for contender in contenders:
            check_request(target, contender.draft, contender.method, 1, 1)

    def _check_provenance(
        self, target: Target, contenders: list[Contender], sets: dict[str, list[NamedPrompt]]
    ) -> dict[str, Any]:
        """Records that are there must be of the same models, methods and machine; data sets and temperatures may be
        added. The main process notes what runs now."""
        config, path = self._config, self._folder / RUN_FILE
        assert target.tokenizer is not None
        identity = {
            "target": target_fingerprint(target),
            "tokenizer": tokenizer_fingerprint(target.tokenizer),
            "methods": {row.title: _described(row, self._methods[row.title]) for row in self._rows},
            "drafters": {one.label: weights_fingerprint(one.draft) for one in contenders if one.draft is not None},
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": _device_name(target.device),
            "threads": torch.get_num_threads(),
            **{name: getattr(config, name) for name in ("max_new_tokens", "top_k", "top_p", "seed")},
        }
        stored = _read_json(path)
        for key, value in identity.items() if stored else ():
            before = stored["identity"].get(key)
            if before != value:
                raise UserError(
                    f"the records in {self._folder} were made with {key}={_short(before)}, this run has "
                    f"{_short(value)}; use the same settings, or another output="
                )
        session = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "processes": self._processes.count,
            "versions": versions(),
            "config": asdict(config),
        }
        sources = {
            dataset_label(dataset): {"source": dataset, "benchmark": dataset in BENCHMARKS}
            for dataset in config.datasets
        }
        for label, prompts in sets.items():
            sources[label]["prompts"] = len(prompts)
        provenance = {
            "identity": identity,
            "target": config.target.path or config.target.source,
            "draft": config.draft.path or config.draft.source,
            "datasets": stored.get("datasets", {}) | sources,
            "sessions": [*stored.get("sessions", []), session],
        }
        if self._processes.is_main:
            write_json(path, json.loads(json.dumps(provenance)))
        return provenance

    def _report(self, dtype: torch.dtype) -> int:
        """The averages over the data sets, and whether the contract held."""
        measurements = list(read_measurements(self._folder).values())
        table = tabulate(measurements)
        for temperature in self._config.temperatures:
            for label in self._methods:
                cell = table.get((temperature, AVERAGE, label))
                if cell is not None and cell.tau is not None and cell.speedup is not None:
                    self._console.note(f"T={temperature:g} {label}: τ {cell.tau:.2f}, {cell.speedup:.2f}x")
        greedy = [one for one in measurements if one.key.temperature == 0 and one.key.method != BASELINE]
        different = [one for one in greedy if one.difference is not None]
        broken = [one for one in different if one.difference and not one.difference["allowed"]]
        line = (
            f"tokens identical to plain decoding in {len(greedy) - len(different)} of {len(greedy)} greedy generations"
        )
        if different:
            line += f"; near-ties in {dtype}: {len(different) - len(broken)}, beyond the contract: {len(broken)}"
        self._console.note(line)
        for one in broken[:5]:
            self._console.note(f"NOT LOSSLESS: {' '.join(map(str, one.key))}: {one.difference}")
        return BROKEN_CODE if broken else 0


def _in_turn(sets: dict[str, list[NamedPrompt]]) -> Iterator[NamedPrompt]:
    """The first prompt of every data set, then the second of each: a run that is cut short has some of all."""
    for prompts in zip_longest(*sets.values()):
        yield from (prompt for prompt in prompts if prompt is not None)


def _described(row: MethodRow, method: Method) -> dict[str, Any]:
    """A row's method with all its options, those included that were left at their defaults."""
    return {"name": row.name, **asdict(method), **row.options} | ({} if row.draft is None else {"draft": row.draft})


def _tracked(measurement: Measurement) -> dict[str, float]:
    key = measurement.key
    place = f"{key.dataset}/T={key.temperature:g}/{key.method}"
    figures = {"tau": measurement.acceptance_length, "seconds_per_token": measurement.seconds_per_token}
    return {f"{name}/{place}": value for name, value in figures.items() if value is not None}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}, which says how its records were made: {error}") from error


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:197] + "..."
