"""What a round costs besides the two models, stage by stage, on models so small that little else is left.

    python -m infer.overhead

Prints milliseconds a round for every method: the drafter's and the target's forward pass, and of each stage what is
the library's own. A measurement, not a test: compare figures of one run only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dominotree.decode.loop import decode_rounds
from dominotree.decode.methods import METHODS, make_method
from dominotree.decode.stopping import Stopping
from dominotree.draft.fresh import fresh_draft
from dominotree.draft.model import DraftModel
from dominotree.target import Target

VOCAB_SIZE, HIDDEN_SIZE, LAYERS = 4096, 64, 4
PROMPT_LENGTH, NEW_TOKENS, WARM_UP_ROUNDS = 32, 200, 10
COLUMNS = ("draft forward", "draft own", "build", "target forward", "verify own", "commit")


class ForwardTimer:
    """Seconds of every forward pass of a module, in order."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        before = module.register_forward_pre_hook(lambda *_: self._begin())
        after = module.register_forward_hook(lambda *_: self._end())
        yield
        before.remove()
        after.remove()

    def _begin(self) -> None:
        self._start = time.perf_counter()

    def _end(self) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def tiny_pair() -> tuple[Target, DraftModel]:
    """A random target of a few hundred thousand parameters and a fresh drafter for it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN_SIZE // 4,
        max_position_embeddings=2048,
    )
    target = Target(Qwen3ForCausalLM(config))
    return target, fresh_draft(target, seed=0, block_size=16, num_layers=1, gru_hidden_dim=64, emb_dim=32)


def measure(name: str, target: Target, draft: DraftModel) -> dict[str, float]:
    """Median milliseconds a round of one generation, by column of the table."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(VOCAB_SIZE, (PROMPT_LENGTH,), generator=generator).tolist()
    drafting, verifying = ForwardTimer(), ForwardTimer()
    with drafting.watching(draft.backbone), verifying.watching(target.model):
        rounds = list(
            decode_rounds(
                target, draft, make_method(name), prompt, max_new_tokens=NEW_TOKENS, stopping=Stopping(NEW_TOKENS)
            )
        )
    # The prefill, and the last round where nothing is left to draft, are not like the others.
    counted = range(1 + WARM_UP_ROUNDS, len(rounds) - 1)
    columns: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for index in counted:
        stage = rounds[index].seconds
        draft_forward = drafting.seconds[index - 1] if drafting.seconds else 0.0
        columns["draft forward"].append(draft_forward)
        columns["draft own"].append(stage["draft"] - draft_forward)
        columns["build"].append(stage["build"])
        columns["target forward"].append(verifying.seconds[index])
        columns["verify own"].append(stage["verify"] - verifying.seconds[index])
        columns["commit"].append(stage["commit"])
    return {column: 1e3 * statistics.median(seconds) for column, seconds in columns.items()}


def main() -> None:
    torch.set_num_threads(1)  # more only get in each other's way on matrices this small
    target, draft = tiny_pair()
    table = Table("method", *COLUMNS, title="median milliseconds a round; own: outside the two forward passes")
    for name in (name for name, method in METHODS.items() if not method.needs_profile):
        table.add_row(name, *(f"{milliseconds:.3f}" for milliseconds in measure(name, target, draft).values()))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
