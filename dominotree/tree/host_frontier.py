"""The depth-synchronous builder where asking the host is free: the host leaves out every lane that cannot matter.

Scores only fall along a path, so a node below the N-th best score seen so far can never be among the N best, and
neither can anything below it. What is left is scored depth by depth; the reference search then selects from it.
Shapes: B batch, L lanes (nodes whose children are scored), k children, G state.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import torch

from .budget import StoppingRule
from .children import Children
from .heap import best_first_tree, takes_all
from .lanes import LaneScorer
from .nodes import DraftTree

CPU = torch.device("cpu")
Seen = tuple[float, int, int]  # a child of a lane: -score, token, the lane's place
Lane = tuple[int, int]  # the parent's place among the lanes before, and the token that leads on from it


def host_frontier_tree(
    scorer: LaneScorer,
    *,
    node_budget: int,
    max_depth: int,
    widths: Sequence[int] | None = None,
    rules: Sequence[StoppingRule] | None = None,
) -> DraftTree:
    """The `node_budget` best nodes no deeper than `max_depth` of each sequence, as `best_first_tree` selects them, ties
    included.

    `widths`: at most so many new nodes at each depth, which makes the tree an approximation (DARTree).
    `rules`: one a sequence, which ends its tree at the first node that is not worth verifying.
    """
    states = scorer.root_states()
    searches = [_Search(node_budget, None if rules is None else rules[row]) for row in range(len(states))]
    for slot in range(max_depth if node_budget else 0):
        token_ids, scores = (part.tolist() for part in scorer.children(slot, states))
        width = None if widths is None else widths[slot]
        families = zip(searches, token_ids, scores, strict=True)
        lanes = [search.extend(tokens, values, width) for search, tokens, values in families]
        count = max(len(fresh) for fresh in lanes)
        if slot + 1 == max_depth or count == 0:
            break
        padded = torch.tensor([fresh + [(0, 0)] * (count - len(fresh)) for fresh in lanes])  # [B, L, 2]
        above = states.gather(1, padded[..., :1].expand(-1, -1, states.shape[-1]))
        states = scorer.advance(above, padded[..., 1])
    trees = [search.tree(max_depth) for search in searches]
    return trees[0] if len(trees) == 1 else DraftTree.batch(trees)


class _Search:
    """One sequence: what has been scored, and the reference search over it. A node that was a lane has a number; the
    root's is 0."""

    def __init__(self, node_budget: int, rule: StoppingRule | None) -> None:
        self._budget = node_budget
        self._rule = rule
        self._families: list[Children] = []
        self._numbers: dict[Lane, int] = {}  # of a lane, by its parent's number and its token
        self._lanes = [(0, 0.0)]  # number and score
        self._depth = 0
        self._best: list[float] = []  # the N best scores seen, the lowest first
        self._bound = -math.inf  # nothing below it can enter the tree

    def extend(self, token_ids: Sequence[list[int]], scores: Sequence[list[float]], width: int | None) -> list[Lane]:
        """Take in the children of the lanes, [L, k]; returns the next lanes, best first."""
        self._depth += 1
        seen: list[Seen] = []
        for lane, ((_, above), tokens, values) in enumerate(zip(self._lanes, token_ids, scores, strict=False)):
            count = len(tokens) - tokens.count(-1)
            self._families.append((tokens[:count], values[:count]))
            for token, value in zip(tokens[:count], values[:count], strict=True):
                if value + above < self._bound:
                    break  # its siblings are no better
                seen.append((-value - above, token, lane))
        seen.sort()
        if width is not None:
            seen = self._only(seen[:width])
        fresh = self._best_of(seen)
        if len(fresh) > self._budget:
            fresh = self._settle_ties(fresh)
        first = len(self._families)
        for number, (_, token, lane) in enumerate(fresh, start=first):
            self._numbers[self._lanes[lane][0], token] = number
        self._lanes = [(number, -negative) for number, (negative, _, _) in enumerate(fresh, start=first)]
        return [(lane, token) for _, token, lane in fresh]

    def tree(self, max_depth: int) -> DraftTree:
        """What the reference search selects of all that was scored. A rule counts what it takes: call once."""
        return self._selected(max_depth, takes_all if self._rule is None else self._rule.takes)

    def _selected(self, max_depth: int, takes: Callable[[float], bool]) -> DraftTree:
        depth = min(max_depth, self._depth)
        return best_first_tree(self, node_budget=self._budget, max_depth=depth, device=CPU, takes=takes)

    def root_state(self) -> int:
        return 0

    def advance(self, state: int, token_id: int) -> int:
        return self._numbers.get((state, token_id), -1)

    def children(self, state: int, slot: int) -> Children:
        return self._families[state] if state >= 0 else ([], [])

    def _best_of(self, seen: list[Seen]) -> list[Seen]:
        """Those at or above the bound that they themselves raise; `seen` is sorted."""
        for negative, _, _ in seen:
            if len(self._best) < self._budget:
                heapq.heappush(self._best, -negative)
            elif -negative > self._best[0]:
                heapq.heapreplace(self._best, -negative)
            else:
                break
        if len(self._best) == self._budget:
            self._bound = self._best[0]
        if self._rule is not None:
            self._bound = max(self._bound, self._rule.bound(sorted(self._best, reverse=True)))
        return [node for node in seen if -node[0] >= self._bound]

    def _only(self, kept: list[Seen]) -> list[Seen]:
        """Forget the other children of the lanes."""
        chosen = {(lane, token) for _, token, lane in kept}
        for lane, (number, _) in enumerate(self._lanes):
            tokens, values = self._families[number]
            left = [place for place, token in enumerate(tokens) if (lane, token) in chosen]
            self._families[number] = ([tokens[place] for place in left], [values[place] for place in left])
        return kept

    def _settle_ties(self, fresh: list[Seen]) -> list[Seen]:
        """Of more nodes than the tree may have, equal ones at the end, those that the reference search selects."""
        tree = self._selected(self._depth, takes_all)
        numbers: list[int] = []
        selected: set[Lane] = set()
        columns = (column[0].tolist() for column in (tree.token_ids, tree.parents, tree.depths))
        for token, parent, depth in zip(*columns, strict=True):
            above = numbers[parent] if parent >= 0 else 0
            numbers.append(self._numbers.get((above, token), -1))
            if depth == self._depth:
                selected.add((above, token))
        return [node for node in fresh if (self._lanes[node[2]][0], node[1]) in selected]
