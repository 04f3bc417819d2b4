"""Names of the number formats and devices a user may ask for."""

from __future__ import annotations

import torch

from .errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype, or one of the names float32, bfloat16, float16. Raises UserError for any other."""
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if dtype not in DTYPES:
        raise UserError(f"dtype must be auto, {', '.join(DTYPES)}; got {dtype}")
    return DTYPES[str(dtype)]


def parse_device(device: str | torch.device) -> torch.device:
    """A device by name; `auto` is the first CUDA device where there is one, else the CPU. Raises UserError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device must be auto, cpu, cuda or cuda:N; got {device}") from error
    if parsed.type not in ("cpu", "cuda"):
        raise UserError(f"device must be auto, cpu, cuda or cuda:N; got {device}")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {device} is not available: torch sees {torch.cuda.device_count()} CUDA devices")
    return parsed
