"""A generation as text that grows round by round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..draft.model import DraftModel
from ..errors import UserError
from ..target import Target
from .generation import Generation
from .loop import decode_rounds
from .methods import Method
from .sampling import Sampling
from .stopping import Stopping
from .text import TextStream


class TextGeneration:
    """Iterate over it for the text as it is committed, in pieces of whole characters; then `finish` it.

    `generation` holds what has been produced so far, so iteration may be left at any point. Raises UserError when made
    around a target without a tokenizer, and, at the first step, for a request that cannot be served.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftModel | None,
        method: Method,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str] = (),
    ) -> None:
        if target.tokenizer is None:
            raise UserError("text needs the target's tokenizer, this target was made without one")
        self.generation = Generation(method.name)
        self._text = TextStream(target.tokenizer, stop)
        self._rounds = decode_rounds(
            target,
            draft,
            method,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stopping=Stopping(max_new_tokens, target.end_token_ids, stop, target.tokenizer),
        )

    def __iter__(self) -> Iterator[str]:
        for round_ in self._rounds:
            self.generation.add(round_)
            yield self._text.push(round_.token_ids)

    def finish(self) -> str:
        """The rest of the text, which nothing can change any more; sets `generation.text` to the whole."""
        rest = self._text.flush()
        self.generation.text = self._text.text
        return rest
