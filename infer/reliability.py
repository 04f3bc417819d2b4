"""Predicted chances against what was accepted: reliability diagrams and expected calibration error.

Shapes: N tree nodes of a round, n nodes of many rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dominotree.tree.calibration import StepCalibration, fit_steps
from infer.round_log import LOGIT_TEMPERATURES, LoggedRound

BINS = 10
SHOWN = 20  # nodes in a bin for it to be drawn: the share of fewer tells little


@dataclass(frozen=True)
class Nodes:
    """Nodes of many rounds side by side, with the predictions of one scoring for whole paths."""

    depths: np.ndarray  # [n]
    chances: np.ndarray  # [n]
    accepted: np.ndarray  # [n] bool

    def at(self, depth: int | None) -> Nodes:
        """Those of one depth, or all."""
        kept = self.depths == depth if depth is not None else np.ones(len(self.depths), dtype=bool)
        return Nodes(self.depths[kept], self.chances[kept], self.accepted[kept])

    def bins(self) -> list[tuple[float, float, int]]:
        """Mean prediction, share accepted and number of nodes in bins of equal width."""
        places = np.minimum((self.chances * BINS).astype(int), BINS - 1)
        members = [places == place for place in range(BINS)]
        return [
            (float(self.chances[one].mean()), float(self.accepted[one].mean()), int(one.sum()))
            for one in members
            if one.any()
        ]

    def error(self) -> float:
        """Expected calibration error: |mean prediction - share accepted|, averaged over the nodes' bins."""
        total = max(1, len(self.chances))
        return sum(count * abs(predicted - accepted) for predicted, accepted, count in self.bins()) / total


def path_log_chances(log_steps: np.ndarray, parents: np.ndarray) -> np.ndarray:  # [N], [N] -> [N]
    """Sums along each node's path; parents come before children."""
    sums = np.append(log_steps, 0.0)
    for node, parent in enumerate(parents):
        sums[node] += sums[parent]
    return sums[:-1]


def calibrated(round_: LoggedRound, steps: StepCalibration) -> np.ndarray:  # [N]
    """Log chances of the round's paths under a map."""
    log_probs, log_steps = torch.from_numpy(round_.log_probs), np.empty_like(round_.log_probs)
    for depth in np.unique(round_.depths):
        members = round_.depths == depth
        log_steps[members] = steps.log_chances(log_probs[torch.from_numpy(members)], int(depth)).numpy()
    return path_log_chances(log_steps, round_.parents)


def raw(round_: LoggedRound) -> np.ndarray:  # [N]
    """Log-probabilities of the round's paths as the draft gave them."""
    return path_log_chances(round_.log_probs, round_.parents)


def gather(rounds: Sequence[LoggedRound], log_chances: Sequence[np.ndarray]) -> Nodes:
    return Nodes(
        np.concatenate([round_.depths for round_ in rounds]),
        np.exp(np.concatenate(list(log_chances))),
        np.concatenate([round_.accepted for round_ in rounds]),
    )


def fit(rounds: Sequence[LoggedRound], max_depth: int) -> StepCalibration:
    """The map that the rounds' decided nodes ask for."""
    decided = [round_.decided for round_ in rounds]
    pairs = list(zip(rounds, decided, strict=True))
    empty = np.zeros(0)
    return fit_steps(
        np.concatenate([empty, *(round_.log_probs[kept] for round_, kept in pairs)]),
        np.concatenate([empty, *(round_.depths[kept] for round_, kept in pairs)]).astype(int),
        np.concatenate([empty, *(round_.accepted[kept] for round_, kept in pairs)]).astype(bool),
        max_depth,
    )


def cross_fitted(prompts: Sequence[Sequence[LoggedRound]], max_depth: int) -> list[np.ndarray]:
    """Calibrated log chances, round by round, each half of the prompts under the map fitted to the other half."""
    maps = [fit([round_ for rounds in prompts[1 - half :: 2] for round_ in rounds], max_depth) for half in (0, 1)]
    return [calibrated(round_, maps[index % 2]) for index, rounds in enumerate(prompts) for round_ in rounds]


def causes(rounds: Sequence[LoggedRound], max_depth: int) -> dict[str, Any]:
    """What an over- or underestimate comes from: sums a decided parent of depth d - 1 of its children's probabilities
    over the candidates and over the whole vocabulary, beside the share accepted, and the best logit temperature."""
    by_depth = []
    for depth in range(1, max_depth + 1):
        kept = [round_.decided & (round_.depths == depth) & np.isfinite(round_.full_log_probs) for round_ in rounds]
        parents = sum(one.any() for one in kept)
        sums = [
            (np.exp(round_.log_probs[one]).sum(), np.exp(round_.full_log_probs[one]).sum(), round_.accepted[one].sum())
            for round_, one in zip(rounds, kept, strict=True)
        ]
        if parents:
            candidates, full, accepted = (float(total) / parents for total in np.sum(sums, axis=0))
            by_depth.append(
                {"depth": depth, "parents": int(parents), "candidates": candidates, "full": full, "accepted": accepted}
            )
    losses = np.sum([round_.logit_losses for round_ in rounds], axis=0) / max(1, sum(one.choices for one in rounds))
    return {
        "steps": by_depth,
        "logit_temperature": LOGIT_TEMPERATURES[int(losses.argmin())],
        "loss": float(losses[LOGIT_TEMPERATURES.index(1.0)]),
        "loss_at_that_temperature": float(losses.min()),
    }


def by_depth(nodes: Nodes, rounds: int, max_depth: int) -> list[dict[str, Any]]:
    """Expected and real accepted nodes a round, and the calibration error; depth None is all."""
    rows = []
    for depth in (*range(1, max_depth + 1), None):
        some = nodes.at(depth)
        if len(some.chances):
            rows.append(
                {
                    "depth": depth,
                    "nodes": len(some.chances) / rounds,
                    "predicted": float(some.chances.sum()) / rounds,
                    "accepted": float(some.accepted.sum()) / rounds,
                    "calibration_error": some.error(),
                }
            )
    return rows


def plot_reliability(pairs: dict[float, tuple[Nodes, Nodes]], max_depth: int, path: Path) -> None:
    """A row a temperature: reliability before and after calibration, and the calibration error by depth, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(pairs), 3, figsize=(12, 3.8 * len(pairs)), squeeze=False, layout="constrained")
    for axes, (temperature, both) in zip(rows, pairs.items(), strict=True):
        for axis, title, nodes in zip(axes, ("before", "after calibration"), both, strict=False):
            axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
            for depth in range(1, min(max_depth, 5) + 1):
                bins = [one for one in nodes.at(depth).bins() if one[2] >= SHOWN]
                axis.plot([one[0] for one in bins], [one[1] for one in bins], marker="o", label=f"depth {depth}")
            axis.set(xlabel="predicted chance", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
            axis.set_title(f"T={temperature:g}, {title}; bins of {SHOWN} nodes or more")
            axis.legend()
        depths = np.arange(1, max_depth + 1)
        for shift, label, nodes in zip((-0.2, 0.2), ("before", "after"), both, strict=True):
            axes[2].bar(depths + shift, [nodes.at(int(depth)).error() for depth in depths], width=0.4, label=label)
        axes[2].set(xlabel="depth", ylabel="expected calibration error", title=f"T={temperature:g}")
        axes[2].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
