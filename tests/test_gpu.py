"""What only a CUDA device can show. Skipped, saying so, where there is none; the same logic is tested on the CPU."""

from __future__ import annotations

import pytest
import torch
from conftest import READY_METHODS, greedy, make_draft, make_target

from dominotree.decode.loop import decode
from dominotree.decode.methods import make_method
from dominotree.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
PROMPT = [3, 10, 4, 11, 5, 12, 6]


def cuda_target() -> Target:
    target = make_target()
    torch.nn.Module.to(target.model, "cuda")
    return target


@pytest.mark.parametrize("method", READY_METHODS)
def test_every_method_gives_on_the_device_what_plain_decoding_gives_on_the_cpu(method: str) -> None:
    truth = greedy(make_target(), PROMPT, 24)
    target = cuda_target()
    generation = decode(target, make_draft(target), make_method(method), PROMPT, max_new_tokens=24)
    assert generation.token_ids == truth
    assert generation.seconds["verify"] > 0


@pytest.mark.parametrize("sliding", [False, True])
def test_padded_blocks_leave_gradients_finite(sliding: bool) -> None:
    target = cuda_target()
    draft = make_draft(target).requires_grad_(True)
    anchors = torch.tensor([[2, 5, 0], [1, 3, 6]], device="cuda")
    keep = torch.tensor([[True, True, False], [True, False, False]], device="cuda")
    ids = torch.tensor([PROMPT * 2, PROMPT[::-1] * 2], device="cuda")
    features = target.features(ids, draft.config.target_layer_ids)
    if sliding:
        object.__setattr__(draft.config, "layer_types", ("sliding_attention",) * 2)
        object.__setattr__(draft.config, "sliding_window", 4)
    hidden = draft.train_hidden(ids.gather(1, anchors), anchors, keep, features, target.embed)
    hidden[keep].square().sum().backward()
    gradients = [weight.grad for weight in draft.backbone.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
