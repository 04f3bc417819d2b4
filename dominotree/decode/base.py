"""What every decoding method is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import UserError
from ..tree.children import Proposal
from ..tree.lanes import input_table_bytes
from ..tree.nodes import DraftTree

if TYPE_CHECKING:
    from ..draft.model import DraftModel
    from ..target import Target

NODE_BUDGET, CANDIDATE_WIDTH, NODE_TOPK = 16, 64, 8  # as published (DominoTree, section 4)
LOWEST = {"node_budget": 1, "candidate_width": 0, "node_topk": 1, "width": 0, "cap": 1}


@dataclass(frozen=True)
class Method:
    """Base of the methods. `drafts`: whether a drafter is run; `needs_head`: whether it must have a Domino head;
    `needs_profile`: whether it goes by costs measured on this machine.

    What a method prepares for a drafter on its first round it keeps for the next ones.
    """

    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    needs_head: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for option, lowest in LOWEST.items():
            value = getattr(self, option, lowest)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise UserError(f"method.{option} must be an integer of at least {lowest}, got {value}")

    def build(self, proposal: Proposal) -> DraftTree:
        """The tree to verify, B = 1, no deeper than the proposal has slots, its nodes in order of selection."""
        raise UserError(f"method {self.name} drafts nothing")

    def notes(self, target: Target, draft: DraftModel) -> list[str]:
        """What a user should know of how trees will be built for these models, a line each."""
        return []

    def check(self, target: Target, draft: DraftModel) -> None:
        """Raises UserError where what the method was measured on does not fit these models or this machine."""


def check_flag(option: str, value: Any) -> None:
    """Raises UserError for anything but true and false."""
    if not isinstance(value, bool):
        raise UserError(f"method.{option} must be true or false, got {value}")


def table_notes(input_table: bool, target: Target, draft: DraftModel) -> list[str]:
    """What the table of GRU inputs takes, where there is one."""
    if not input_table or draft.head is None:
        return []
    size = input_table_bytes(draft.head, target.vocab_size)
    return [f"the table of GRU inputs takes {size / 2**30:.2f} GiB; it is made on the first round"]
