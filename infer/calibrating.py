"""One run of `infer.calibrate`: decode, log, fit, write, and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console as Screen
from rich.table import Table

from data.models import load_drafter, load_target
from data.progress import progress_bar
from data.prompts import read_prompts
from data.provenance import versions, write_json
from data.samples import load_samples
from dominotree.chat import encode_chat, encode_raw
from dominotree.decode.measured import CALIBRATION, PROFILE, FittedCalibration, Profile
from dominotree.decode.methods import DominoTree
from dominotree.decode.sampling import Sampling
from dominotree.draft.model import DraftModel
from dominotree.dtypes import parse_device
from dominotree.errors import UserError
from dominotree.identity import weights_identity
from dominotree.target import Target
from dominotree.tree.calibration import Calibration, StepCalibration
from infer.measured_config import CalibrateConfig, output_path
from infer.reliability import Nodes, by_depth, causes, cross_fitted, fit, gather, plot_reliability, raw
from infer.replay import Outcome, as_record, compare_rules
from infer.round_log import LoggedRound, log_rounds

SAMPLE_LENGTH = 2048  # tokens of a stored conversation that are looked at


@dataclass(frozen=True)
class Result:
    """What came of one temperature. Nodes after calibration are of prompts that its map was not fitted to."""

    temperature: float
    steps: StepCalibration
    before: Nodes
    after: Nodes
    report: dict[str, Any]
    outcomes: list[Outcome]


def calibrate_and_write(config: CalibrateConfig) -> None:
    """Raises UserError for settings, prompts and models that do not go together, before anything is decoded."""
    parse_device(config.device)
    method = DominoTree(config.node_budget, config.candidate_width, config.node_topk)
    dtype = config.target.effective_dtype(config.dtype)
    target = load_target(config.target, dtype=dtype, device=config.device)
    draft = load_drafter(config.draft, target, dtype=dtype)
    profile = _profile(config, target, draft)
    prompts = _prompts(config, target)
    path = output_path(config.output, draft, CALIBRATION)
    results = []
    for temperature in config.temperatures:
        logged = _decode(config, target, draft, method, prompts, temperature)
        results.append(_analyse(logged, draft.config.draft_length, temperature, profile, config.caps))
    calibration = Calibration(config.candidate_width, config.temperatures, tuple(one.steps for one in results))
    write_json(path, asdict(FittedCalibration(weights_identity(target, draft), calibration)))
    _report(config, results, path)


def _profile(config: CalibrateConfig, target: Target, draft: DraftModel) -> Profile | None:
    """The costs to replay with, checked; None where there are none and none were asked for."""
    beside = None if draft.directory is None else draft.directory / PROFILE
    path = config.profile or (str(beside) if beside is not None and beside.exists() else None)
    if path is None:
        return None
    profile = Profile.read(path)
    profile.check(path, target, draft)
    return profile


def _prompts(config: CalibrateConfig, target: Target) -> list[list[int]]:
    """Token ids of at least two prompts: half of them test the map fitted to the others."""
    if target.tokenizer is None:
        raise UserError("calibration needs the target's tokenizer, this target has none")
    place = Path(config.prompts).expanduser()
    if place.is_dir():
        samples = load_samples(place, target.tokenizer, max_length=SAMPLE_LENGTH)[: config.limit]
        found = [sample.token_ids[: sample.loss_mask.index(True)] for sample in samples]
    else:
        prompts = read_prompts(config.prompts)[: config.limit]
        found = [
            encode_raw(target.tokenizer, prompt.turns[0])
            if config.raw
            else encode_chat(target.tokenizer, [*prompt.history, {"role": "user", "content": prompt.turns[0]}])
            for prompt in prompts
        ]
    if len(found) < 2:
        raise UserError(f"calibration needs at least 2 prompts, {config.prompts} has {len(found)}")
    limit = target.context_length
    if limit is not None and max(map(len, found)) + config.max_new_tokens > limit:
        raise UserError(
            f"a prompt of {max(map(len, found))} tokens and max_new_tokens={config.max_new_tokens} exceed the target's "
            f"context of {limit}; lower max_new_tokens or leave that prompt out"
        )
    return found


def _decode(
    config: CalibrateConfig,
    target: Target,
    draft: DraftModel,
    method: DominoTree,
    prompts: Sequence[list[int]],
    temperature: float,
) -> list[list[LoggedRound]]:
    """Rounds by prompt."""
    logged = []
    with progress_bar(f"decoding at T={temperature:g}", len(prompts)) as advance:
        for index, prompt_ids in enumerate(prompts):
            sampling = Sampling(temperature, seed=config.seed + index)
            logged.append(list(log_rounds(target, draft, method, prompt_ids, sampling, config.max_new_tokens)))
            advance(1, "")
    if not any(logged):
        raise UserError(f"no whole round was decoded at temperature {temperature}; raise max_new_tokens")
    return logged


def _analyse(
    logged: list[list[LoggedRound]], max_depth: int, temperature: float, profile: Profile | None, caps: Sequence[int]
) -> Result:
    rounds = [round_ for of_prompt in logged for round_ in of_prompt]
    raw_chances, fitted_chances = [raw(round_) for round_ in rounds], cross_fitted(logged, max_depth)
    before, after = gather(rounds, raw_chances), gather(rounds, fitted_chances)
    outcomes: list[Outcome] = []
    if profile is not None:
        costs = profile.costs(temperature, with_build=True)
        outcomes = compare_rules(rounds, raw_chances, fitted_chances, costs, caps)
    report = {
        "rounds": len(rounds),
        "before": by_depth(before, len(rounds), max_depth),
        "after": by_depth(after, len(rounds), max_depth),
        "causes": causes(rounds, max_depth),
        "replay": [as_record(outcome) for outcome in outcomes],
    }
    return Result(temperature, fit(rounds, max_depth), before, after, report, outcomes)


def _report(config: CalibrateConfig, results: list[Result], path: Path) -> None:
    """Write report and figure beside the calibration, and show what matters."""
    report = path.with_name(f"{path.stem}_report.json")
    by_temperature = {f"{one.temperature:g}": one.report for one in results}
    write_json(report, {"config": asdict(config), "versions": versions(), "temperatures": by_temperature})
    figure = path.with_suffix(".png")
    max_depth = len(results[0].steps.offsets)
    plot_reliability({one.temperature: (one.before, one.after) for one in results}, max_depth, figure)
    screen = Screen(width=110)
    for result in results:
        screen.print(_reliability_table(result))
        screen.print(_steps_table(result))
        if result.outcomes:
            screen.print(_rules_table(result))
    print(f"wrote {path}, {report.name} and {figure.name}")


def _reliability_table(result: Result) -> Table:
    table = Table(
        "depth", "nodes", "accepted", "predicted", "calibrated", "ECE", "ECE calibrated",
        title=f"T={result.temperature:g}, {result.report['rounds']} rounds: nodes a round, calibration error",
    )  # fmt: skip
    for before, after in zip(result.report["before"], result.report["after"], strict=True):
        cells = [before["nodes"], before["accepted"], before["predicted"], after["predicted"]]
        errors = [before["calibration_error"], after["calibration_error"]]
        table.add_row(str(before["depth"] or "all"), *(f"{x:.3f}" for x in cells), *(f"{x:.4f}" for x in errors))
    return table


def _steps_table(result: Result) -> Table:
    cause = result.report["causes"]
    table = Table(
        "depth", "parents", "candidates", "whole vocabulary", "accepted",
        title=f"T={result.temperature:g}: children's probability of a decided parent, normalised over",
        caption=f"best temperature of the logits {cause['logit_temperature']:g} (loss {cause['loss']:.3f} to "
        f"{cause['loss_at_that_temperature']:.3f}); fitted slope of the log-odds {result.steps.slope:.2f}",
    )  # fmt: skip
    for row in cause["steps"]:
        shares = [row["candidates"], row["full"], row["accepted"]]
        table.add_row(str(row["depth"]), str(row["parents"]), *(f"{share:.3f}" for share in shares))
    return table


def _rules_table(result: Result) -> Table:
    table = Table(
        "rule", "cap", "nodes", "share at cap", "τ", "tokens/s",
        title=f"T={result.temperature:g}: rules replayed in the logged rounds, at the profile's costs",
    )  # fmt: skip
    for one in result.outcomes:
        cells = [f"{one.nodes:.1f}", f"{one.at_cap:.3f}", f"{one.tokens:.3f}", f"{one.tokens_per_second:.1f}"]
        table.add_row(one.rule, str(one.cap), *cells)
    return table
