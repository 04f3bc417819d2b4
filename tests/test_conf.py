"""Every config file composes into its command's dataclass, and says what it is meant to say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dominotree.command import CONF, compose_config, help_text
from dominotree.decode.methods import METHODS, make_method
from dominotree.errors import UserError
from infer.config import GenerateConfig
from infer.generate import GENERATE

GROUPS = ("target", "draft", "method")
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def composed(*words: str) -> GenerateConfig:
    return compose_config(GENERATE, ["prompt=x", *words])


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group: str, option: str) -> None:
    words = [f"{group}={option}"] + ([f"{group}.path=some/where"] if option == "custom" else [])
    config = composed(*words)
    if option == "custom":
        assert getattr(config, group).path == "some/where"


def test_every_config_file_belongs_to_a_tested_place() -> None:
    files = {path.relative_to(CONF) for path in CONF.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert all(path.suffix == ".yaml" for path in files), "conf holds YAML only"
    options = {Path(group) / f"{option}.yaml" for group, option in OPTIONS}
    assert Path("generate.yaml") in files
    assert {path for path in files if path.parts[0] in GROUPS} == options


def test_the_default_is_smollm2_with_the_drafter_that_ships() -> None:
    config = composed()
    assert (config.target.source, config.effective_dtype) == ("smollm2", "float32")
    assert (config.draft.source, config.draft.path) == ("smollm2", None)
    assert config.method.name == "dominotree"


@pytest.mark.parametrize(
    ("draft", "path"),
    [
        ("qwen3_4b", "Huang2020/Qwen3-4B-Domino-b16"),
        ("qwen3_8b", "Huang2020/Qwen3-8B-Domino-b16"),
        ("qwen3_4b_dflash", "z-lab/Qwen3-4B-DFlash-b16"),
        ("qwen3_8b_dflash", "z-lab/Qwen3-8B-DFlash-b16"),
    ],
)
def test_the_released_drafters_have_their_hub_ids(draft: str, path: str) -> None:
    assert (composed(f"draft={draft}").draft.path, composed(f"draft={draft}").draft.shift_label) == (path, None)


def test_the_alignment_of_a_drafter_can_be_stated() -> None:
    assert composed("draft=a/b").draft.shift_label is None
    assert composed("draft=a/b", "draft.shift_label=true").draft.shift_label is True


def test_a_stated_dtype_wins_over_the_target_s() -> None:
    assert composed("dtype=bfloat16").effective_dtype == "bfloat16"


def test_every_method_has_its_file_with_its_own_options_and_defaults() -> None:
    assert {option for group, option in OPTIONS if group == "method"} == set(METHODS)
    for name in METHODS:
        config = composed(f"method={name}").method
        made = make_method(name)
        assert config.name == name
        assert make_method(name, **config.options) == made
        assert set(config.options) == {key for key in vars(made) if key != "name"}


def test_a_method_s_options_are_set_where_it_has_them() -> None:
    words = ["method.node_budget=4", "method.candidate_width=0", "method.node_topk=2"]
    set_options = {"node_budget": 4, "candidate_width": 0, "node_topk": 2}
    options = composed(*words).method.options
    assert options == {**make_method("dominotree").__dict__, **set_options}
    with pytest.raises(UserError, match="method=domino has no node_budget"):
        composed("method=domino", "method.node_budget=4")


@pytest.mark.parametrize("key", ["typo", "method.typo", "draft.typo", "target.typo"])
@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_misspelt_key_is_an_error(key: str, plus: str) -> None:
    with pytest.raises(UserError, match="typo"):
        composed(f"{plus}{key}=1")


def test_help_explains_every_key_and_option() -> None:
    text = help_text(GENERATE)
    for key in yaml.safe_load((CONF / "generate.yaml").read_text(encoding="utf-8")):
        assert key == "defaults" or f"  {key}: " in text
    for _, option in OPTIONS:
        assert f"\n  {option} " in text or f"\n  {option}\n" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no prompt: give prompt=.*prompt=- reads standard input.*prompt_file=FILE, or chat=true"),
        (["prompt="], "prompt is empty"),
        (["prompt=a", "prompt_file=b"], "not both"),
        (["chat=true", "prompt_file=b"], "chat=true"),
        (["chat=true", "prompt=-"], "chat=true"),
        (["chat=true", "compare=true"], "compare=true does not go with chat=true"),
        (["chat=true", "raw=true"], "raw=true applies no chat template"),
        (["prompt=a", "raw=true", "system=b"], "raw=true applies no chat template"),
        (["prompt=a", "compare=true", "method=ar"], "method=ar is plain decoding"),
        (["prompt=a", "max_new_tokens=-1"], "max_new_tokens must be at least 0, got -1"),
        (["prompt=a", 'stop=[""]'], "stop string must not be empty"),
        (["prompt=a", "output="], "output= needs a file name"),
        (["prompt=a", "system=\udcff"], "system is not valid Unicode"),
        (["prompt=a", "draft=fresh", "draft.block_size=1"], "draft.block_size must be at least 2, got 1"),
        (["prompt=a", "draft=fresh", "draft.num_layers=0"], "draft.num_layers must be at least 1, got 0"),
        (["prompt=a", "target.source=elsewhere"], "target.source must be one of smollm2, path, got elsewhere"),
        (["prompt=a", "target="], "target.path must be a directory or a hub id"),
    ],
)
def test_settings_that_contradict_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose_config(GENERATE, words)
