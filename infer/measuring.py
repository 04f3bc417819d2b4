"""Measuring all methods after one prompt: plain decoding first, what it says compared with, then the others in turn."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dominotree.chat import encode_chat
from dominotree.decode.generation import Generation
from dominotree.decode.loop import decode_rounds
from dominotree.decode.methods import Method
from dominotree.decode.sampling import GREEDY_BELOW, Sampling
from dominotree.draft.model import DraftModel
from dominotree.target import Target
from infer.compare import compare
from infer.measurements import Key, Measurement
from infer.prompt_sets import NamedPrompt
from infer.summary import peak_memory_bytes

MIB = 2**20
WARM_UP_PROMPT, WARM_UP_TOKENS = "Warmup", 16  # as in the published harnesses


@dataclass(frozen=True)
class Contender:
    """A method under its label, with the drafter it uses."""

    label: str
    method: Method
    draft: DraftModel | None


class Bench:
    """A target with the methods to measure, plain decoding first."""

    def __init__(
        self, target: Target, contenders: Sequence[Contender], sampling: Sampling, *, max_new_tokens: int
    ) -> None:
        assert target.tokenizer is not None
        self._target = target
        self._tokenizer = target.tokenizer
        self._plain, *self._others = contenders
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens

    def warm_up(self, temperatures: Sequence[float]) -> None:
        """A few tokens by every method, so that none pays alone for what only a first call costs."""
        prompt_ids = encode_chat(self._tokenizer, [{"role": "user", "content": WARM_UP_PROMPT}])
        tokens = min(WARM_UP_TOKENS, self._max_new_tokens)
        for temperature in temperatures:
            for contender in (self._plain, *self._others):
                key = Key("", "", 0, temperature, contender.label)
                self._generate(contender, prompt_ids, replace(self._sampling, temperature=temperature), tokens, key)

    def keys(self, named: NamedPrompt, temperature: float) -> list[Key]:
        """What `measure` measures."""
        return [
            self._key(named, turn, temperature, contender)
            for turn in range(len(named.prompt.turns))
            for contender in (self._plain, *self._others)
        ]

    def measure(
        self, named: NamedPrompt, temperature: float, place: int, done: Mapping[Key, Measurement]
    ) -> Iterator[Measurement]:
        """What is not done yet after one prompt. `place` turns the order of the methods, so that each comes everywhere.

        A later turn follows plain decoding's answer for all of them: they are compared on the same prompt.
        """
        turned = place % max(1, len(self._others))
        others = [*self._others[turned:], *self._others[:turned]]
        messages = [dict(message) for message in named.prompt.history]
        if all(key in done for key in self.keys(named, temperature)):
            return
        for turn, text in enumerate(named.prompt.turns):
            messages.append({"role": "user", "content": text})
            prompt_ids = encode_chat(self._tokenizer, messages)
            plain = done.get(self._key(named, turn, temperature, self._plain))
            if plain is None:
                plain = self._measure(self._key(named, turn, temperature, self._plain), self._plain, prompt_ids, None)
                yield plain
            assert plain.token_ids is not None
            for contender in others:
                key = self._key(named, turn, temperature, contender)
                if key not in done:
                    yield self._measure(key, contender, prompt_ids, plain.token_ids)
            answer = self._tokenizer.decode(list(plain.token_ids), skip_special_tokens=True)
            messages.append({"role": "assistant", "content": str(answer)})

    def _measure(
        self, key: Key, contender: Contender, prompt_ids: list[int], plain_ids: tuple[int, ...] | None
    ) -> Measurement:
        sampling = replace(self._sampling, temperature=key.temperature, seed=_seed(self._sampling.seed, key))
        measurement = self._generate(contender, prompt_ids, sampling, self._max_new_tokens, key)
        if plain_ids is None:
            return measurement
        if measurement.token_ids == plain_ids:
            return replace(measurement, token_ids=None)
        if sampling.temperature >= GREEDY_BELOW:
            return measurement
        assert measurement.token_ids is not None
        plain = Generation(self._plain.label, list(plain_ids))
        other = Generation(contender.label, list(measurement.token_ids))
        comparison = compare(self._target, prompt_ids, plain, other, greedy=True)
        return replace(
            measurement,
            difference={
                "first": comparison.first_difference,
                "tokens": comparison.differing,
                "logit_gap": comparison.logit_gap,
                "near_tie": comparison.near_tie,
                "allowed": comparison.half_precision and comparison.near_tie is True,
            },
        )

    def _generate(
        self,
        contender: Contender,
        prompt_ids: list[int],
        sampling: Sampling,
        max_new_tokens: int,
        key: Key,
    ) -> Measurement:
        device = self._target.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        generation, first_token_seconds = Generation(contender.method.name), 0.0
        start = time.perf_counter()
        for round_ in decode_rounds(
            self._target,
            contender.draft,
            contender.method,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
        ):
            first_token_seconds = first_token_seconds or time.perf_counter() - start
            generation.add(round_)
        seconds = dict(generation.seconds)
        seconds["other"] = max(0.0, time.perf_counter() - start - seconds.pop("total"))
        return Measurement(
            key=key,
            tokens=len(generation.token_ids),
            finish_reason=str(generation.finish_reason),
            accepted_lengths=tuple(generation.accepted_lengths),
            seconds=seconds,
            first_token_seconds=first_token_seconds,
            peak_mib=_peak_mib(device),
            token_ids=tuple(generation.token_ids),
            tree_sizes=tuple(generation.tree_sizes) if contender.method.needs_profile else None,
        )

    def _key(self, named: NamedPrompt, turn: int, temperature: float, contender: Contender) -> Key:
        return Key(named.dataset, named.digest, turn, temperature, contender.label)


def _seed(seed: int, key: Key) -> int:
    """Random numbers of its own for every answer, the same for all methods."""
    digest = hashlib.blake2b(f"{seed}/{key.dataset}/{key.prompt}/{key.turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _peak_mib(device: torch.device) -> float | None:
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory_bytes()
    return None if peak is None else peak / MIB
