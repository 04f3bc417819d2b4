"""One generation, streamed while the rounds commit it, with Ctrl-C ending it between two rounds."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any

from dominotree.decode.generation import Generation
from dominotree.decode.methods import Method
from dominotree.decode.sampling import Sampling
from dominotree.decode.stream import TextGeneration
from dominotree.draft.model import DraftModel
from dominotree.target import Target

INTERRUPTED = "interrupted"  # a finish reason beside the decoding loop's "stop" and "length"


@dataclass(frozen=True)
class Answer:
    """A generation with its text set, the seconds until its first token (None without one), and whether Ctrl-C came."""

    generation: Generation
    first_token_seconds: float | None
    interrupted: bool


@dataclass(frozen=True)
class Answerer:
    """Loaded models with the settings that hold for every answer."""

    target: Target
    draft: DraftModel | None
    sampling: Sampling
    max_new_tokens: int
    stop: tuple[str, ...]

    def stream(self, method: Method, prompt_ids: Sequence[int], seed: int, write: Callable[[str], None]) -> Answer:
        """Generate after `prompt_ids`, giving `write` each piece of text as soon as it is certain."""
        text = TextGeneration(
            self.target,
            self.draft,
            method,
            prompt_ids,
            max_new_tokens=self.max_new_tokens,
            sampling=replace(self.sampling, seed=seed),
            stop=self.stop,
        )
        generation = text.generation
        first_token_seconds, start = None, time.perf_counter()
        with Interruption() as interruption:
            for piece in text:
                if first_token_seconds is None and generation.token_ids:
                    first_token_seconds = time.perf_counter() - start
                write(piece)
                if interruption.asked:
                    break
        write(text.finish())
        generation.finish_reason = generation.finish_reason or INTERRUPTED
        return Answer(generation, first_token_seconds, interruption.asked)


class Interruption:
    """Ctrl-C as a question asked between rounds, so that what was produced is complete; a second one cuts through."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # only there may a handler be set
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
