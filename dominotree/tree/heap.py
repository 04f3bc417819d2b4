"""The reference builder: best-first search with a heap on the host (DDTree, algorithm 1; DominoTree, algorithm 1)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeVar

import torch

from .children import ChildScorer
from .nodes import DraftTree

State = TypeVar("State")


def takes_all(score: float) -> bool:
    return True


def best_first_tree(
    scorer: ChildScorer[State],
    *,
    node_budget: int,
    max_depth: int,
    device: torch.device,
    takes: Callable[[float], bool] = takes_all,
) -> DraftTree:
    """The `node_budget` likeliest prefixes no deeper than `max_depth`, in order of selection, or all there are.

    Path log-probabilities only fall along a path, so the best prefixes are closed under parents, and a node's next
    sibling need enter the heap only when the node itself leaves it. Ties go to the lowest token id, then to the
    shallower node, then to the node whose parent was selected first. A node's state is computed when it is selected,
    never for the candidates around it. The search ends before the first node whose score `takes` declines.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    scores: list[float] = []
    families: dict[int, tuple[State, list[int], list[float]]] = {}  # of each opened node: its state and its children
    heap: list[tuple[float, int, int, int, int]] = []  # -score, token id, depth, parent, rank among the siblings

    def open_node(node: int, state: State, depth: int) -> None:
        if depth < max_depth:
            families[node] = (state, *scorer.children(state, depth))
            push(node, depth + 1, rank=0)

    def push(parent: int, depth: int, rank: int) -> None:
        _, tokens, log_probs = families[parent]
        if rank < len(tokens):
            score = log_probs[rank] + (scores[parent] if parent >= 0 else 0.0)
            heapq.heappush(heap, (-score, tokens[rank], depth, parent, rank))

    if node_budget > 0:
        open_node(-1, scorer.root_state(), depth=0)
    while heap and len(token_ids) < node_budget:
        negative_score, token_id, depth, parent, rank = heapq.heappop(heap)
        if not takes(-negative_score):
            break
        token_ids.append(token_id)
        parents.append(parent)
        depths.append(depth)
        scores.append(-negative_score)
        push(parent, depth, rank + 1)
        if len(token_ids) < node_budget and depth < max_depth:
            open_node(len(token_ids) - 1, scorer.advance(families[parent][0], token_id), depth)
    return DraftTree.from_lists(token_ids, parents, depths, scores, device)
