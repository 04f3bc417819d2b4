"""The settings of `python -m infer.generate`, checked as they are made: before torch is imported or a model is read."""

from __future__ import annotations

from dataclasses import dataclass

from data.models import DraftChoice, TargetChoice
from dominotree.checked import at_least
from dominotree.decode.stopping import check_stop_strings
from dominotree.errors import UserError


@dataclass(frozen=True)
class MethodConfig:
    """A decoding method by name with the options it has; None stands for those that it has not."""

    name: str
    node_budget: int | None = None
    candidate_width: int | None = None
    node_topk: int | None = None
    width: int | None = None
    draft_temperature: float | None = None
    depth_term: float | None = None
    builder: str | None = None
    input_table: bool | None = None
    cap: int | None = None
    profile: str | None = None
    calibration: str | None = None

    @property
    def options(self) -> dict[str, int | float | str]:
        return {name: value for name, value in vars(self).items() if name != "name" and value is not None}


@dataclass(frozen=True)
class GenerateConfig:
    """Everything `conf/generate.yaml` holds; that file explains the keys."""

    target: TargetChoice
    draft: DraftChoice
    method: MethodConfig
    prompt: str | None
    prompt_file: str | None
    chat: bool
    raw: bool
    system: str | None
    max_new_tokens: int
    stop: tuple[str, ...]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    dtype: str
    device: str
    output: str | None
    compare: bool
    debug: bool

    def __post_init__(self) -> None:
        self._check_prompt()
        self._check_combinations()
        at_least("max_new_tokens", self.max_new_tokens, 0)
        check_stop_strings(self.stop)
        for name, texts in (("system", [self.system]), ("stop", self.stop)):
            for text in texts:
                _check_unicode(name, text or "")

    @property
    def effective_dtype(self) -> str:
        return self.target.effective_dtype(self.dtype)

    def _check_prompt(self) -> None:
        if self.prompt == "":
            raise UserError("the prompt is empty, got prompt=''; give at least one character")
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("give prompt= or prompt_file=, not both")
        if self.prompt is None and self.prompt_file is None and not self.chat:
            raise UserError(
                'there is no prompt: give prompt="…" (prompt=- reads standard input), prompt_file=FILE, or chat=true'
            )

    def _check_combinations(self) -> None:
        if self.chat and (self.prompt_file is not None or self.prompt == "-"):
            raise UserError(
                "chat=true reads its turns from standard input, so it goes with neither prompt_file= nor prompt=-"
            )
        if self.chat and self.compare:
            raise UserError("compare=true does not go with chat=true; compare on prompt= or prompt_file=")
        if self.raw and (self.chat or self.system is not None):
            raise UserError("raw=true applies no chat template, so it goes with neither chat=true nor system=")
        if self.compare and self.method.name == "ar":
            raise UserError("compare=true compares a method with plain decoding, and method=ar is plain decoding")
        if self.output == "":
            raise UserError("output= needs a file name, got none")


def _check_unicode(key: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{key} is not valid Unicode text: {error.reason} at character {error.start}") from error
