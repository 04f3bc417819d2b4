"""Linear layers for few rows on a CPU: a verification has as many rows as its tree has nodes, and one more.

PyTorch's float32 product of a few rows with a large weight hardly uses more than one core; with the weight as the left
factor it does. For fewer rows, and for many, the usual order is as fast or faster.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST, MOST = 8, 48  # rows for which the other order is faster, as measured with SmolLM2 on two cores


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # [..., K], [N, K] -> [..., N]
    """F.linear, up to the order of its sums."""
    # Folded: PyTorch takes twenty times as long for some of a sequence's rows, [1, 7, K] out of [1, 8, K], in bfloat16.
    flat = inputs.reshape(-1, inputs.shape[-1])
    if not FEWEST <= len(flat) <= MOST or inputs.device.type != "cpu" or inputs.dtype != torch.float32:
        product = F.linear(flat, weight, bias)
    else:
        # Attention and softmax are slow on rows that do not lie in one piece.
        product = torch.mm(weight, flat.t()).t().contiguous()
        product = product if bias is None else product + bias.to(product.dtype)
    return product.view(*inputs.shape[:-1], len(weight))


def speed_up(model: nn.Module) -> None:
    """Have the model's linear layers multiply so, but for subclasses and those with a forward of their own."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(inputs, module.weight, module.bias)
