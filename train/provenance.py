"""Where a checkpoint comes from: settings, versions, git revision, data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from data.provenance import versions
from data.samples import SampleSet

from .config import TrainConfig


def describe_run(config: TrainConfig, samples: SampleSet) -> dict[str, Any]:
    """Everything needed to know what was run, as plain JSON values."""
    return {
        "config": asdict(config),
        "data_fingerprint": samples.fingerprint,
        "samples": len(samples),
        "dropped_samples": samples.dropped,
        "versions": versions(),
    }
