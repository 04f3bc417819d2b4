"""Acceptance measured as users get it: held-out prompts decoded by the real loop, the head applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator

from data.samples import Sample
from dominotree.decode.generation import Generation
from dominotree.decode.loop import decode
from dominotree.decode.methods import make_method
from dominotree.decode.sampling import Sampling
from dominotree.decode.stopping import Stopping
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError
from dominotree.target import Target


@dataclass(frozen=True)
class ValidationFigures:
    """τ of every method, and how often its n-th drafted token was accepted; `score` is what is best kept by."""

    acceptance_length: dict[str, float]
    acceptance_by_position: dict[str, list[float]]
    texts: list[tuple[str, str]] = field(default_factory=list)  # prompt and continuation

    @property
    def score(self) -> float:
        """τ of the best tree that this drafter can build: conditional with a head, marginal without."""
        return self.acceptance_length.get("dominotree", self.acceptance_length["ddtree"])

    def flat(self) -> dict[str, float]:
        figures = {f"tau/{name}": value for name, value in self.acceptance_length.items()}
        for name, shares in self.acceptance_by_position.items():
            figures |= {f"accepted/{name}/{position}": share for position, share in enumerate(shares, start=1)}
        return figures


class Validator:
    """Decodes the beginning of every held-out sample on; prompts are shared out among the processes."""

    def __init__(
        self, samples: Sequence[Sample], *, max_new_tokens: int, node_budget: int, context_length: int | None
    ) -> None:
        """Raises UserError where a prompt and its continuation do not fit into the target's context (tokens)."""
        self._prompts = [sample.token_ids[: sample.loss_mask.index(True)] for sample in samples]
        longest = max(map(len, self._prompts))
        if context_length is not None and longest + max_new_tokens > context_length:
            raise UserError(
                f"a held-out prompt of {longest} tokens and validation.max_new_tokens={max_new_tokens} exceed the "
                f"target's context of {context_length}; lower max_length or validation.max_new_tokens"
            )
        self._max_new_tokens = max_new_tokens
        self._node_budget = node_budget

    def run(self, accelerator: Accelerator, target: Target, draft: DraftModel) -> ValidationFigures:
        """Every process gets the figures of all prompts."""
        prompts = self._prompts[accelerator.process_index :: accelerator.num_processes]
        lengths: dict[str, float] = {}
        positions: dict[str, list[float]] = {}
        texts: list[tuple[str, str]] = []
        for name, options in _methods(draft, self._node_budget):
            histogram = torch.zeros(draft.config.draft_length + 1, dtype=torch.float64)
            for prompt in prompts:
                generation = self._decode(target, draft, prompt, name, options)
                for accepted in generation.accepted_lengths:
                    histogram[accepted - 1] += 1
                if len(texts) < min(4, len(prompts)):
                    texts.append(_text(target, prompt, generation))
            histogram = accelerator.reduce(histogram.to(accelerator.device, torch.float32), "sum").cpu()
            rounds = histogram.sum().clamp(min=1)
            # Entry n counts rounds with n drafts accepted: the n-th was accepted wherever at least n were.
            at_least = histogram.flip(0).cumsum(0).flip(0) / rounds
            lengths[name] = float(1 + at_least[1:].sum())
            positions[name] = at_least[1:].tolist()
        return ValidationFigures(lengths, positions, texts)

    def _decode(
        self, target: Target, draft: DraftModel, prompt: list[int], name: str, options: dict[str, int]
    ) -> Generation:
        stopping = Stopping(self._max_new_tokens, target.end_token_ids)
        return decode(
            target,
            draft,
            make_method(name, **options),
            prompt,
            max_new_tokens=self._max_new_tokens,
            sampling=Sampling(),
            stopping=stopping,
        )


def _methods(draft: DraftModel, node_budget: int) -> list[tuple[str, dict[str, int]]]:
    """Chain and tree, without the head and, where there is one, with it; of the trees also the control between both."""
    budget = {"node_budget": node_budget}
    plain = [("dflash", {}), ("ddtree", budget)]
    return (
        plain if draft.head is None else [*plain, ("domino", {}), ("static_corrected", budget), ("dominotree", budget)]
    )


def _text(target: Target, prompt: list[int], generation: Generation) -> tuple[str, str]:
    if target.tokenizer is None:
        return str(prompt), str(generation.token_ids)
    return str(target.tokenizer.decode(prompt)), str(target.tokenizer.decode(generation.token_ids))
