"""Values computed once with the public implementations (../shared/reference): ours are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import READY_METHODS, draft_block, greedy
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from dominotree.decode.cache import TargetCache
from dominotree.decode.loop import decode
from dominotree.decode.methods import make_method
from dominotree.draft.checkpoint import check_fits, load_draft
from dominotree.draft.model import DraftModel
from dominotree.target import Target
from dominotree.tree.children import Proposal
from dominotree.tree.heap import best_first_tree

DOMINO = ["shift_p0", "shift_p1", "noshift_p0", "noshift_p1"]
VARIANTS = ["dflash", *DOMINO]
CONTEXT = 17  # tokens of sequence 0 before the anchor of the decoding block
TRAINED_METHODS = {
    "dflash": make_method("dflash"),
    "domino": make_method("domino"),
    "ddtree16": make_method("ddtree", node_budget=16),
    "static_corrected16": make_method("static_corrected", node_budget=16, candidate_width=64, node_topk=8),
    "dominotree8": make_method("dominotree", node_budget=8, candidate_width=64, node_topk=8),
    "dominotree16": make_method("dominotree", node_budget=16, candidate_width=64, node_topk=8),
    "dominotree64": make_method("dominotree", node_budget=64, candidate_width=64, node_topk=8),
}

# The listed dominotree of 40 nodes of noshift_p1 (5 slots, candidate width 8, 2 children a node), in order of
# selection: token, parent, log-probability of the path.
LISTED = """
28,-1,-3.807389 85,-1,-3.916882 96,0,-4.647213 96,1,-4.744037 52,0,-5.474741 52,1,-5.614159 96,2,-5.701605
96,3,-5.789402 52,2,-6.182590 52,3,-6.294405 96,4,-6.513897 96,5,-6.644451 96,6,-6.734786 96,7,-6.815443
52,6,-7.000716 52,4,-7.016737 52,7,-7.096252 52,5,-7.170964 96,8,-7.204872 96,9,-7.309850 52,8,-7.492204
36,12,-7.499457 96,10,-7.543398 36,13,-7.580206 52,9,-7.611721 96,11,-7.667084 36,14,-7.767036 52,10,-7.821706
36,16,-7.862753 52,11,-7.959985 36,18,-7.974810 96,15,-8.035592 36,19,-8.079957 96,17,-8.183257 36,20,-8.264073
36,22,-8.313669 82,12,-8.321925 52,15,-8.335281 36,24,-8.383851 82,13,-8.402944
"""
LISTED_NODES = [node.split(",") for node in LISTED.split()]
LISTED_TOKENS = [int(token) for token, _, _ in LISTED_NODES]
LISTED_PARENTS = [int(parent) for _, parent, _ in LISTED_NODES]
LISTED_LOG_PROBS = [float(log_prob) for _, _, log_prob in LISTED_NODES]


@pytest.fixture(scope="module")
def tensors(reference: Path) -> dict[str, Tensor]:
    return load_file(reference / "tensors.safetensors")


@pytest.fixture(scope="module")
def drafts(reference: Path, reference_target: Target) -> dict[str, DraftModel]:
    loaded = {variant: load_draft(reference / f"draft_{variant}") for variant in VARIANTS}
    for draft in loaded.values():
        check_fits(draft, reference_target)
    return loaded


@pytest.fixture(scope="module")
def proposals(
    reference_target: Target, drafts: dict[str, DraftModel], tensors: dict[str, Tensor]
) -> dict[str, Proposal]:
    """The decoding block of every drafter."""
    root_id = int(tensors["input_ids"][0, CONTEXT])
    features = tensors["target_features"][:1, :CONTEXT]
    return {variant: draft_block(reference_target, draft, features, root_id) for variant, draft in drafts.items()}


@pytest.fixture(scope="module")
def trained(reference: Path) -> tuple[Target, DraftModel]:
    """A target that learned something and a drafter that learned it too: acceptance that is not trivial."""
    return Target.load(reference / "trained" / "target"), load_draft(reference / "trained" / "draft")


@pytest.fixture(scope="module")
def trained_sequences(reference: Path) -> list[dict[str, Any]]:
    return json.loads((reference / "trained" / "expected.json").read_text(encoding="utf-8"))["sequences"]


def close(ours: Tensor, listed: Tensor) -> None:
    assert_close(ours, listed, rtol=1e-4, atol=1e-4)


def test_target_features_and_logits(reference_target: Target, tensors: dict[str, Tensor]) -> None:
    ids = tensors["input_ids"]
    output = reference_target.forward(ids, TargetCache(ids.shape[1]), layer_ids=(0, 2, 4))
    assert output.features is not None
    close(output.features, tensors["target_features"])
    close(output.logits, tensors["target_logits"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_and_base_logits_of_a_decoding_block(
    proposals: dict[str, Proposal], tensors: dict[str, Tensor], variant: str
) -> None:
    ours = proposals[variant]
    slots = len(
        ours.hidden
    )  # without shift_label the listed block has the anchor's slot in front, which drafts nothing
    close(ours.hidden, tensors[f"{variant}/block_hidden"][0, -slots:])
    close(ours.base_logits, tensors[f"{variant}/block_base_logits"][0, -slots:])


@pytest.mark.parametrize("variant", DOMINO)
def test_teacher_forced_logits_of_a_decoding_block(
    reference_target: Target,
    drafts: dict[str, DraftModel],
    proposals: dict[str, Proposal],
    tensors: dict[str, Tensor],
    variant: str,
) -> None:
    ours = proposals[variant]
    slots = len(ours.hidden)
    prefix = tensors[f"{variant}/block_teacher_tokens"][:, :slots]
    logits = drafts[variant].teacher_forced_logits(
        ours.hidden[None], ours.base_logits[None], prefix, reference_target.embed
    )
    close(logits, tensors[f"{variant}/block_teacher_forced_logits"][:, -slots:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_hidden_states(
    reference_target: Target, drafts: dict[str, DraftModel], tensors: dict[str, Tensor], variant: str
) -> None:
    anchors, keep = tensors[f"{variant}/anchors"], tensors[f"{variant}/keep"]
    anchor_ids = tensors["input_ids"].gather(1, anchors)
    hidden = drafts[variant].train_hidden(anchor_ids, anchors, keep, tensors["target_features"], reference_target.embed)
    assert keep.any() and not keep.all()
    close(hidden[keep], tensors[f"{variant}/train_hidden"][keep])


@pytest.mark.parametrize("variant", DOMINO)
@pytest.mark.parametrize(("method", "count"), [("dominotree", 36), ("static_corrected", 4), ("ddtree", 4)])
def test_every_listed_tree(
    proposals: dict[str, Proposal], reference_expected: dict[str, Any], method: str, count: int, variant: str
) -> None:
    listed = [t for t in reference_expected["trees"] if (t["method"], t["variant"]) == (method, variant)]
    assert len(listed) == count  # 4 x 44 are the 176 of the file
    for tree in listed:
        options = {key: tree[key] for key in ("node_budget", "candidate_width", "node_topk") if key in tree}
        ours = make_method(method, **options).build(proposals[variant])
        assert ours.token_ids[0].tolist() == tree["tokens"], options
        assert ours.parents[0].tolist() == tree["parents"], options
        assert (ours.depths[0] - 1).tolist() == tree["depths"], options
        if "log_probs" in tree:
            assert ours.path_log_probs is not None
            close(ours.path_log_probs[0], torch.tensor(tree["log_probs"]))


class ListedChildren:
    """The nodes of the listed tree as a table: a node's children with the log-probabilities it gives them."""

    def root_state(self) -> int:
        return -1

    def advance(self, state: int, token_id: int) -> int:
        return next(n for n, parent in enumerate(LISTED_PARENTS) if parent == state and LISTED_TOKENS[n] == token_id)

    def children(self, state: int, slot: int) -> tuple[list[int], list[float]]:
        above = LISTED_LOG_PROBS[state] if state >= 0 else 0.0
        nodes = [node for node, parent in enumerate(LISTED_PARENTS) if parent == state]
        return [LISTED_TOKENS[node] for node in nodes], [LISTED_LOG_PROBS[node] - above for node in nodes]


@pytest.mark.parametrize("budget", [1, 6, 16, 40])
def test_a_listed_tree_s_order_of_selection(budget: int) -> None:
    """The one check here that runs without the reference folder: all others need weights too large to copy."""
    tree = best_first_tree(ListedChildren(), node_budget=budget, max_depth=5, device=torch.device("cpu"))
    assert tree.token_ids[0].tolist() == LISTED_TOKENS[:budget]
    assert tree.parents[0].tolist() == LISTED_PARENTS[:budget]


@pytest.mark.parametrize(
    ("variant", "method"), [("shift_p1", m) for m in READY_METHODS] + [(v, "ddtree") for v in VARIANTS]
)
def test_greedy_continuations_of_the_target(
    reference_target: Target,
    drafts: dict[str, DraftModel],
    reference_expected: dict[str, Any],
    variant: str,
    method: str,
) -> None:
    reasons = []
    for listed in reference_expected["greedy"]:
        ours = decode(reference_target, drafts[variant], make_method(method), listed["prompt"], max_new_tokens=40)
        assert ours.token_ids == listed["output"]
        reasons.append(ours.finish_reason)
    assert reasons == ["length", "length", "length", "stop"]  # the last one ends on the end token, id 1


def check_trained(pair: tuple[Target, DraftModel], sequence: dict[str, Any], name: str, count: int) -> list[int]:
    """Decode `count` tokens of the trained pair; returns the accepted lengths that were compared."""
    target, draft = pair
    ours = decode(target, draft, TRAINED_METHODS[name], sequence["prompt"], max_new_tokens=count)
    assert ours.token_ids == sequence["greedy"][:count]
    listed = sequence["accepted_lengths"][name]
    compared, produced = 0, 1
    # Near the end fewer slots are drafted: compare the rounds before which a whole block and the bonus still fit.
    while compared < len(listed) and produced + draft.config.draft_length + 1 <= count:
        produced += listed[compared]
        compared += 1
    assert ours.accepted_lengths[:compared] == listed[:compared]
    assert produced > count - draft.config.draft_length - 1  # nothing that could be compared was left out
    return listed[:compared]


@pytest.mark.parametrize("name", TRAINED_METHODS)
def test_accepted_lengths_of_the_trained_pair_round_by_round(
    trained: tuple[Target, DraftModel], trained_sequences: list[dict[str, Any]], name: str
) -> None:
    lengths = [length for sequence in trained_sequences[:4] for length in check_trained(trained, sequence, name, 56)]
    assert max(lengths) >= 4


def test_accepted_lengths_of_every_sequence_of_the_trained_pair(
    trained: tuple[Target, DraftModel], trained_sequences: list[dict[str, Any]]
) -> None:
    assert len(trained_sequences) == 24
    lengths = [n for sequence in trained_sequences for n in check_trained(trained, sequence, "dominotree16", 64)]
    assert sum(lengths) / len(lengths) > 2


def test_the_trained_target_s_own_greedy_ids(
    trained: tuple[Target, DraftModel], trained_sequences: list[dict[str, Any]]
) -> None:
    for sequence in trained_sequences[::12]:
        assert greedy(trained[0], sequence["prompt"], 96) == sequence["greedy"]
