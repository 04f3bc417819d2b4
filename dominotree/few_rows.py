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
    rows = inputs.shape[:-1].numel()
    if not FEWEST <= rows <= MOST or inputs.device.type != "cpu" or inputs.dtype != torch.float32:
        return F.linear(inputs, weight, bias)
    columns = torch.mm(weight, inputs.reshape(rows, -1).t())
    # Attention and softmax are slow on rows that do not lie in one piece.
    product = columns.t().contiguous().view(*inputs.shape[:-1], len(weight))
    return product if bias is None else product + bias.to(product.dtype)


def speed_up(model: nn.Module) -> None:
    """Have the model's linear layers multiply so, but for subclasses and those with a forward of their own."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(inputs, module.weight, module.bias)
