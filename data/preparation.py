"""One run of `data.prepare`: open what is there, write what is missing, say what came of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.answers import Writer, WritingRules, first_user_turns
from data.config import PrepareConfig
from data.conversations import FILE_NAME, ConversationStore, Record
from data.download import say
from data.features import write_features
from data.models import load_target
from data.progress import progress_bar
from data.provenance import target_fingerprint, tokenizer_fingerprint, versions, write_json
from data.samples import load_samples
from data.sources import Source, open_source
from dominotree.chat import require_template
from dominotree.decode.sampling import Sampling
from dominotree.draft.config import build_target_layer_ids
from dominotree.dtypes import parse_device, parse_dtype
from dominotree.errors import UserError
from dominotree.target import Target

# What may differ between two runs that write the same conversations.
FREE_KEYS = {"output", "count", "batch_size", "device", "debug", "features", "num_features", "layer_ids", "target"}
PROVENANCE = "prepare.json"
GIVEN_AT_ONCE = 1000


class Preparation:
    """Made from checked settings; `run` does the work. Raises UserError for whatever cannot be had or written."""

    def __init__(self, config: PrepareConfig) -> None:
        self._config = config
        self._folder = Path(config.output).expanduser()
        self._rules = _rules(config)
        if config.dtype != "auto":
            parse_dtype(config.dtype)
        parse_device(config.device)

    def run(self) -> int:
        """Returns the exit code, 0."""
        source = open_source(self._config.data, self._config.count)
        store = ConversationStore(self._folder / FILE_NAME)
        store.claim()
        try:
            target = load_target(self._config.target, dtype=self._config.dtype, device=self._config.device)
            self._check_provenance(target, store)
            self._write_conversations(source, store, target)
        finally:
            store.close()
        self._report(source, store)
        if self._config.features != "none":
            self._write_features(target)
        return 0

    def _write_conversations(self, source: Source, store: ConversationStore, target: Target) -> None:
        started, done_before = time.monotonic(), len(store.done_ids & set(range(source.total)))
        with progress_bar("conversations", source.total, done=done_before) as advance:
            for records, tokens in self._batches(source, store, target):
                if records:
                    store.append(records)
                seconds = max(1e-9, time.monotonic() - started)
                advance(len(records), f"{tokens / seconds:.0f} tokens/s" if tokens else "")

    def _batches(self, source: Source, store: ConversationStore, target: Target) -> Iterator[tuple[list[Record], int]]:
        """Records to store, and the tokens written so far."""
        if self._config.answers == "given":
            batch: list[Record] = []
            for record in source.given(frozenset(store.done_ids)):
                batch.append(record)
                if len(batch) == GIVEN_AT_ONCE:
                    yield batch, 0
                    batch = []
            yield batch, 0
            return
        known = first_user_turns(store) if source.rows is None else set()
        writer = Writer(target, self._rules, batch_size=self._config.batch_size, known=known)
        for records in writer.write(source.prompts(frozenset(store.done_ids))):
            yield records, writer.tokens

    def _check_provenance(self, target: Target, store: ConversationStore) -> None:
        """The settings that the conversations there were written with must be those of this run."""
        if target.tokenizer is None:
            raise UserError("writing conversations needs the target's tokenizer, this target has none")
        require_template(target.tokenizer)
        path = self._folder / PROVENANCE
        identity = {
            "target_fingerprint": target_fingerprint(target),
            "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer),
            **{key: value for key, value in asdict(self._config).items() if key not in FREE_KEYS},
        }
        if self._config.data.source == "benchmark":
            identity["count"] = self._config.count  # decides which rows are drawn, and so what an id means
        identity = json.loads(json.dumps(identity))
        if store.done_ids:
            _compare(_read_json(path), identity)
        self._provenance = {
            "identity": identity,
            "config": asdict(self._config),
            "target": self._config.target.path or self._config.target.source,
            "versions": versions(),
        }
        write_json(path, self._provenance)

    def _write_features(self, target: Target) -> None:
        assert target.tokenizer is not None
        config = self._config
        layer_ids = config.layer_ids or build_target_layer_ids(target.num_layers, config.num_features)
        samples = load_samples(self._folder, target.tokenizer, max_length=config.max_length)
        write_features(target, samples, self._folder / "features", layer_ids, storage=config.features)

    def _report(self, source: Source, store: ConversationStore) -> None:
        """Counts into the provenance and one line to the user; nothing kept is an error."""
        cuts = _count_cuts(store)
        counts = {"kept": store.kept, "dropped": dict(store.dropped), "cut_short": cuts}
        write_json(self._folder / PROVENANCE, self._provenance | {"counts": counts})
        reasons = ", ".join(f"{reason} {number}" for reason, number in store.dropped.most_common())
        if not store.kept:
            raise UserError(f"none of {source.total} prompts of {source.name} gave a conversation: {reasons}")
        dropped = f", {store.dropped.total()} prompts dropped ({reasons})" if reasons else ""
        say(f"{store.path}: {store.kept} conversations{dropped}")


def _rules(config: PrepareConfig) -> WritingRules:
    data = config.data
    return WritingRules(
        seed=config.seed,
        max_length=config.max_length,
        max_user_tokens=data.max_user_tokens,
        max_answer_tokens=config.max_answer_tokens,
        user_sampling=Sampling(data.temperature, data.top_k, data.top_p),
        answer_sampling=Sampling(config.temperature, config.top_k, config.top_p),
    )


def _compare(stored: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises UserError naming the first setting that differs from those of the conversations already there."""
    before = stored.get("identity", {})
    for key, value in identity.items():
        if before.get(key) != value:
            raise UserError(
                f"the conversations there were written with {key}={_short(before.get(key))}, this run has "
                f"{_short(value)}; use the same settings, or another output="
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}, which says how its conversations were written: {error}") from error


def _count_cuts(store: ConversationStore) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in store:
        if "cut" in record:
            counts[record["cut"]] = counts.get(record["cut"], 0) + 1
    return counts
