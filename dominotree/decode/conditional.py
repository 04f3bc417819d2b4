"""What the methods share whose nodes are scored by the correction along their own paths."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..errors import UserError
from ..tree.builders import BUILDERS, ConditionalTree, Kept, TreeBuilder, builder_for, kept_head, make_builder
from ..tree.calibration import StepCalibration
from ..tree.lanes import PreparedHead
from .base import CANDIDATE_WIDTH, NODE_TOPK, Method, check_flag, table_notes

if TYPE_CHECKING:
    from ..draft.model import DraftModel
    from ..target import Target


@dataclass(frozen=True)
class Conditional(Method):
    """`builder` is one of BUILDERS: all select the same nodes."""

    needs_head = True
    candidate_width: int = CANDIDATE_WIDTH
    node_topk: int = NODE_TOPK
    builder: str = "auto"
    input_table: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("input_table", self.input_table)
        if self.builder not in BUILDERS:
            raise UserError(f"method.builder must be one of {', '.join(BUILDERS)}, got {self.builder}")
        if self.input_table and self.builder not in ("auto", "frontier"):
            raise UserError(f"method.input_table=true goes with method.builder=frontier or auto, got {self.builder}")

    def notes(self, target: Target, draft: DraftModel) -> list[str]:
        chosen = builder_for(self.builder, target.device)
        line = f"tree builder {chosen}" + (f" (auto, on {target.device.type})" if self.builder == "auto" else "")
        return [line, *table_notes(self.input_table, target, draft)]

    @property
    @abstractmethod
    def tree(self) -> ConditionalTree: ...

    def tree_builder(self, device: torch.device, steps: StepCalibration | None = None) -> TreeBuilder:
        """Made on the first call; those for several calibrations share what they prepare."""
        key = (device, steps)
        if key not in self._builders:
            tree = replace(self.tree, steps=steps)
            self._builders[key] = make_builder(self.builder, device, tree, self._prepared)
        return self._builders[key]

    @cached_property
    def _builders(self) -> dict[tuple[torch.device, StepCalibration | None], TreeBuilder]:
        return {}

    @cached_property
    def _prepared(self) -> Kept[PreparedHead]:
        return kept_head(self.input_table)
