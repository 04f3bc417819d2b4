"""Training runs so small that an update takes milliseconds, in this process or launched as several."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny_chat import byte_tokenizer, save_tiny_models

from train.tracking import Tracker

REPO = Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PEOPLE = ["Ada", "Bob", "Cleo", "Dora", "Emil", "Finn", "Gus", "Hal", "Ida", "Jo", "Kim", "Lea"]


def make_home(folder: Path) -> Path:
    """Models, and a data directory of a dozen short conversations."""
    save_tiny_models(folder)
    byte_tokenizer(TEMPLATE).save_pretrained(folder / "target")
    (folder / "data").mkdir()
    with (folder / "data" / "conversations.jsonl").open("w", encoding="utf-8") as file:
        for index, name in enumerate(PEOPLE):
            messages = [
                {"role": "user", "content": f"Who is {name}?"},
                {"role": "assistant", "content": f"{name} is the {index}th friend of {PEOPLE[index - 1]}."},
            ]
            file.write(json.dumps({"id": index, "messages": messages, "source": "test"}) + "\n")
    return folder


def words(home: Path, output: Path, *more: str) -> list[str]:
    """A run of six updates of four samples; later words win."""
    given = [
        f"target={home / 'target'}",
        f"draft={home / 'dflash_draft'}",
        f"data_dir={home / 'data'}",
        f"output={output}",
        "head.gru_hidden_dim=12",
        "head.emb_dim=8",
        "max_length=80",
        "num_anchors=4",
        "optim.epochs=null",
        "optim.updates=6",
        "optim.batch_size=4",
        "optim.micro_batch_size=4",
        "optim.learning_rate=0.01",
        "checkpoint_every=3",
        "validation.every=6",
        "validation.samples=2",
        "validation.max_new_tokens=6",
        "device=cpu",
        *more,
    ]
    return list({word.partition("=")[0]: word for word in given}.values())


def records(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in records(output) if "loss" in record]


def stopping_at(last: int) -> Callable[[Tracker, int, dict[str, float]], None]:
    """In the place of `Tracker.log`: Ctrl-C once update `last` is done."""
    log = Tracker.log

    def stop(self: Tracker, update: int, record: dict[str, float]) -> None:
        if update == last:
            raise KeyboardInterrupt
        log(self, update, record)

    return stop


def launch(config: str, run: Sequence[str], *options: str, processes: int = 2, port: int = 0) -> subprocess.Popen[str]:
    """`accelerate launch` of the trainer with a file of conf/accelerate, on CPUs; both streams end in its stdout."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", str(REPO / "conf" / "accelerate" / f"{config}.yaml")]
    command += ["--num_processes", str(processes), "--main_process_port", str(port or free_port()), *options]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPO)}
    return subprocess.Popen(
        [*command, str(REPO / "train" / "main.py"), *run],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 300) -> str:
    """What it printed. Fails unless it ended well."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output[-3000:]
    return output


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
