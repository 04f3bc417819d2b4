"""What only a CUDA device can show. Skipped, saying so, where there is none; the same logic is tested on the CPU."""

from __future__ import annotations

import pytest
import torch
from conftest import READY_METHODS, greedy, make_draft, make_target, small_draft

from dominotree.decode.loop import decode
from dominotree.decode.methods import make_method
from dominotree.target import Target
from train.cross_entropy import make_cross_entropy

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


def test_compiled_flex_attention_gives_what_one_mask_gives_whatever_shares_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)  # else it would run unfused
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(13, 32, generator=generator).cuda()
    for rows, length, blocks in ((1, 150, 20), (2, 150, 20), (3, 90, 7), (1, 300, 70), (2, 61, 12), (4, 200, 33)):
        starts = torch.arange(length).div(50, rounding_mode="floor").mul(50).repeat(rows, 1).cuda()
        anchors = torch.randint(1, length, (rows, blocks), generator=generator).sort().values.cuda()
        keep = (torch.rand(rows, blocks, generator=generator) < 0.8).cuda()
        ids = torch.randint(13, (rows, blocks), generator=generator).cuda()
        features = torch.randn(rows, length, 96, generator=generator).cuda()
        found = []
        for attention in ("dense", "flex"):
            draft = small_draft(head_dim=16).cuda().requires_grad_(True)
            draft.attention = attention
            hidden = draft.train_hidden(ids, anchors, keep, features, table.__getitem__, starts)[keep]
            hidden.square().mean().backward()
            found.append((hidden.detach(), draft.backbone.fc.weight.grad))
        torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_gives_torch_s_losses_and_gradients(dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel")
    logits = (8 * torch.randn(50, 50001, generator=torch.Generator().manual_seed(1))).to("cuda", dtype)
    labels = torch.arange(50, device="cuda")
    found = []
    for name in ("torch", "liger"):
        kernel, own = make_cross_entropy(name, torch.device("cuda")), logits.clone()
        scratch = torch.empty(own.shape, device="cuda") if kernel.scratch_bytes(dtype) else None
        found.append((kernel.into_gradient(own, labels, scratch)[0], own))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-5)
