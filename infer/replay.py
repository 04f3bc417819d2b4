"""What budget rules would have done in logged rounds: sizes, how often the cap binds, and the speed to expect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dominotree.tree.budget import CostModel, StoppingRule
from infer.round_log import LoggedRound

FLAT_NODES = 128  # published GPU profiles hardly rise up to so many nodes
Chooser = Callable[[np.ndarray, list[float]], int]  # ordered log chances and seconds by size -> size


@dataclass(frozen=True)
class Outcome:
    """One rule over all rounds."""

    rule: str
    cap: int
    nodes: float  # a round
    at_cap: float  # share of rounds
    tokens: float  # committed a round
    tokens_per_second: float  # from the logged acceptance and the costs


def flat(costs: CostModel) -> CostModel:
    """The same costs with verification free of charge up to `FLAT_NODES` nodes."""
    rows = tuple((row[0],) * FLAT_NODES + (row[0], row[0] + (row[-1] - row[-2])) for row in costs.verify_seconds)
    return replace(costs, verify_seconds=rows, build_seconds=())


def replay(
    rule: str,
    rounds: Sequence[LoggedRound],
    log_chances: Sequence[np.ndarray],
    costs: CostModel,
    cap: int,
    choose: Chooser | None = None,
) -> Outcome:
    """Each round's nodes in order of their chances, cut where the rule stops; `choose` replaces the stopping rule."""
    sizes, tokens, seconds = [], 0.0, 0.0
    for round_, scores in zip(rounds, log_chances, strict=True):
        order = np.argsort(-scores, kind="stable")
        by_size = costs.round_seconds(round_.context_length, min(cap, len(order)))
        size = choose(scores[order], by_size) if choose else StoppingRule(by_size).size(scores[order].tolist())
        sizes.append(size)
        tokens += 1 + int(round_.accepted[order[:size]].sum())
        seconds += by_size[size]
    count = max(1, len(rounds))
    return Outcome(
        rule, cap, float(np.mean(sizes)), float(np.mean(np.array(sizes) >= cap)), tokens / count, tokens / seconds
    )


def compare_rules(
    rounds: Sequence[LoggedRound],
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    costs: CostModel,
    caps: Sequence[int],
) -> list[Outcome]:
    """Every cap as a fixed budget, then the rule on raw and on calibrated chances, and with flat verification costs."""
    largest = max(caps)
    outcomes = [replay("fixed", rounds, before, costs, cap, lambda _, seconds: len(seconds) - 1) for cap in caps]
    for cap in caps:
        outcomes.append(replay("condadaptive", rounds, before, costs, cap))
        outcomes.append(replay("adaptive", rounds, after, costs, cap))
    for cap in caps:
        outcomes.append(replay("condadaptive, flat costs", rounds, before, flat(costs), cap))
        outcomes.append(replay("adaptive, flat costs", rounds, after, flat(costs), cap))
    hindsight = [np.where(round_.accepted, 0.0, scores - 50.0) for round_, scores in zip(rounds, after, strict=True)]
    return [*outcomes, replay("hindsight", rounds, hindsight, costs, largest)]


def as_record(outcome: Outcome) -> dict[str, Any]:
    return dict(vars(outcome))
