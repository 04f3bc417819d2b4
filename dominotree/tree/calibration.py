"""From the draft's probabilities to the chance that the target accepts a node.

The map works on single steps: the chance of a node given that its parent was accepted. A path's chance is the product
of its steps', so it only falls along a path whatever the map, and every best-first builder stays exact on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from scipy.special import expit, log_expit
from torch import Tensor

from ..errors import UserError
from .children import Children, ChildScorer
from .lanes import LaneScorer

State = TypeVar("State")
SURE = -1e-6  # log-probabilities above this are taken for it: the log-odds of certainty are infinite
LOWEST_SLOPE = 0.01  # above 0, so that siblings keep their order


@dataclass(frozen=True)
class StepCalibration:
    """Chance of a step with conditional probability p to depth d: σ(slope · log(p / (1 - p)) + offsets[d - 1]).

    Slope 1 and offsets 0 leave p as it is. A slope below 1 tells that the draft is surer than it should be.
    """

    slope: float
    offsets: tuple[float, ...]  # of depths 1, 2, …; deeper steps take the last

    def __post_init__(self) -> None:
        if not np.isfinite([self.slope, *self.offsets]).all() or self.slope < LOWEST_SLOPE or not self.offsets:
            raise UserError(
                f"a calibration has a slope of at least {LOWEST_SLOPE} and an offset for each depth, got slope "
                f"{self.slope} and offsets {list(self.offsets)}"
            )

    def log_chances(self, log_probs: Tensor, depth: int) -> Tensor:  # [...] float64 -> [...]
        """Log chances of steps to one depth, from their conditional log-probabilities."""
        offset = self.offsets[min(depth, len(self.offsets)) - 1]
        return F.logsigmoid(self.slope * log_odds(log_probs) + offset)


@dataclass(frozen=True)
class Calibration:
    """Maps for the sampling temperatures they were fitted at; between two of them the parameters are interpolated.

    They hold for probabilities normalised over `candidate_width` candidates (0: the whole vocabulary).
    """

    candidate_width: int
    temperatures: tuple[float, ...]  # ascending
    steps: tuple[StepCalibration, ...]  # one a temperature, for the same depths

    def __post_init__(self) -> None:
        depths = {len(step.offsets) for step in self.steps}
        if len(self.steps) != len(self.temperatures) or len(depths) != 1:
            raise UserError("a calibration has one map for each temperature, all for the same depths")
        if list(self.temperatures) != sorted(set(self.temperatures)):
            raise UserError(f"a calibration's temperatures ascend, got {list(self.temperatures)}")

    def at(self, temperature: float) -> StepCalibration:
        """The map for a temperature; outside those fitted, the nearest one's."""
        parameters = np.array([[step.slope, *step.offsets] for step in self.steps])  # [T, 1 + depths]
        slope, *offsets = (float(np.interp(temperature, self.temperatures, column)) for column in parameters.T)
        return StepCalibration(slope, tuple(offsets))


class CalibratedScorer(Generic[State]):
    """Another scorer's children with the log of their chances in place of their log-probabilities."""

    def __init__(self, scorer: ChildScorer[State], steps: StepCalibration) -> None:
        self._scorer = scorer
        self._steps = steps

    def root_state(self) -> State:
        return self._scorer.root_state()

    def advance(self, state: State, token_id: int) -> State:
        return self._scorer.advance(state, token_id)

    def children(self, state: State, slot: int) -> Children:
        token_ids, log_probs = self._scorer.children(state, slot)
        return token_ids, self._steps.log_chances(torch.tensor(log_probs, dtype=torch.float64), slot + 1).tolist()


class CalibratedLanes:
    """The same for many nodes of one depth at once. Shapes: B batch, L lanes, G state, k children."""

    def __init__(self, lanes: LaneScorer, steps: StepCalibration) -> None:
        self._lanes = lanes
        self._steps = steps

    def root_states(self) -> Tensor:  # [B, 1, G]
        return self._lanes.root_states()

    def advance(self, states: Tensor, token_ids: Tensor) -> Tensor:  # [B, L, G], [B, L] -> [B, L, G]
        return self._lanes.advance(states, token_ids)

    def children(self, slot: int, states: Tensor) -> tuple[Tensor, Tensor]:  # [B, L, G] -> two of [B, L, k]
        token_ids, log_probs = self._lanes.children(slot, states)
        return token_ids, self._steps.log_chances(log_probs, slot + 1)


def log_odds(log_probs: Tensor) -> Tensor:  # [...] float64 -> [...]
    capped = log_probs.clamp(max=SURE)
    return capped - (-capped.expm1()).log()


def fit_steps(
    log_probs: np.ndarray,  # [n] conditional log-probabilities of nodes whose parents were accepted
    depths: np.ndarray,  # [n] from 1
    accepted: np.ndarray,  # [n] bool
    max_depth: int,
) -> StepCalibration:
    """Logistic regression of acceptance on log-odds, one offset a depth, with unit Gaussian priors at the identity.

    The priors keep depths that are seldom reached near where they were.
    """
    odds = log_odds(torch.from_numpy(log_probs)).numpy()
    features = np.concatenate([odds[:, None], depths[:, None] == np.arange(1, max_depth + 1)], axis=1)
    identity = np.eye(1, 1 + max_depth)[0]

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        scores, moved = features @ weights, weights - identity
        value = -np.where(accepted, log_expit(scores), log_expit(-scores)).sum() + 0.5 * moved @ moved
        return float(value), features.T @ (expit(scores) - accepted) + moved

    bounds = [(LOWEST_SLOPE, None)] + [(None, None)] * max_depth
    fitted = minimize(loss, identity, jac=True, method="L-BFGS-B", bounds=bounds).x
    return StepCalibration(float(fitted[0]), tuple(fitted[1:].tolist()))
