"""The import arrows go one way, and no module of ours hides a real package."""

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ARROWS: dict[str, set[str]] = {
    "dominotree": set(),
    "data": {"dominotree"},
    "train": {"data", "dominotree"},
    "infer": {"data", "dominotree"},
}
# Packages that training may bring along without being pinned here.
OPTIONAL = {"accelerate", "bitsandbytes", "datasets", "deepspeed", "evaluate", "flash_attn", "peft", "triton", "wandb"}

# A command that is run as a module alone: with infer/ first on the path, where `python infer/file.py` puts it and
# `python -m infer.file` does not, it would hide the profile module of the standard library.
MODULE_ONLY = {"infer/profile.py"}


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Full names of what a module of `package` (dotted) imports, inside functions and by import_module("...") too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                yield str(node.args[0].value)


def forbidden_imports(root: Path) -> list[str]:
    """``file -> package`` for each import of ours that is against the arrows, under `root`."""
    found = set()
    for owner, allowed in ARROWS.items():
        for path in (root / owner).rglob("*.py"):
            file = path.relative_to(root)
            for module in imported_modules(ast.parse(path.read_text(encoding="utf-8")), ".".join(file.parent.parts)):
                top = module.split(".")[0]
                if top in ARROWS.keys() | {"tests", "conf"} and top not in allowed | {owner}:
                    found.add(f"{file.as_posix()} -> {top}")
    return sorted(found)


def real_packages() -> set[str]:
    """Import names that ours must not hide: the standard library, what constraints.txt installs, and ourselves."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_normal(line.split("==")[0]) for line in lines if "==" in line}
    installed = importlib.metadata.packages_distributions()
    brought = {name for name, owners in installed.items() if pinned & {_normal(owner) for owner in owners}}
    return set(sys.stdlib_module_names) | brought | OPTIONAL | ARROWS.keys() | {"conf", "tests"}


def hiding_modules(root: Path) -> list[str]:
    """Modules and folders that hide a real package when ``python folder/file.py`` puts that folder first."""
    real = real_packages()
    entries = [entry for owner in ("data", "train", "infer") for entry in (root / owner).iterdir()]
    return sorted(
        entry.relative_to(root).as_posix()
        for entry in entries
        if (entry.suffix == ".py" or entry.is_dir())
        and entry.stem in real
        and entry.relative_to(root).as_posix() not in MODULE_ONLY
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).strip().lower()


def _tree(root: Path, **files: str) -> Path:
    for package in ARROWS:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
    for name, source in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    return root


def test_imports_follow_the_arrows() -> None:
    assert forbidden_imports(ROOT) == []


def test_the_arrows_are_read_from_every_package() -> None:
    for package in ARROWS:
        assert (ROOT / package / "__init__.py").is_file(), package
    assert len(list((ROOT / "dominotree").rglob("*.py"))) > 5


@pytest.mark.parametrize(
    ("module", "source", "target"),
    [
        ("dominotree__a", "import data", "data"),
        ("dominotree__tree__a", "from data.prompts import read", "data"),
        ("data__a", "def f():\n    import infer.generate as g", "infer"),
        ("data__a", "if True:\n    from train import loop", "train"),
        ("train__a", "from infer.report import table", "infer"),
        ("infer__a", "class C:\n    def f(self):\n        import train.loop", "train"),
        ("infer__a", "import importlib\nimportlib.import_module('train.loop')", "train"),
        ("dominotree__a", "from importlib import import_module\nimport_module('infer')", "infer"),
        ("dominotree__a", "import tests.conftest", "tests"),
    ],
)
def test_an_import_against_the_arrows_is_caught(tmp_path: Path, module: str, source: str, target: str) -> None:
    root = _tree(tmp_path, **{module: source})
    assert forbidden_imports(root) == [f"{module.replace('__', '/')}.py -> {target}"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("train__a", "import data.prompts\nfrom dominotree.draft import head"),
        ("infer__a", "from dominotree import load\nfrom data.smollm2 import smollm2_path\nfrom . import b"),
        ("data__a", "from dominotree.errors import UserError\nimport datasets"),
        ("dominotree__tree__a", "from ..data import x\nfrom . import train\nfrom .infer import y\nimport dataclasses"),
    ],
)
def test_an_import_along_the_arrows_passes(tmp_path: Path, module: str, source: str) -> None:
    assert forbidden_imports(_tree(tmp_path, **{module: source})) == []


def test_no_module_hides_a_real_package() -> None:
    assert hiding_modules(ROOT) == []


def test_no_command_of_infer_is_launched_by_its_path() -> None:
    texts = [ROOT / "README.md", *(ROOT / "infer").glob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    by_path = re.compile(r"(?:python|accelerate launch)\b[^\n`]*\binfer/\w+\.py")
    assert [path.name for path in texts if by_path.search(path.read_text(encoding="utf-8"))] == []


HIDING = [
    "data__data",
    "data__datasets",
    "data__huggingface_hub",
    "train__train",
    "train__logging",
    "train__evaluate",
    "train__hydra",
    "infer__torch",
    "infer__gguf",
    "infer__yaml",
    "infer__statistics",
]


@pytest.mark.parametrize("name", HIDING)
def test_a_hiding_module_is_caught(tmp_path: Path, name: str) -> None:
    assert hiding_modules(_tree(tmp_path, **{name: ""})) == [f"{name.replace('__', '/')}.py"]


def test_a_hiding_folder_is_caught(tmp_path: Path) -> None:
    assert hiding_modules(_tree(tmp_path, data__tokenizers__a="")) == ["data/tokenizers"]


@pytest.mark.parametrize("name", ["data__prompts", "train__main", "train__loop", "infer__generate", "infer__report"])
def test_the_names_in_use_pass(tmp_path: Path, name: str) -> None:
    assert hiding_modules(_tree(tmp_path, **{name: ""})) == []


@pytest.mark.parametrize("folder", ["tests", "conf"])
def test_a_folder_that_is_no_package_has_no_init(folder: str) -> None:
    assert list((ROOT / folder).rglob("__init__.py")) == []
