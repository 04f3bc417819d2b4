"""The target's features of every token on the disk, so that training need not run the target.

Shards of safetensors with an index that names the finished ones: killed while writing, the next run goes on behind
them.
Shapes: S tokens, F features (the layers' hidden states side by side), L layers.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.download import say
from data.progress import progress_bar
from data.provenance import target_fingerprint, tokenizer_fingerprint, write_json
from data.samples import MASK_VERSION, Sample, SampleSet
from dominotree.chat import require_template
from dominotree.errors import UserError
from dominotree.target import Target

INDEX = "index.json"
STORAGES = ("bfloat16", "int8")
SHARD_BYTES = 1 << 28
BATCH_TOKENS = 1 << 12  # of one forward, padding included
SPARE_BYTES = 1 << 26  # left free on the disk
HEADER_BYTES = 160  # of one sample in a shard's header and in the index

Key = dict[str, Any]


def feature_key(target: Target, layer_ids: Sequence[int]) -> Key:
    """Everything that features follow from beside the tokens: other features must never be taken for these.

    Raises UserError for layers that the target has not, and a target without a tokenizer or chat template.
    """
    if target.tokenizer is None:
        raise UserError("features of conversations need the target's tokenizer, this target has none")
    require_template(target.tokenizer)
    if not layer_ids or not all(0 <= layer < target.num_layers for layer in layer_ids):
        raise UserError(f"layer_ids must lie in 0..{target.num_layers - 1}, got {list(layer_ids)}")
    return {
        "target": target_fingerprint(target),
        "layer_ids": list(layer_ids),
        "template": tokenizer_fingerprint(target.tokenizer),
        "mask_version": MASK_VERSION,
    }


def predict_bytes(lengths: Sequence[int], hidden_size: int, num_layers: int, storage: str) -> int:
    """Size on the disk, in bytes, of the features of samples with these lengths in tokens."""
    scale = 4 if storage == "int8" else 0
    a_token = num_layers * (hidden_size * (1 if storage == "int8" else 2) + scale)
    return sum(lengths) * a_token + len(lengths) * HEADER_BYTES


class FeatureCache:
    """Reads finished shards. Made by `open`."""

    def __init__(self, directory: Path, index: Mapping[str, Any]) -> None:
        self._directory = directory
        self._num_layers = len(index["key"]["layer_ids"])
        self._places = {
            entry[0]: (shard["file"], entry[1], entry[2]) for shard in index["shards"] for entry in shard["samples"]
        }

    @classmethod
    def open(cls, directory: Path, key: Key) -> FeatureCache:
        """The cache in `directory`. Raises UserError where there is none, or one of others, naming what differs."""
        index = _read_index(directory)
        if index is None:
            raise UserError(f"there are no features in {directory}; write them with data.prepare and features=bfloat16")
        _check_key(directory, index, key)
        return cls(directory, index)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._places

    def get(self, sample_id: int, token_ids: Sequence[int] | None = None) -> Tensor:  # [S, F] bfloat16
        """A sample's features. Raises UserError where they are missing, or of other tokens than `token_ids`."""
        if token_ids is not None:
            self.check(sample_id, token_ids)
        with self._open(self._place(sample_id)[0]) as shard:
            stored = shard.get_tensor(str(sample_id))
            if stored.dtype != torch.int8:
                return stored
            return dequantise(stored, shard.get_tensor(f"{sample_id}.scale"))

    def get_batch(self, rows: Sequence[Sequence[int]]) -> Tensor:  # [B, S, F] bfloat16
        """The features of the samples of every row end to end, padded on the right with zeros. Raises UserError where
        one is missing."""
        joined = [torch.cat([self.get(sample_id) for sample_id in row]) for row in rows]
        return pad_sequence(joined, batch_first=True)

    def check(self, sample_id: int, token_ids: Sequence[int]) -> None:
        """Raises UserError unless the sample's features are there, and those of these tokens."""
        _, length, checksum = self._place(sample_id)
        if (len(token_ids), _checksum(token_ids)) != (length, checksum):
            raise UserError(
                f"the features in {self._directory} are of other tokens for sample {sample_id} (max_length or the "
                "conversations have changed); remove that directory and write them anew"
            )

    def _place(self, sample_id: int) -> tuple[str, int, int]:
        """The shard that holds a sample, the sample's length in tokens and their checksum."""
        if sample_id not in self._places:
            raise UserError(
                f"the features in {self._directory} lack sample {sample_id}; run data.prepare with features= once more"
            )
        return self._places[sample_id]

    def _open(self, file: str) -> Any:
        """Anew for each sample: a shard that stays open keeps in memory whatever was read of it."""
        try:
            return safe_open(self._directory / file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {self._directory / file}: {error}; remove that directory") from error


def write_features(
    target: Target, samples: SampleSet, directory: Path, layer_ids: Sequence[int], *, storage: str = "bfloat16"
) -> None:
    """Compute and store the features of every sample that is not there yet, after printing how large they will be.

    Raises UserError for a storage other than bfloat16 and int8, features of another kind or of other tokens already
    there, another process writing there, and a disk without the room.
    """
    if storage not in STORAGES:
        raise UserError(f"features are stored as {' or '.join(STORAGES)}, got {storage}")
    key = feature_key(target, layer_ids)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / "lock", timeout=0):
            _Writer(target, samples, directory, key, storage).run()
    except Timeout as error:
        raise UserError(f"another process is writing features to {directory}; wait for it") from error
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror or error}; make room and run again") from error


class _Writer:
    def __init__(self, target: Target, samples: SampleSet, directory: Path, key: Key, storage: str) -> None:
        self._target, self._samples, self._directory = target, samples, directory
        self._layer_ids = key["layer_ids"]
        self._storage = storage
        self._index = _read_index(directory) or {"key": key, "storage": storage, "shards": []}
        _check_key(directory, self._index, key)
        if self._index["storage"] != storage:
            raise UserError(
                f"the features in {directory} are of {self._index['storage']}, not {storage}; remove that directory"
            )

    def run(self) -> None:
        missing = self._missing()
        lengths = [self._samples.lengths[place] for place in missing]
        predicted = predict_bytes(lengths, self._target.hidden_size, len(self._layer_ids), self._storage)
        free = shutil.disk_usage(self._directory).free
        say(
            f"features: {len(missing)} samples, {sum(lengths)} tokens, {self._storage}: {predicted / 1e6:.1f} MB to "
            f"write, {free / 1e6:.0f} MB free"
        )
        if predicted + SPARE_BYTES > free:
            raise UserError(
                f"{self._directory} has {free / 1e6:.0f} MB free, the features need {predicted / 1e6:.0f} MB; make "
                "room, use features=int8, or compute them in training (features=online)"
            )
        with progress_bar("features", len(self._samples), done=len(self._samples) - len(missing)) as advance:
            shard: dict[str, Tensor] = {}
            entries: list[tuple[int, int, int]] = []
            for sample, features in self._computed(missing):
                shard |= self._stored(sample.sample_id, features)
                entries.append((sample.sample_id, len(sample.token_ids), _checksum(sample.token_ids)))
                if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
                    self._finish(shard, entries)
                    shard, entries = {}, []
                advance(1, "")
            if shard:
                self._finish(shard, entries)

    def _missing(self) -> list[int]:
        """Places of the samples without features, the longest first. Raises UserError for features of other tokens."""
        there = FeatureCache(self._directory, self._index)
        missing = []
        for place, sample in enumerate(self._samples):
            if sample.sample_id not in there:
                missing.append(place)
            else:
                there.check(sample.sample_id, sample.token_ids)
        return sorted(missing, key=lambda place: -self._samples.lengths[place])

    def _computed(self, places: Sequence[int]) -> Iterator[tuple[Sample, Tensor]]:
        """Samples with their features [S, F], batch by batch."""
        done = 0
        while done < len(places):
            size = max(1, BATCH_TOKENS // self._samples.lengths[places[done]])
            batch = [self._samples[place] for place in places[done : done + size]]
            longest = max(len(sample.token_ids) for sample in batch)
            padded = [sample.token_ids + [0] * (longest - len(sample.token_ids)) for sample in batch]
            features = self._target.features(torch.tensor(padded, device=self._target.device), self._layer_ids)
            for sample, row in zip(batch, features, strict=True):
                yield sample, row[: len(sample.token_ids)].cpu()
            done += size

    def _stored(self, sample_id: int, features: Tensor) -> dict[str, Tensor]:  # [S, F]
        if self._storage == "bfloat16":
            return {str(sample_id): features.to(torch.bfloat16).contiguous()}
        values, scales = quantise(features, len(self._layer_ids))
        return {str(sample_id): values, f"{sample_id}.scale": scales}

    def _finish(self, shard: dict[str, Tensor], entries: list[tuple[int, int, int]]) -> None:
        """Write a shard whole, then name it in the index."""
        name = f"features-{len(self._index['shards']):05}.safetensors"
        part = self._directory / f"{name}.part"
        try:
            save_file(shard, part)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise UserError(f"cannot write {self._directory / name}: {error}; make room and run again") from error
        part.replace(self._directory / name)
        self._index["shards"].append({"file": name, "samples": entries})
        write_json(self._directory / INDEX, self._index)


def quantise(features: Tensor, num_layers: int) -> tuple[Tensor, Tensor]:  # [S, F] -> int8 [S, F], float32 [S, L]
    """Eight bits a value, with a scale for each token and layer: off by at most half a scale."""
    layers = features.float().unflatten(-1, (num_layers, -1))
    scales = layers.abs().amax(dim=-1).clamp(min=1e-12) / 127
    return (layers / scales[..., None]).round().to(torch.int8).flatten(-2), scales


def dequantise(values: Tensor, scales: Tensor) -> Tensor:  # int8 [S, F], float32 [S, L] -> [S, F] bfloat16
    layers = values.float().unflatten(-1, (scales.shape[-1], -1))
    return (layers * scales[..., None]).flatten(-2).to(torch.bfloat16)


def _checksum(token_ids: Sequence[int]) -> int:
    return zlib.crc32(np.array(token_ids, np.int32).tobytes())


def _read_index(directory: Path) -> dict[str, Any] | None:
    path = directory / INDEX
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; remove that directory and write the features anew") from error


def _check_key(directory: Path, index: Mapping[str, Any], key: Key) -> None:
    differing = [name for name in key if index["key"].get(name) != key[name]]
    if differing:
        name = differing[0]
        raise UserError(
            f"the features in {directory} are of another {', '.join(differing)} ({index['key'].get(name)}, wanted "
            f"{key[name]}); remove that directory and write them anew"
        )
