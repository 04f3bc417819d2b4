"""Every experiment and group file of the training commands composes into its command's checked settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from data.config import PrepareConfig
from data.prepare import PREPARE
from dominotree.command import CONF, compose_config
from dominotree.errors import UserError
from train.config import TrainConfig
from train.main import TRAIN

EXPERIMENTS = sorted(  # those of benchmarks are run by test_benchmark.py
    path.stem for path in (CONF / "experiment").glob("*.yaml") if not path.stem.startswith("bench_")
)
# Ablations change the recipe of a run on a backbone that the user names.
NEEDS_DRAFT = {"no_curriculum", "training_time_test", "hidden_only"}


def composed(name: str, draft: Path) -> TrainConfig | PrepareConfig:
    if name.endswith("_data"):
        return compose_config(PREPARE, [f"experiment={name}"])
    words = [f"experiment={name}"]
    if name in NEEDS_DRAFT:
        words.append(f"draft={draft}")
    if "data_dir" not in yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")):
        words.append("data_dir=runs/data")
    return compose_config(TRAIN, words)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_and_its_values_arrive(name: str, tmp_path: Path) -> None:
    settings = composed(name, tmp_path)
    given = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8"))
    for key, value in given.items():
        if key == "defaults":
            continue
        found = getattr(settings, key)
        for inner, expected in value.items() if isinstance(value, dict) else [(None, value)]:
            assert (found if inner is None else getattr(found, inner)) == expected


def test_an_experiment_gives_way_to_the_command_line() -> None:
    assert compose_config(TRAIN, ["experiment=tiny_backbone", "optim.updates=7"]).optim.updates == 7


@pytest.mark.parametrize("folder", ["qwen3_4b", "qwen3_8b"])
def test_the_published_recipe_is_the_papers(folder: str) -> None:
    settings = compose_config(TRAIN, [f"experiment={folder}_domino", "data_dir=runs/data"])
    optim = settings.optim
    assert (optim.learning_rate, optim.weight_decay, optim.clip_norm, optim.warmup_ratio) == (6e-4, 0.0, 1.0, 0.04)
    assert (optim.batch_size, optim.micro_batch_size, optim.schedule, optim.epochs) == (16, 2, "cosine", 3)
    assert (settings.num_anchors, settings.max_length, settings.decay_gamma) == (256, 3072, 7.0)
    assert (settings.lambda_start, settings.lambda_decay_ratio) == (1.0, 1.0)
    assert (settings.draft.block_size, settings.draft.num_layers) == (16, 5)
    assert (settings.head.gru_hidden_dim, settings.head.emb_dim) == (1024, 256)


def test_a_misspelt_key_is_an_error_wherever_it_stands() -> None:
    for word in ("+typo=1", "typo=1", "++optim.typo=1", "validation.typo=1", "experiment=nothing"):
        with pytest.raises(UserError, match=r"typo|nothing"):
            compose_config(TRAIN, ["data_dir=runs/data", word])
