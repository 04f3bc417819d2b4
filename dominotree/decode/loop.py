"""The one decoding loop: draft, build, verify, commit.

Every method, plain decoding included, runs through it, so that speeds compare like with like.
Shapes: B = 1, N tree nodes, F target features concatenated, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..draft.checkpoint import check_fits
from ..draft.model import DraftModel
from ..errors import UserError
from ..target import Target
from ..tree.children import Proposal
from ..tree.mask import ancestor_mask, node_positions
from ..tree.nodes import DraftTree
from ..tree.walk import walk
from .cache import DraftCache, TargetCache
from .clock import StageClock
from .generation import Generation, Round
from .methods import Method
from .sampling import Sampling, TokenPicker
from .stopping import Stopping


def decode(
    target: Target,
    draft: DraftModel | None,
    method: Method,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
) -> Generation:
    """All rounds of `decode_rounds`, added up."""
    generation = Generation(method.name)
    for round_ in decode_rounds(
        target, draft, method, prompt_ids, max_new_tokens=max_new_tokens, sampling=sampling, stopping=stopping
    ):
        generation.add(round_)
    return generation


def decode_rounds(
    target: Target,
    draft: DraftModel | None,
    method: Method,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
) -> Iterator[Round]:
    """Generate after `prompt_ids`, yielding what each round commits as soon as it is known.

    In float32 at temperature 0 the tokens are the target's own greedy ones, whatever the method and the drafter; at
    a positive temperature they follow the target's distribution. `stopping` defaults to the target's end tokens.
    Raises UserError for a request that cannot be served, before any work.
    """
    check_request(target, draft, method, len(prompt_ids), max_new_tokens)
    if max_new_tokens == 0:
        yield Round([], None, {}, "length")
        return
    stopping = stopping or Stopping(max_new_tokens, target.end_token_ids)
    state = _Sequence(target, draft if method.drafts else None, method, sampling or Sampling(), len(prompt_ids))
    round_ = state.prefill(prompt_ids, stopping)
    yield round_
    while round_.finish_reason is None:
        round_ = state.next_round(stopping)
        yield round_


def check_request(
    target: Target, draft: DraftModel | None, method: Method, prompt_length: int, max_new_tokens: int
) -> None:
    """Raises UserError, saying why, when `decode_rounds` cannot serve the request."""
    if prompt_length < 1:
        raise UserError("the prompt is empty: give at least one token")
    if not isinstance(max_new_tokens, int):
        raise UserError(f"max_new_tokens must be a whole number, got {max_new_tokens!r}")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    limit = target.context_length
    if limit is not None and prompt_length + max_new_tokens > limit:
        raise UserError(
            f"the prompt's {prompt_length} tokens and max_new_tokens={max_new_tokens} exceed the target's context of "
            f"{limit} tokens; shorten the prompt or lower max_new_tokens"
        )
    if not method.drafts:
        return
    if draft is None:
        raise UserError(f"method {method.name} needs a drafter, got none; give draft= or use method ar")
    if method.needs_head and draft.head is None:
        raise UserError(
            f"method {method.name} needs a drafter with a Domino head, this is a plain DFlash one; use dflash or ddtree"
        )
    check_fits(draft, target)
    method.check(target, draft)


class _Sequence:
    """One sequence being decoded: its caches, its last token and the target features the drafter has not seen yet."""

    def __init__(
        self, target: Target, draft: DraftModel | None, method: Method, sampling: Sampling, prompt_length: int
    ) -> None:
        self._target = target
        self._draft = draft
        self._method = method
        self._temperature = sampling.temperature
        self._picker = TokenPicker(sampling, target.device)
        self._clock = StageClock(target.device)
        self._layer_ids = draft.config.target_layer_ids if draft else ()
        self._cache = TargetCache(reserve=2 * prompt_length + 256)
        self._context = DraftCache(draft.backbone, reserve=2 * prompt_length + 256) if draft else None
        self._root = torch.empty(0)  # [1] the last committed token, set by the prefill
        self._features: Tensor | None = None  # [1, C, F] of tokens committed since the last draft

    def prefill(self, prompt_ids: Sequence[int], stopping: Stopping) -> Round:
        """Run the prompt; its last logits give the first token."""
        with self._clock.stage("prefill"):
            ids = torch.tensor([list(prompt_ids)], device=self._target.device)
            output = self._target.forward(ids, self._cache, layer_ids=self._layer_ids, last_only=True)
            self._features = output.features
            self._root = self._picker.pick(output.logits)[:, 0]
            token_ids = self._root.tolist()
        return Round(token_ids, None, self._clock.take(), stopping.feed(token_ids).finish_reason)

    def next_round(self, stopping: Stopping) -> Round:
        with self._clock.stage("draft"):
            # The target adds a token of its own, so one fewer than remain can be of use.
            proposal = self._propose(max_depth=stopping.remaining - 1)
        with self._clock.stage("build"):
            tree = self._method.build(proposal) if proposal else self._no_tree()
        with self._clock.stage("verify"):
            posterior, features = self._verify(tree)
        with self._clock.stage("commit"):
            token_ids = self._commit(tree, posterior, features)
            verdict = stopping.feed(token_ids)
        return Round(token_ids[: verdict.kept], verdict.kept, self._clock.take(), verdict.finish_reason, tree.size)

    @torch.no_grad()
    def _propose(self, max_depth: int) -> Proposal | None:
        """Draft one block, of which at most `max_depth` slots are looked at; None when there is nothing to draft."""
        if self._draft is None or self._context is None or max_depth < 1:
            return None
        assert self._features is not None
        self._context.append(self._features)
        length = self._context.length
        anchor = torch.full_like(self._root, length)
        hidden = self._draft.draft_hidden(self._root, anchor, self._target.embed, self._context, length)[:, :max_depth]
        return Proposal(
            root_id=self._root[0],
            hidden=hidden[0],
            base_logits=self._target.lm_head(hidden)[0],
            head=self._draft.head,
            uncorrected_length=self._draft.config.uncorrected_length,
            embed=self._target.embed,
            context_length=length,
            temperature=self._temperature,
        )

    def _no_tree(self) -> DraftTree:
        return DraftTree.chain(self._root.new_empty(1, 0))

    def _verify(self, tree: DraftTree) -> tuple[Tensor, Tensor | None]:  # [1, 1 + N], [1, 1 + N, F]
        """One target forward over root and nodes: the target's choice after each."""
        output = self._target.forward(
            torch.cat([self._root[:, None], tree.token_ids], dim=1),
            self._cache,
            layer_ids=self._layer_ids,
            positions=node_positions(tree, self._cache.length),
            visible=None if tree.linear else ancestor_mask(tree),
        )
        return self._picker.pick(output.logits), output.features

    def _commit(self, tree: DraftTree, posterior: Tensor, features: Tensor | None) -> list[int]:
        """Keep the accepted path in the cache, note its features, and return its tokens with the bonus token."""
        accepted, bonus = walk(tree, posterior)
        # The round's one transfer to the host.
        *tokens, bonus_token = torch.cat([torch.where(accepted, tree.token_ids, -1), bonus[:, None]], dim=1)[0].tolist()
        path = [node for node, token in enumerate(tokens) if token >= 0]
        # Places of the root and the accepted nodes in the window, made where they are used.
        kept = (~torch.nn.functional.pad(accepted[0], (1, 0), value=True)).int().argsort(stable=True)[: 1 + len(path)]
        in_place = 1 + sum(place == node for place, node in enumerate(path))
        self._cache.keep(self._cache.length - (1 + tree.size), kept, in_place)
        if features is not None:
            self._features = features[:, kept]
        self._root = bonus
        return [*(tokens[node] for node in path), bonus_token]
