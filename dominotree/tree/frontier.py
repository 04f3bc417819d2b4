"""The depth-synchronous builder for a device that must not wait for the host: one batched step a depth, equal to
best-first search.

The first N nodes that best-first search selects among all nodes down to depth d + 1 come from the first N down to depth
d and their children: taking nodes away at the bottom leaves the order of the others as it is. So a pool of N nodes,
kept in order of selection, needs one merge a depth, and what has left the pool cannot return.

Shapes: B batch, N pool (the node budget), L lanes (nodes whose children are scored), k children, C = L k candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .lanes import LaneScorer
from .nodes import DraftTree


@dataclass
class _Pool:
    """The best nodes so far in order of selection; empty places have depth 0 and lie behind all others."""

    scores: Tensor  # [B, N] float64
    token_ids: Tensor  # [B, N]
    parents: Tensor  # [B, N] places in the pool, -1 the root
    depths: Tensor  # [B, N]


@dataclass
class _Candidates:
    """Children of the lanes, the absent ones with token -1."""

    scores: Tensor  # [B, C] float64
    token_ids: Tensor  # [B, C]
    parents: Tensor  # [B, C] places in the pool
    lanes: Tensor  # [B, C] lane of the parent

    def take(self, order: Tensor) -> _Candidates:  # [B, C]
        fields = (self.scores, self.token_ids, self.parents, self.lanes)
        return _Candidates(*(field.gather(1, order) for field in fields))


def frontier_tree(
    scorer: LaneScorer,
    *,
    node_budget: int,
    max_depth: int,
    depth_limit: Tensor | None = None,
    widths: Sequence[int] | None = None,
) -> DraftTree:
    """The `node_budget` best nodes no deeper than `max_depth` of each sequence, as `best_first_tree` selects them, ties
    included.

    Every depth scores N lanes and the host is never waited for, so the whole can be captured as a CUDA graph; a tree
    with fewer nodes ends in padding. `depth_limit` [] lowers the depth from round to round.
    `widths`: at most so many new nodes at each depth, which makes the tree an approximation (DARTree).
    """
    states = scorer.root_states()
    pool = _empty_pool(len(states), node_budget, states.device)
    lanes = torch.full((len(states), 1), -1, device=states.device)
    alive = torch.ones_like(lanes, dtype=torch.bool)
    for slot in range(max_depth if node_budget else 0):
        if depth_limit is not None:
            alive = alive & (slot < depth_limit)
        candidates = _candidates(*scorer.children(slot, states), pool, lanes, alive)
        pool, parent_lanes = _merge(pool, candidates, slot + 1, None if widths is None else widths[slot])
        if slot + 1 == max_depth:
            break
        # Every place of the pool is a lane, of which those that hold no new node have no children.
        lanes = torch.arange(node_budget, device=states.device).expand_as(pool.depths)
        alive = pool.depths == slot + 1
        above = states.gather(1, parent_lanes[..., None].expand(-1, -1, states.shape[-1]))
        states = scorer.advance(above, pool.token_ids.clamp(min=0))
    return _as_tree(pool)


def fixed_widths(node_budget: int, max_depth: int, node_topk: int) -> list[int]:
    """Nodes a depth of DARTree's fixed variant: the remaining budget spread over the remaining depths."""
    widths: list[int] = []
    remaining, parents = node_budget, 1
    for depth in range(max_depth):
        parents = min(-(-remaining // (max_depth - depth)), parents * node_topk)
        remaining -= parents
        widths.append(parents)
    return widths


def _empty_pool(batch: int, size: int, device: torch.device) -> _Pool:
    scores = torch.full((batch, size), -torch.inf, dtype=torch.float64, device=device)
    nothing = torch.full((batch, size), -1, device=device)
    return _Pool(scores, nothing, nothing, torch.zeros_like(nothing))


def _candidates(
    token_ids: Tensor,  # [B, L, k]
    scores: Tensor,  # [B, L, k]
    pool: _Pool,
    lanes: Tensor,  # [B, L] places in the pool, -1 the root
    alive: Tensor,  # [B, L] bool
) -> _Candidates:
    """All children of the living lanes in the order of their keys: score, then token, then parent, as lanes are."""
    count = token_ids.shape[1]
    above = torch.where(lanes < 0, 0.0, pool.scores.gather(1, lanes.clamp(min=0)))
    present = alive[..., None] & (token_ids >= 0)
    everything = _Candidates(
        torch.where(present, above[..., None] + scores, -torch.inf).flatten(1),
        torch.where(present, token_ids, -1).flatten(1),
        lanes[..., None].expand_as(token_ids).flatten(1),
        torch.arange(count, device=lanes.device)[None, :, None].expand_as(token_ids).flatten(1),
    )
    absent_last = torch.where(everything.token_ids < 0, torch.iinfo(torch.int64).max, everything.token_ids)
    by_token = absent_last.argsort(dim=1, stable=True)
    by_score = everything.scores.gather(1, by_token).argsort(dim=1, descending=True, stable=True)
    return everything.take(by_token.gather(1, by_score))


def _merge(pool: _Pool, candidates: _Candidates, depth: int, width: int | None) -> tuple[_Pool, Tensor]:
    """The pool one depth further down, and for its new nodes the lane of their parent, both [B, N]."""
    size = pool.scores.shape[1]
    places = torch.arange(size, device=pool.scores.device)
    gaps = _gaps(pool, candidates, places)
    if width is not None and width < gaps.shape[1]:
        best = gaps.argsort(dim=1, stable=True)[:, :width]
        candidates, gaps = candidates.take(best), gaps.gather(1, best)
    # A candidate stands before the pool's node at its gap, and among candidates of one gap keys decide.
    keys = torch.cat([2 * gaps, (2 * places + 1).expand_as(pool.parents)], dim=1)
    order = keys.argsort(dim=1, stable=True)
    chosen = order[:, :size]
    moved = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    moved = moved[:, gaps.shape[1] :]  # [B, N] where the pool's nodes have gone

    def merged(fresh: Tensor, old: Tensor) -> Tensor:
        return torch.cat([fresh, old], dim=1).gather(1, chosen)

    parents = merged(candidates.parents, pool.parents)
    present = (candidates.token_ids >= 0).long()
    joined = _Pool(
        merged(candidates.scores, pool.scores),
        merged(candidates.token_ids, pool.token_ids),
        torch.where(parents < 0, parents, moved.gather(1, parents.clamp(min=0))),
        merged(present * depth, pool.depths),
    )
    return joined, merged(candidates.lanes, torch.zeros_like(pool.parents))


def _gaps(pool: _Pool, candidates: _Candidates, places: Tensor) -> Tensor:  # [B, C] in 0..N
    """Before which node of the pool each candidate is selected: the first one behind its parent with a later key.

    Keys are score, then token id, then depth, and the candidates are the deepest. An absent candidate is last.
    """
    score, token = candidates.scores[..., None], candidates.token_ids[..., None]
    later = (pool.scores[:, None] < score) | ((pool.scores[:, None] == score) & (pool.token_ids[:, None] > token))
    behind = places > candidates.parents[..., None]
    open_place = (later | (pool.depths == 0)[:, None]) & behind
    gaps = torch.where(open_place, places, len(places)).amin(dim=-1)
    return torch.where(candidates.token_ids < 0, len(places), gaps)


def _as_tree(pool: _Pool) -> DraftTree:
    padding = pool.depths == 0
    return DraftTree(
        pool.token_ids.masked_fill(padding, 0),
        pool.parents.masked_fill(padding, -1),
        pool.depths,
        pool.scores.float(),
    )
