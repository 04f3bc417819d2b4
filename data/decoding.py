"""Many generations side by side: rows that end make room for waiting ones, so that the batch stays full.

Rows are aligned on the right: all of them end at the cache's last column, and shorter ones begin with hidden padding.
Shapes: B rows, Q tokens of this forward, T tokens in the cache, V vocabulary, h key-value heads, D head dimension.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from dominotree.decode.cache import TargetCache
from dominotree.decode.sampling import GREEDY_BELOW, Sampling
from dominotree.errors import UserError
from dominotree.target import Target

RESERVE = 64  # columns to grow into before the cache is copied
REFILL_AT = 8  # rows are replaced once one in so many has ended
PREFILL_TOKENS = 1 << 14  # prompt tokens of one forward, padding included


@dataclass(frozen=True)
class Job:
    """One generation to come: `sampling.seed` gives it random numbers of its own, whatever else is in the batch."""

    key: int  # the caller's own, returned with the result
    prompt_ids: list[int]
    max_new_tokens: int
    end_token_ids: frozenset[int]
    sampling: Sampling


@dataclass(frozen=True)
class Result:
    key: int
    token_ids: list[int]  # without the end token
    finish_reason: str  # "stop" at an end token, "length" at max_new_tokens


@dataclass
class _Row:
    job: Job
    given: deque[int]  # prompt tokens to be fed one a step
    draws: Tensor | None  # [max_new_tokens] uniform in [0, 1), None when greedy
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_whole: bool = True  # nothing but its own tokens lies in its columns of the cache

    @property
    def cached_ids(self) -> list[int]:
        """The tokens in the cache: the last one of a row that ended at its length was never fed."""
        produced = self.token_ids if self.finish_reason == "stop" else self.token_ids[:-1]
        return self.job.prompt_ids + produced

    def take_next(self) -> int:
        """The token to feed now; an ended row is fed anything."""
        if self.finish_reason is not None:
            self.is_whole = False
            return 0
        return self.given.popleft() if self.given else self.token_ids[-1]

    def push(self, token_id: int) -> None:
        """What the target picked next; of no use while more of the prompt is to come."""
        if self.given or self.finish_reason is not None:
            return
        if token_id in self.job.end_token_ids:
            self.finish_reason = "stop"
            return
        self.token_ids.append(token_id)
        if len(self.token_ids) == self.job.max_new_tokens:
            self.finish_reason = "length"


class BatchDecoder:
    """Decodes up to `batch_size` jobs at once; add jobs at any time and step until nothing is left.

    A row's tokens are the target's own, greedy or sampled, up to the rounding of the dtype: what shares the batch may
    flip a near-tie, as any change of shape does.
    """

    def __init__(self, target: Target, batch_size: int) -> None:
        """Raises UserError for a batch size below 1."""
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size}")
        self._target = target
        self._batch_size = batch_size
        self._waiting: deque[Job] = deque()
        self._rows: list[_Row] = []
        self._starts = torch.zeros(0, dtype=torch.int64, device=target.device)  # [B] first column that is not padding
        self._cache = TargetCache(RESERVE)
        parameters = inspect.signature(target.model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def room(self) -> int:
        """Jobs that would find a free row now."""
        return max(0, self._batch_size - len(self._waiting) - len(self._live()))

    @property
    def is_idle(self) -> bool:
        """Nothing is waiting or running."""
        return not self._waiting and not self._live()

    def add(self, job: Job) -> None:
        """Queue a job. One whose prompt goes on where a generation ended in the last step takes over its row.

        Raises UserError where its tokens cannot all lie in the target's context.
        """
        total, limit = len(job.prompt_ids) + job.max_new_tokens, self._target.context_length
        if not job.prompt_ids or job.max_new_tokens < 1:
            raise UserError("a generation needs at least one prompt token and one new token")
        if limit is not None and total > limit:
            raise UserError(f"{total} tokens exceed the target's context of {limit} tokens")
        for index, row in enumerate(self._rows):
            cached = row.cached_ids if row.finish_reason is not None and row.is_whole else []
            if cached and len(cached) < len(job.prompt_ids) and job.prompt_ids[: len(cached)] == cached:
                self._rows[index] = _Row(job, deque(job.prompt_ids[len(cached) :]), _draws(job))
                return
        self._waiting.append(job)

    @torch.no_grad()
    def step(self) -> list[Result]:
        """One token for every running row, after waiting jobs have taken free rows; the generations that ended."""
        ended = self._refill()
        running = [self._rows[index] for index in self._live()]
        if running:
            ids = torch.tensor([row.take_next() for row in self._rows], device=self._target.device)
            _push(self._forward(ids[:, None], self._starts, self._cache), self._rows)
        ended += [row for row in running if row.finish_reason is not None]
        return [Result(row.job.key, row.token_ids, str(row.finish_reason)) for row in ended]

    def _live(self) -> list[int]:
        return [index for index, row in enumerate(self._rows) if row.finish_reason is None]

    def _refill(self) -> list[_Row]:
        """Replace ended rows by waiting jobs, or drop them, once enough have ended to be worth a copy of the cache.

        Returns the new rows that ended with their first token.
        """
        live = self._live()
        joining = self._joining(self._batch_size - len(live))
        changes = max(joining, len(self._rows) - len(live))
        if not changes or (live and changes * REFILL_AT < self._batch_size):
            return []
        rows, starts, cache = self._prefill([self._waiting.popleft() for _ in range(joining)])
        kept = torch.tensor(live, dtype=torch.int64, device=self._target.device)
        self._cache, self._starts = _merge(self._cache, self._starts, kept, cache, starts)
        self._rows = [self._rows[index] for index in live] + rows
        return [row for row in rows if row.finish_reason is not None]

    def _joining(self, free: int) -> int:
        """How many waiting jobs one prefill can take."""
        count, longest = 0, 0
        for job in list(self._waiting)[:free]:
            longest = max(longest, len(job.prompt_ids))
            if count and (count + 1) * longest > PREFILL_TOKENS:
                break
            count += 1
        return count

    def _prefill(self, jobs: Sequence[Job]) -> tuple[list[_Row], Tensor, TargetCache]:
        """Run the prompts of new rows in a cache of their own, equal ones once, and pick the first tokens."""
        rows = [_Row(job, deque(), _draws(job)) for job in jobs]
        prompts = list(dict.fromkeys(tuple(job.prompt_ids) for job in jobs))
        which = [prompts.index(tuple(job.prompt_ids)) for job in jobs]
        longest = max(map(len, prompts), default=0)
        starts = torch.tensor([longest - len(ids) for ids in prompts], dtype=torch.int64, device=self._target.device)
        cache = TargetCache(max(1, longest))
        if rows:
            padded = [[0] * (longest - len(ids)) + list(ids) for ids in prompts]
            logits = self._forward(torch.tensor(padded, device=self._target.device), starts, cache)
            _push(logits[which], rows)
        if len(prompts) < len(rows):
            cache = _rows_of(cache, torch.tensor(which, device=self._target.device))
        return rows, starts[which], cache

    def _forward(self, ids: Tensor, starts: Tensor, cache: TargetCache) -> Tensor:  # [B, Q], [B] -> [B, V]
        """Append Q tokens to every row; logits of the last."""
        past, new = cache.length, ids.shape[1]
        columns = torch.arange(past + new, device=ids.device)
        output = self._target.model(
            input_ids=ids,
            attention_mask=(columns >= starts[:, None]).long(),
            position_ids=(columns[past:] - starts[:, None]).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        return output.logits[:, -1]


def sample(
    logits: Tensor,  # [B, V]
    draws: Tensor,  # [B] float64 uniform in [0, 1)
    sampling: Sampling,
) -> Tensor:  # [B]
    """One token a row from temperature, top-k and top-p in that order, by inverting the distribution at `draws`."""
    scores, order = logits.float() / sampling.temperature, None
    if sampling.top_k or sampling.top_p < 1:
        scores, order = scores.topk(min(sampling.top_k or scores.shape[-1], scores.shape[-1]))
    weights = scores.double().softmax(dim=-1)
    if sampling.top_p < 1:
        weights = weights * (weights.cumsum(dim=-1) - weights < sampling.top_p)
    mass = weights.cumsum(dim=-1)
    places = torch.searchsorted(mass, draws[:, None] * mass[:, -1:], right=True)
    places = places.clamp(max=mass.shape[-1] - 1)
    return (places if order is None else order.gather(1, places))[:, 0]


def _push(logits: Tensor, rows: Sequence[_Row]) -> None:  # [B, V]
    """Pick the next token of every row."""
    tokens = logits.argmax(dim=-1).tolist()
    drawing = [i for i, row in enumerate(rows) if row.draws is not None and not row.given and row.finish_reason is None]
    kinds = {replace(rows[i].job.sampling, seed=0) for i in drawing}
    for kind in kinds:
        members = [i for i in drawing if replace(rows[i].job.sampling, seed=0) == kind]
        draws = torch.stack([_next_draw(rows[i]) for i in members]).to(logits.device)
        for i, token in zip(members, sample(logits[members], draws, kind).tolist(), strict=True):
            tokens[i] = token
    for row, token in zip(rows, tokens, strict=True):
        row.push(token)


def _draws(job: Job) -> Tensor | None:
    if job.sampling.temperature < GREEDY_BELOW:
        return None
    generator = torch.Generator().manual_seed(job.sampling.seed)
    return torch.rand(job.max_new_tokens, generator=generator, dtype=torch.float64)


def _next_draw(row: _Row) -> Tensor:
    assert row.draws is not None
    return row.draws[len(row.token_ids)]


def _merge(
    old: TargetCache,
    old_starts: Tensor,  # [B]
    kept: Tensor,  # [k] rows of `old`
    new: TargetCache,
    new_starts: Tensor,  # [n]
) -> tuple[TargetCache, Tensor]:  # k + n rows, [k + n]
    """The kept rows and the new ones in one cache, aligned on the right, without padding that all of them share."""
    starts = old_starts[kept]
    needed = old.length - int(starts.min()) if len(kept) else 0
    length = max(needed, new.length)
    merged = TargetCache(length + RESERVE)
    for layer in range(max(len(old.layers), len(new.layers))):
        parts = [_aligned(old, layer, kept, length)] if len(kept) else []
        parts += [_aligned(new, layer, None, length)] if len(new_starts) else []
        if parts:
            keys, values = (torch.cat(pair) for pair in zip(*parts, strict=True))
            merged.update(keys, values, layer)
    return merged, torch.cat([starts + length - old.length, new_starts + length - new.length])


def _aligned(cache: TargetCache, layer: int, rows: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, h, length, D] of some rows: the last columns, or all of them behind padding."""
    missing = length - cache.length
    found = []
    for whole in _keys_values(cache, layer):
        columns = whole[:, :, max(0, -missing) :]
        found.append(pad(columns if rows is None else columns[rows], (0, 0, max(0, missing), 0)))
    return found[0], found[1]


def _rows_of(cache: TargetCache, rows: Tensor) -> TargetCache:
    """A cache with the given rows [B], some of them more than once."""
    copied = TargetCache(cache.length)
    for layer in range(len(cache.layers)):
        keys, values = _keys_values(cache, layer)
        copied.update(keys[rows], values[rows], layer)
    return copied


def _keys_values(cache: TargetCache, layer: int) -> tuple[Tensor, Tensor]:
    stored = cache.layers[layer]
    assert isinstance(stored, DynamicLayer) and stored.keys is not None and stored.values is not None
    return stored.keys, stored.values
