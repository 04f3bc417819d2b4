"""The fused kernel's losses and gradients are torch's, and torch's are the textbook's.

Triton's kernels run on GPUs; here its interpreter carries the same ones out on the CPU (TRITON_INTERPRET=1), which must
be said before triton is imported: hence processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_training import REPO, losses, make_home, records, words

from dominotree.errors import UserError
from train.cross_entropy import TorchCrossEntropy, make_cross_entropy
from train.main import main as train


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_logits_become_the_gradient_of_their_cross_entropy(dtype: torch.dtype, tolerance: float) -> None:
    logits = (8 * torch.randn(50, 300, generator=torch.Generator().manual_seed(1))).to(dtype)
    labels = torch.arange(50)
    labels[:9] = logits[:9].argmax(dim=-1)
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    expected.sum().backward()
    kernel = TorchCrossEntropy()
    scratch = torch.empty(50, 300) if kernel.scratch_bytes(dtype) else None
    found, right = kernel.into_gradient(logits, labels, scratch)
    assert (found.dtype, logits.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=tolerance, atol=1e-5)
    assert torch.equal(right, exact.argmax(dim=-1) == labels) and right[:9].all() and not right.all()


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel, which needs Linux, is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # of the LM head and its logits
def test_training_with_the_fused_kernel_is_training_without(dtype: str, tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    run = ("backbone=trained", f"target.dtype={dtype}", "logits_mib=1")
    assert train(words(home, tmp_path / "torch", *run)) == 0
    fused = words(home, tmp_path / "liger", *run, "loss_kernel=liger")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(REPO / "train" / "main.py"), *fused], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    assert losses(tmp_path / "liger") == pytest.approx(losses(tmp_path / "torch"), rel=tolerance)
    for ours, theirs in zip(records(tmp_path / "liger")[:6], records(tmp_path / "torch")[:6], strict=True):
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=10 * tolerance)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=0.05)


def test_the_fused_kernel_is_refused_where_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    home = make_home(tmp_path / "home")
    assert train(words(home, tmp_path / "run", "loss_kernel=liger")) != 0
    assert "error: loss_kernel=liger runs on GPUs, got cpu; say loss_kernel=torch" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.cross_entropy", None)
    with pytest.raises(UserError, match=r"needs the liger-kernel package .*pip install -e '\.\[kernels\]'"):
        make_cross_entropy("liger", torch.device("cuda"))
