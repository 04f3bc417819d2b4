"""The walk: which nodes the target's choices accept, and the token that it adds."""

from __future__ import annotations

import pytest
import torch
from conftest import RandomTree, batch_of, random_trees
from hypothesis import given, settings
from hypothesis import strategies as st

from dominotree.tree.nodes import DraftTree
from dominotree.tree.walk import walk

VOCABULARY = 3  # few tokens, so that paths are often accepted
TREES = random_trees(max_size=16, vocab_size=VOCABULARY)


def choices(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, VOCABULARY - 1), min_size=size, max_size=size)


def descend(tree: RandomTree, posterior: list[int]) -> tuple[list[int], int]:
    """From the root to the child that carries the chosen token, as long as there is one."""

    def go(node: int) -> list[int]:
        chosen = posterior[node + 1]
        for child, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            if parent == node and token == chosen:
                return [child, *go(child)]
        return []

    path = go(-1)
    return path, posterior[path[-1] + 1 if path else 0]


def nodes(accepted: torch.Tensor) -> list[int]:  # [N] bool
    return accepted.nonzero()[:, 0].tolist()


@given(data=st.data(), tree=TREES)
@settings(deadline=None, max_examples=500)
def test_the_walk_descends_to_the_children_that_were_chosen(data: st.DataObject, tree: RandomTree) -> None:
    posterior = data.draw(choices(1 + len(tree.parents)))
    accepted, bonus = walk(tree.arrays(), torch.tensor([posterior]))
    assert (nodes(accepted[0]), bonus.item()) == descend(tree, posterior)


@given(data=st.data(), trees=st.lists(TREES, min_size=2, max_size=4))
@settings(deadline=None, max_examples=200)
def test_every_sequence_of_a_batch_walks_alone_and_padding_is_never_accepted(
    data: st.DataObject, trees: list[RandomTree]
) -> None:
    batch = batch_of(trees)
    posterior = [data.draw(choices(1 + batch.size)) for _ in trees]
    accepted, bonus = walk(batch, torch.tensor(posterior))
    for row, tree in enumerate(trees):
        assert (nodes(accepted[row]), bonus[row].item()) == descend(tree, posterior[row])


def test_padding_that_carries_the_chosen_token_is_not_accepted() -> None:
    batch = batch_of([RandomTree([5, 6], [-1, 0]), RandomTree([], [])])
    accepted, bonus = walk(batch, torch.tensor([[5, 6, 7], [0, 0, 9]]))  # padding carries token 0
    assert accepted.tolist() == [[True, True], [False, False]]
    assert bonus.tolist() == [7, 0]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_without_a_tree_the_target_s_own_token_is_all(batch_size: int) -> None:
    tree = DraftTree.chain(torch.empty(batch_size, 0, dtype=torch.int64))
    posterior = torch.arange(4, 4 + batch_size)[:, None]
    accepted, bonus = walk(tree, posterior)
    assert accepted.shape == (batch_size, 0)
    assert bonus.tolist() == posterior[:, 0].tolist()


def test_a_right_child_of_a_wrong_parent_is_not_accepted() -> None:
    tree = DraftTree.from_lists([1, 2, 3], [-1, -1, 0], [1, 1, 2], [0.0, 0.0, 0.0], torch.device("cpu"))
    accepted, bonus = walk(tree, torch.tensor([[2, 3, 8, 9]]))  # node 2 agrees with its parent, the parent does not
    assert accepted.tolist() == [[False, True, False]]
    assert bonus.tolist() == [8]
