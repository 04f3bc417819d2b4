"""Results as JSON lines: each record is written whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dominotree.errors import UserError


class RecordWriter:
    """Adds records to a file, one a line, each one on the disk's side before the next is made.

    Making one only checks that writing looks possible (UserError): the file appears with its first record. A record
    that cannot be written whole is taken back, and `write` raises UserError.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        self._count = 0
        self._check()

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                _append_whole(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UserError(
                f"cannot write record {self._count + 1} to {self._path}: {error.strerror or error}; "
                f"the {self._count} before it are whole"
            ) from error
        self._count += 1

    def _check(self) -> None:
        folder = self._path.parent
        if not folder.is_dir():
            raise UserError(f"output={self._path}: there is no directory {folder}; make it first")
        if self._path.is_dir():
            raise UserError(f"output={self._path} is a directory; name a file in it")
        writable = self._path if self._path.exists() else folder
        if not os.access(writable, os.W_OK):
            raise UserError(f"output={self._path}: no permission to write {writable}")
        if self._path.is_file() and not _ends_with_line(self._path):
            raise UserError(f"output={self._path} ends in the middle of a line; complete or remove it first")


def _append_whole(descriptor: int, line: bytes) -> None:
    """Append the line, or leave a regular file as long as it was."""
    status = os.fstat(descriptor)
    written = 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    finally:
        if written < len(line) and stat.S_ISREG(status.st_mode):
            os.ftruncate(descriptor, status.st_size)


def _ends_with_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
