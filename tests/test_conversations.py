"""Conversations are lines that are only ever added to: killed at any byte, nothing is lost or doubled."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_templates import said

from data.conversations import ConversationStore
from dominotree.errors import UserError


def record(index: int, text: str = 'é\u2028 \n"x"') -> dict[str, Any]:
    return {"id": index, "messages": said("q", f"{text}{index}"), "source": "test"}


def stored(path: Path, *records: dict[str, Any]) -> ConversationStore:
    store = ConversationStore(path)
    store.append(records)
    store.close()
    return store


def test_what_is_appended_is_read_back_ordered_by_id(tmp_path: Path) -> None:
    path = tmp_path / "new" / "c.jsonl"
    stored(path, record(3), {"id": 2, "dropped": "too_long", "source": "test"})
    stored(path, record(1), record(0))
    store = ConversationStore(path)
    assert store.read() == [record(0), record(1), record(3)]
    assert store.done_ids == {0, 1, 2, 3}
    assert (store.kept, dict(store.dropped)) == (3, {"too_long": 1})
    assert [line["id"] for line in store] == [3, 2, 1, 0]


def test_a_missing_file_holds_nothing(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "c.jsonl")
    assert (store.read(), store.done_ids, store.kept) == ([], set(), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_write_cut_off_at_any_byte_loses_only_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    stored(path, record(0), record(1), record(2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        complete = whole[:length].count(b"\n")
        store = ConversationStore(path)
        assert store.done_ids == set(range(complete))
        assert path.read_bytes() == whole[:length], "reading must not disturb a writer"
        stored(path, *(record(index) for index in range(3) if index not in store.done_ids))
        assert path.read_bytes() == whole


def test_a_long_half_line_is_cut_off_too(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    stored(path, record(0))
    with path.open("ab") as file:
        file.write(b'{"id": 1, "messages": "' + b"x" * 200_000)
    stored(path, record(1))
    assert ConversationStore(path).read() == [record(0), record(1)]
    path.write_bytes(b"x" * 200_000)
    stored(path, record(1))
    assert ConversationStore(path).read() == [record(1)]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"id": "1", "messages": []}',
        '{"id": true, "messages": []}',
        '{"id": 7}',
        '{"id": 7, "messages": [{"role": "user"}]}',
        '{"id": 7, "messages": ["a"]}',
        '{"id": 7, "dropped": 3}',
        '{"id": 0, "messages": []}',
        "\xff",
    ],
)
def test_a_line_that_is_not_ours_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "c.jsonl"
    stored(path, record(0))
    path.write_bytes(path.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(UserError, match=r"c.jsonl line 2 ") as error:
        ConversationStore(path)
    assert "\n" not in str(error.value)


def test_no_id_comes_twice(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    store = stored(path, record(0))
    before = path.read_bytes()
    with pytest.raises(UserError, match="holds the id 0 already"):
        store.append([record(1), record(0)])
    assert path.read_bytes() == before


@pytest.mark.parametrize("room", [0, 5, 70])
def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    path = tmp_path / "c.jsonl"
    stored(path, record(0))
    before = path.read_bytes()
    write, left = os.write, [room]

    def narrow(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(descriptor, data[: left[0]])
        left[0] -= count
        return count

    store = ConversationStore(path)
    with monkeypatch.context() as patch:
        patch.setattr("data.conversations.os.write", narrow)
        with pytest.raises(UserError, match="No space left on device; what was written before is kept"):
            store.append([record(1), record(2)])
    assert path.read_bytes() == before
    store.append([record(1)])
    assert [line["id"] for line in ConversationStore(path)] == [0, 1]


def test_only_one_may_write(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    first, second = ConversationStore(path), ConversationStore(path)
    first.append([record(0)])
    with pytest.raises(UserError, match="another process is writing"):
        second.append([record(1)])
    first.close()
    second.append([record(1)])
    assert [json.loads(line) for line in path.open()] == [record(0), record(1)]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        ConversationStore(tmp_path / "file" / "c.jsonl").claim()
