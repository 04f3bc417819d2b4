"""Answer prompts, streaming, with a draft tree in front of the target.

python -m infer.generate prompt="Why is the sky blue?"
python -m infer.generate prompt_file=questions.jsonl output=answers.jsonl method=domino
python -m infer.generate target=Qwen/Qwen3-4B draft=Huang2020/Qwen3-4B-Domino-b16 compare=true prompt=-
python -m infer.generate chat=true
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dominotree.command import Command, run_command
from dominotree.errors import UserError
from infer.config import GenerateConfig
from infer.console import Console

USAGE = """python -m infer.generate KEY=VALUE...

Answers prompts with a target model, drafting tokens ahead of it; the text streams to standard output, statistics go to
standard error. Text arrives exactly as the shell passes it, so quote it for the shell alone. A lone - is prompt=-."""

GENERATE = Command(
    name="generate",
    config=GenerateConfig,
    usage=USAGE,
    free_text=("prompt", "prompt_file", "system", "output"),
    string_lists=("stop",),
    models=("target", "draft"),
)


def generate(config: GenerateConfig) -> int:
    """Load, answer, and return the exit code."""
    console = Console()
    with console.loading() as step:
        step("starting")
        # Imported here: a mistake in the settings, or --help, need not wait for torch.
        import torch

        from data.models import quiet_libraries
        from infer.session import Request, Session
    if not config.debug:
        quiet_libraries()
    try:
        session = Session.load(Request.prepare(config), console)
        return session.chat() if config.chat else session.run()
    except torch.OutOfMemoryError as error:
        raise UserError(f"the device is out of memory: {str(error).splitlines()[0]}; try dtype=bfloat16") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv`, by default the process's own; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command(GENERATE, generate, ["prompt=-" if word == "-" else word for word in words])


if __name__ == "__main__":
    sys.exit(main())
