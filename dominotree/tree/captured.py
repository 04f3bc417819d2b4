"""Bodies over tensors that stay in place: captured once as a CUDA graph on a GPU, called as they are elsewhere.

Shapes: B batch, K drafted slots, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from .lanes import DraftBlocks

T = TypeVar("T")
WARM_UPS = 3  # calls before a capture, so that libraries have made their workspaces


class Captured(Generic[T]):
    """A function of no arguments that reads and writes tensors staying where they are, and never waits for the host.

    What it returns lies in the graph's own memory and is overwritten by the next call.
    """

    def __init__(self, body: Callable[[], T], device: torch.device) -> None:
        self._body = body
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: T | None = None

    def __call__(self) -> T:
        if self._device.type != "cuda":
            return self._body()
        if self._graph is None:
            self._capture()
        assert self._graph is not None and self._output is not None
        self._graph.replay()
        return self._output

    def _capture(self) -> None:
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self._body()
            current.wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may use the GPU meanwhile, as the one that computes features ahead of training.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._output = self._body()


class StaticBlocks:
    """Buffers that drafted blocks are copied into, as many slots as the largest block has.

    A shorter block, as near the end of a generation, leaves the last slots as they were; `length` says how many count.
    """

    def __init__(self, like: DraftBlocks) -> None:
        self.blocks = DraftBlocks(
            torch.zeros_like(like.root_ids),
            torch.zeros_like(like.hidden),
            torch.zeros_like(like.base_logits),
            like.uncorrected_length,
        )
        self.length = torch.zeros((), dtype=torch.int64, device=like.hidden.device)

    @property
    def slots(self) -> int:
        return self.blocks.hidden.shape[1]

    def takes(self, blocks: DraftBlocks) -> bool:
        """Whether `blocks` differ from the buffers in nothing but having fewer slots."""
        own = self.blocks
        pairs = ((own.hidden, blocks.hidden), (own.base_logits, blocks.base_logits))
        return blocks.uncorrected_length == own.uncorrected_length and all(
            ours.dtype == theirs.dtype
            and ours.device == theirs.device
            and ours[:, :1].shape == theirs[:, :1].shape
            and ours.shape[1] >= theirs.shape[1]
            for ours, theirs in pairs
        )

    def load(self, blocks: DraftBlocks) -> None:
        count = blocks.hidden.shape[1]
        self.blocks.root_ids.copy_(blocks.root_ids)
        self.blocks.hidden[:, :count].copy_(blocks.hidden)
        self.blocks.base_logits[:, :count].copy_(blocks.base_logits)
        self.length.fill_(count)
