"""Where training figures go: always a local JSONL file and one progress bar, Weights & Biases where asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.tracking import TrackingConfig, start_wandb

from .validation import ValidationFigures

LINES_OFF_TERMINAL = 100  # of progress, over a whole run


class Tracker:
    """The main process's tracker; the others' do nothing (`active` False)."""

    def __init__(self, config: TrackingConfig, output: Path, provenance: dict[str, Any], *, active: bool) -> None:
        self._config = config
        self._active = active
        self._output = output
        self._provenance = provenance
        self._file = output / "metrics.jsonl"
        self._console = Console(stderr=True)
        self._run: Any = None
        self._tau = ""

    def start(self, update: int) -> None:
        """Go on after `update`: figures of later updates, which will come again, are taken back."""
        if not self._active:
            return
        self._output.mkdir(parents=True, exist_ok=True)
        lines = self._file.read_bytes().splitlines(keepends=True) if self._file.exists() else []
        kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["update"] <= update]
        self._file.write_bytes(b"".join(kept))
        self._run = start_wandb(self._config, self._output, self._provenance)

    def log(self, update: int, record: dict[str, float]) -> None:
        self._write({"update": update} | record)
        if self._run is not None:
            self._run.log({f"train/{name}": value for name, value in record.items()}, step=update)

    def log_validation(self, update: int, figures: ValidationFigures, held_out: dict[str, float]) -> None:
        self._write({"update": update} | figures.flat() | held_out)
        if not self._active:
            return
        self._tau = f"  τ {figures.score:.2f}"
        taus = ", ".join(f"{name} {value:.3f}" for name, value in figures.acceptance_length.items())
        loss = f"held-out loss {held_out['held_out/final_loss']:.3f}"
        self._console.print(f"update {update}: τ by decoding: {taus}; {loss}", highlight=False, soft_wrap=True)
        if self._run is not None:
            import wandb

            table = wandb.Table(columns=["prompt", "continuation"], data=[list(pair) for pair in figures.texts])
            picture = wandb.Image(plot_acceptance(figures, self._output / "acceptance.png"))
            extra = {"samples": table, "acceptance_by_position": picture}
            self._run.log(
                {f"validation/{name}": value for name, value in (figures.flat() | held_out | extra).items()},
                step=update,
            )

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[Callable[[dict[str, float]], None]]:
        """A bar with the figures that matter; yields what advances it by one update. Off a terminal, a line now and
        then."""
        columns = (
            TextColumn("[progress.description]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        visible = self._active and self._console.is_terminal
        with Progress(*columns, console=self._console, disable=not visible) as bar:
            task = bar.add_task("training", total=total, completed=done)

            def advance(record: dict[str, float]) -> None:
                shown = (
                    f"loss {record['loss']:.3f}  base {record['base_loss']:.3f}  λ {record['lambda']:.2f}  "
                    f"lr {record['learning_rate']:.1e}  grad {record['gradient_norm']:.2f}  "
                    f"{record['tokens_per_second']:.0f} tok/s{self._tau}"
                )
                bar.update(task, advance=1, description=shown)
                update = int(bar.tasks[0].completed)
                if self._active and not visible and update % max(1, total // LINES_OFF_TERMINAL) == 0:
                    self._console.print(f"update {update} of {total}: {shown}", highlight=False, soft_wrap=True)

            yield advance

    def close(self, *, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))

    def _write(self, record: dict[str, Any]) -> None:
        if self._active:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def plot_acceptance(figures: ValidationFigures, path: Path) -> str:
    """Share of rounds in which the n-th drafted token was accepted, a line a method, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, shares in figures.acceptance_by_position.items():
        axes.plot(
            range(1, len(shares) + 1), shares, marker="o", label=f"{name} (τ {figures.acceptance_length[name]:.2f})"
        )
    axes.set(xlabel="position in the draft", ylabel="share of rounds accepted", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)
