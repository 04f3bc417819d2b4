"""Rounds of real decoding, node by node: what the draft predicted, and what the target accepted.

Shapes: N tree nodes in order of selection, A nodes of a path that the target followed, the root included, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dominotree.decode.loop import decode_rounds
from dominotree.decode.methods import DominoTree, Method
from dominotree.decode.sampling import Sampling
from dominotree.draft.model import DraftModel
from dominotree.target import Target
from dominotree.tree.children import Proposal
from dominotree.tree.nodes import DraftTree

LOGIT_TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0)


@dataclass(frozen=True)
class LoggedRound:
    """One draft tree as it was verified."""

    context_length: int
    parents: np.ndarray  # [N] -1 is the root
    depths: np.ndarray  # [N] from 1
    log_probs: np.ndarray  # [N] of each node given its parent, as the tree was built
    accepted: np.ndarray  # [N] bool
    full_log_probs: np.ndarray  # [N] the same over the whole vocabulary; nan where the parent was not accepted
    logit_losses: np.ndarray  # [len(LOGIT_TEMPERATURES)] Σ -log p(the target's own token) with logits divided by each
    choices: int  # tokens in that sum

    @property
    def decided(self) -> np.ndarray:  # [N] bool
        """Nodes whose parents were accepted: where the target's own choice decided on the node."""
        return np.concatenate([self.accepted, [True]])[self.parents]


@dataclass(frozen=True)
class _Recorder(Method):
    """Another method's trees, kept with what they were made from."""

    name = "recorder"
    needs_head = True
    inner: DominoTree
    built: list[tuple[Proposal, DraftTree]] = field(default_factory=list)

    def build(self, proposal: Proposal) -> DraftTree:
        tree = self.inner.build(proposal)
        self.built.append((proposal, tree))
        return tree


def log_rounds(
    target: Target,
    draft: DraftModel,
    method: DominoTree,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    max_new_tokens: int,
) -> Iterator[LoggedRound]:
    """Decode after `prompt_ids`; the last round, which may have been cut, is left out. Raises UserError."""
    recorder = _Recorder(method)
    length = len(prompt_ids)
    for round_ in decode_rounds(target, draft, recorder, prompt_ids, max_new_tokens=max_new_tokens, sampling=sampling):
        if round_.accepted_length is not None and round_.finish_reason is None:
            proposal, tree = recorder.built.pop()
            yield _logged(target, draft, proposal, tree, round_.token_ids, method.candidate_width, length)
            length += len(round_.token_ids)


def _logged(
    target: Target,
    draft: DraftModel,
    proposal: Proposal,
    tree: DraftTree,
    token_ids: list[int],
    candidate_width: int,
    context_length: int,
) -> LoggedRound:
    assert tree.path_log_probs is not None
    tokens, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
    sums = np.append(tree.path_log_probs[0].double().cpu().numpy(), 0.0)  # the last entry is the root's, index -1
    node_of = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path = [-1]
    for token in token_ids[:-1]:
        path.append(node_of[path[-1], token])
    # Beyond the deepest slot nothing was drafted, so the bonus token there was nobody's choice.
    logits = _logits_along(target, draft, proposal, token_ids)[: len(path)]  # [A, V]
    full = np.full(len(tokens), np.nan)
    log_probs = logits.log_softmax(dim=-1).cpu().numpy()
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if parent in path and path.index(parent) < len(logits):
            full[node] = log_probs[path.index(parent), token]
    accepted = np.zeros(len(tokens), dtype=bool)
    accepted[path[1:]] = True
    return LoggedRound(
        context_length=context_length,
        parents=np.array(parents),
        depths=np.array(tree.depths[0].tolist()),
        log_probs=sums[:-1] - sums[parents],
        accepted=accepted,
        full_log_probs=full,
        logit_losses=_losses(logits, token_ids[: len(logits)]),
        choices=len(logits),
    )


@torch.no_grad()
def _logits_along(target: Target, draft: DraftModel, proposal: Proposal, token_ids: list[int]) -> Tensor:  # [K, V]
    """The draft's logits over the whole vocabulary for every slot, after the tokens that the target chose."""
    slots = len(proposal.hidden)
    known = torch.tensor(token_ids[:slots], device=target.device)
    prefix = torch.cat([proposal.root_id[None], known])[:slots]
    prefix = torch.nn.functional.pad(prefix, (0, slots - len(prefix)))
    logits = draft.teacher_forced_logits(
        proposal.hidden[None], proposal.base_logits[None], prefix[None], proposal.embed
    )
    return logits[0].float()


def _losses(logits: Tensor, token_ids: list[int]) -> np.ndarray:  # [A, V] -> [len(LOGIT_TEMPERATURES)]
    chosen = torch.tensor(token_ids, device=logits.device)
    losses = [torch.nn.functional.cross_entropy(logits / each, chosen, reduction="sum") for each in LOGIT_TEMPERATURES]
    return np.array([float(loss) for loss in losses])
