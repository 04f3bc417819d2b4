"""Methods that choose the node budget of every round from the draft's confidence and the measured costs (CaDDTree).

The tree grows best first and stops at the first node that is not worth its verification. On a CPU, what cannot be worth
it is not scored; where builds are captured, the whole tree is built and cut.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from ..draft.model import DraftModel
from ..errors import UserError
from ..target import Target
from ..tree.budget import CostModel, StoppingRule
from ..tree.builders import ConditionalTree, builds_whole
from ..tree.calibration import StepCalibration
from ..tree.children import MarginalScorer, Proposal
from ..tree.heap import best_first_tree
from ..tree.nodes import DraftTree
from .base import Method
from .conditional import Conditional
from .measured import CALIBRATION, CALIBRATION_REMEDY, PROFILE, PROFILE_REMEDY, FittedCalibration, Profile

CAP = 64


@dataclass
class _Files:
    """What a method has read: at once where a path was given, else when it is checked with a drafter."""

    profile: Profile | None = None
    calibration: FittedCalibration | None = None
    checked_for: tuple[Target, DraftModel] | None = None


@dataclass(frozen=True)
class _CostAware(Method):
    """At most `cap` nodes, at the costs of a profile: a path, or empty for the one beside the drafter's weights."""

    needs_profile = True
    cap: int = CAP
    profile: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile:
            self._files.profile = Profile.read(self.profile)

    @cached_property
    def _files(self) -> _Files:
        return _Files()

    def check(self, target: Target, draft: DraftModel) -> None:
        """Once a pair of models: weights are not expected to change between two generations."""
        known = self._files.checked_for
        if known is None or known[0] is not target or known[1] is not draft:
            self._check_files(target, draft)
            self._files.checked_for = (target, draft)

    def _check_files(self, target: Target, draft: DraftModel) -> None:
        path = self.profile or _beside(draft, PROFILE, f"method.profile=FILE ({PROFILE_REMEDY})")
        self._files.profile = self._files.profile or Profile.read(path)
        self._files.profile.check(path, target, draft)

    def rule(self, proposal: Proposal) -> StoppingRule:
        assert self._files.profile is not None, "check comes first"
        costs = self._costs(self._files.profile, proposal)
        return StoppingRule(costs.round_seconds(proposal.context_length, self.cap))

    @abstractmethod
    def _costs(self, profile: Profile, proposal: Proposal) -> CostModel: ...


@dataclass(frozen=True)
class CaDDTree(_CostAware):
    """DDTree's tree, cut where the marginals say that it is no longer worth its cost (CaDDTree)."""

    name = "caddtree"

    def _costs(self, profile: Profile, proposal: Proposal) -> CostModel:
        return profile.costs(proposal.temperature, with_build=False)  # as published

    @torch.no_grad()
    def build(self, proposal: Proposal) -> DraftTree:
        return best_first_tree(
            MarginalScorer(proposal.base_logits, node_topk=self.cap),
            node_budget=self.cap,
            max_depth=len(proposal.hidden),
            device=proposal.hidden.device,
            takes=self.rule(proposal).takes,
        )


@dataclass(frozen=True)
class CondAdaptive(Conditional, _CostAware):
    """DominoTree's tree, cut by the same rule on its conditional probabilities as they are."""

    name = "condadaptive"

    @property
    def tree(self) -> ConditionalTree:
        return ConditionalTree(self.cap, self.candidate_width, self.node_topk, input_table=self.input_table)

    def build(self, proposal: Proposal) -> DraftTree:
        builder = self.tree_builder(proposal.hidden.device, self.steps(proposal.temperature))
        return builder.build(proposal, self.rule(proposal))

    def _costs(self, profile: Profile, proposal: Proposal) -> CostModel:
        costs = profile.costs(proposal.temperature, with_build=True)
        return costs.building_all(self.cap) if builds_whole(self.builder, proposal.hidden.device) else costs

    def steps(self, temperature: float) -> StepCalibration | None:
        """What turns probabilities into chances; None leaves them as they are."""
        return None


@dataclass(frozen=True)
class Adaptive(CondAdaptive):
    """The same with calibrated chances: nodes are ordered, and the tree is cut, by what the target will accept.

    `calibration` is a path, or empty for the one beside the drafter's weights.
    """

    name = "adaptive"
    calibration: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.builder == "graph":
            raise UserError("method.builder=graph takes no calibration; use auto, frontier or heap with adaptive")
        if self.calibration:
            self._files.calibration = FittedCalibration.read(self.calibration)

    def _check_files(self, target: Target, draft: DraftModel) -> None:
        super()._check_files(target, draft)
        path = self.calibration or _beside(draft, CALIBRATION, f"method.calibration=FILE ({CALIBRATION_REMEDY})")
        self._files.calibration = self._files.calibration or FittedCalibration.read(path)
        self._files.calibration.check(path, target, draft, self.candidate_width)

    def steps(self, temperature: float) -> StepCalibration:
        assert self._files.calibration is not None, "check comes first"
        return self._files.calibration.calibration.at(temperature)


def _beside(draft: DraftModel, name: str, option: str) -> str:
    if draft.directory is None:
        raise UserError(f"this drafter was not loaded from a directory that could hold {name}; give {option}")
    return str(draft.directory / name)
