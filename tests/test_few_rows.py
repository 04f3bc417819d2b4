"""Linear layers for few rows: the same products, and no layer that is not a plain one is touched."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dominotree.few_rows import FEWEST, MOST, linear, speed_up


@pytest.mark.parametrize("shape", [(1,), (FEWEST - 1,), (FEWEST,), (17,), (MOST,), (MOST + 1,), (2, 9), (1, 3, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_the_usual_one(shape: tuple[int, ...], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(*size, generator=generator) for size in ((*shape, 6), (11, 6)))
    bias = torch.randn(11, generator=generator) if biased else None
    assert torch.allclose(linear(inputs, weight, bias), F.linear(inputs, weight, bias), atol=1e-5)


def test_other_number_formats_keep_their_bits() -> None:
    inputs, weight = torch.randn(17, 6).bfloat16(), torch.randn(11, 6).bfloat16()
    assert torch.equal(linear(inputs, weight), F.linear(inputs, weight))


def test_gradients_pass() -> None:
    layer = nn.Linear(6, 11)
    expected = torch.autograd.grad(layer(torch.ones(17, 6)).square().sum(), list(layer.parameters()))
    speed_up(layer)
    ours = torch.autograd.grad(layer(torch.ones(17, 6)).square().sum(), list(layer.parameters()))
    assert all(torch.allclose(one, other, rtol=1e-4) for one, other in zip(ours, expected, strict=True))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_only_plain_layers_are_changed_and_a_copy_computes_with_its_own_weights() -> None:
    def tripled(inputs: Tensor) -> Tensor:
        return 3 * F.linear(inputs, special.weight)

    special = nn.Linear(6, 6, bias=False)
    special.forward = tripled  # type: ignore[method-assign]
    model = nn.Sequential(Doubled(6, 6, bias=False), special, nn.Linear(6, 6, bias=False))
    inputs = torch.randn(17, 6)
    expected = model(inputs)
    speed_up(model)
    assert torch.allclose(model(inputs), expected, rtol=1e-4, atol=1e-5)
    assert [vars(layer).get("forward") is not None for layer in model] == [False, True, True]
    copied = copy.deepcopy(model[2])
    with torch.no_grad():
        model[2].weight.zero_()
    assert copied(inputs).abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_rows_of_a_sequence_are_multiplied_as_a_matrix(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[1, 3, K] out of [1, 8, K] is what PyTorch is slow at."""
    seen: list[tuple[int, ...]] = []
    plain = F.linear
    monkeypatch.setattr(F, "linear", lambda inputs, *rest: seen.append(inputs.shape) or plain(inputs, *rest))
    inputs, weight = torch.randn(1, 8, 16).to(dtype)[:, :3], torch.randn(20, 16).to(dtype)
    assert torch.equal(linear(inputs, weight), plain(inputs.clone(), weight))
    assert torch.equal(linear(inputs[0, 0], weight), plain(inputs[0, 0], weight))
    assert seen == [(3, 16), (1, 16)]
