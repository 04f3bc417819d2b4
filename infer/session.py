"""Answering what the settings ask for: prompts one after the other, or a chat."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data.prompts import Prompt, read_prompts, read_standard_input, text_prompt
from dominotree.chat import encode_chat, encode_raw
from dominotree.decode.loop import check_request, decode
from dominotree.decode.methods import Method, make_method
from dominotree.decode.sampling import GREEDY_BELOW, Sampling
from dominotree.errors import UserError
from dominotree.target import Target
from infer.answer import Answer, Answerer
from infer.compare import Comparison, compare
from infer.config import GenerateConfig
from infer.console import Console
from infer.models import check_loading, load_models
from infer.records import RecordWriter
from infer.summary import Total, describe

QUIT = "/quit"
INTERRUPTED_CODE = 130
WARM_UP_TOKENS = 4


@dataclass
class Conversation:
    """Messages so far; `raw` joins their contents as they are instead of applying the chat template."""

    raw: bool
    messages: list[dict[str, str]] = field(default_factory=list)

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def encode(self, target: Target) -> list[int]:
        assert target.tokenizer is not None
        if self.raw:
            return encode_raw(target.tokenizer, "".join(message["content"] for message in self.messages))
        return encode_chat(target.tokenizer, self.messages)


@dataclass(frozen=True)
class Request:
    """The settings with everything that can be read and checked before a model is loaded."""

    config: GenerateConfig
    method: Method
    sampling: Sampling
    prompts: list[Prompt]
    records: RecordWriter | None

    @classmethod
    def prepare(cls, config: GenerateConfig) -> Request:
        """Raises UserError for whatever is wrong with the settings, the prompts or the output file."""
        method = make_method(config.method.name, **config.method.options)
        sampling = Sampling(config.temperature, config.top_k, config.top_p, config.seed)
        check_loading(config.draft, method, config.dtype, config.device)
        records = None if config.output is None else RecordWriter(config.output)
        request = cls(config, method, sampling, _read(config), records)
        for prompt in request.prompts:
            request.open(prompt)
        return request

    def open(self, prompt: Prompt | None = None) -> Conversation:
        """The conversation before the first turn: the system text, then the prompt's own history."""
        history = [] if prompt is None else [dict(message) for message in prompt.history]
        source = "" if prompt is None else f"{prompt.source}: "
        if self.config.raw and history:
            raise UserError(f"{source}messages need the chat template, which raw=true turns off")
        if self.config.system is not None:
            if history and history[0]["role"] == "system":
                raise UserError(f"{source}its messages begin with a system text already; drop system=")
            history.insert(0, {"role": "system", "content": self.config.system})
        return Conversation(self.config.raw, history)


class Session:
    """Loaded models and one request. `run` and `chat` return the exit code: 0, or 130 after Ctrl-C."""

    def __init__(self, request: Request, answerer: Answerer, console: Console, notes: Sequence[str] = ()) -> None:
        self._request = request
        self._notes = notes
        self._answerer = answerer
        self._console = console
        self._total, self._plain_total, self._answers, self._identical = Total(), Total(), 0, 0

    @classmethod
    def load(cls, request: Request, console: Console) -> Session:
        config = request.config
        target, draft = load_models(
            config.target,
            config.draft,
            request.method,
            dtype=config.effective_dtype,
            device=config.device,
            console=console,
        )
        answerer = Answerer(target, draft, request.sampling, config.max_new_tokens, config.stop)
        return cls(request, answerer, console, request.method.notes(target, draft) if draft else ())

    def run(self) -> int:
        """Answer every prompt; the first turn of each is checked before any is answered."""
        prompts = self._request.prompts
        first_ids = [self._checked_ids(prompt) for prompt in prompts]
        for line in self._notes:
            self._console.note(line)
        if self._request.config.compare:
            self._warm_up(first_ids[0])
        with self._console.counting(len(prompts)) as advance:
            for index, prompt in enumerate(prompts):
                if len(prompts) > 1:
                    self._console.heading(index + 1, len(prompts), prompt.turns[0])
                if not self._answer_prompt(index, prompt):
                    return INTERRUPTED_CODE
                advance()
        if len(prompts) > 1:
            self._console.note(self._summary(len(prompts)))
        return 0

    def chat(self) -> int:
        """Answer turn after turn until /quit or the end of the input."""
        for line in self._notes:
            self._console.note(line)
        self._console.note(f"chat: a line is a turn; {QUIT} or the end of the input ends it")
        conversation = self._request.open()
        turn = 0
        text = self._request.prompts[0].turns[0] if self._request.prompts else self._console.ask()
        while text is not None and text.strip() != QUIT:
            if text.strip():
                if not self._answer_turn(conversation, text_prompt(text, "chat").turns[0], 0, turn):
                    return INTERRUPTED_CODE
                turn += 1
            text = self._console.ask()
        return 0

    def _checked_ids(self, prompt: Prompt) -> list[int]:
        conversation = self._request.open(prompt)
        conversation.add("user", prompt.turns[0])
        try:
            prompt_ids = conversation.encode(self._answerer.target)
            self._check_length(prompt_ids)
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}" if len(self._request.prompts) > 1 else str(error)) from error
        return prompt_ids

    def _check_length(self, prompt_ids: list[int]) -> None:
        answerer = self._answerer
        check_request(answerer.target, answerer.draft, self._request.method, len(prompt_ids), answerer.max_new_tokens)

    def _warm_up(self, prompt_ids: list[int]) -> None:
        """A few tokens by either method first, so that neither pays alone for what only a first call costs."""
        answerer = self._answerer
        for method in (make_method("ar"), self._request.method):
            tokens = min(WARM_UP_TOKENS, answerer.max_new_tokens)
            decode(answerer.target, answerer.draft, method, prompt_ids, max_new_tokens=tokens)

    def _answer_prompt(self, index: int, prompt: Prompt) -> bool:
        conversation = self._request.open(prompt)
        for turn, text in enumerate(prompt.turns):
            if turn:
                self._console.write(f"\n> {text}\n")
            if not self._answer_turn(conversation, text, index, turn):
                return False
        return True

    def _answer_turn(self, conversation: Conversation, text: str, index: int, turn: int) -> bool:
        """Answer one user turn, show it and record it; False after Ctrl-C."""
        conversation.add("user", text)
        prompt_ids = conversation.encode(self._answerer.target)
        self._check_length(prompt_ids)
        seed = answer_seed(self._request.sampling.seed, index, turn)
        answer, comparison = self._decode(prompt_ids, seed)
        self._console.write("\n")
        conversation.add("assistant", answer.generation.text)
        if self._request.records is not None:
            record = _record(text, answer, comparison) | {"prompt_index": index, "turn": turn, "seed": seed}
            self._request.records.write(record)
        self._report(answer, comparison)
        return not answer.interrupted

    def _decode(self, prompt_ids: list[int], seed: int) -> tuple[Answer, Comparison | None]:
        """The answer, streamed; under compare=true plain decoding comes first, and is shown itself when interrupted."""
        method, write = self._request.method, self._console.write
        if not self._request.config.compare:
            return self._answerer.stream(method, prompt_ids, seed, write), None
        plain = self._answerer.stream(make_method("ar"), prompt_ids, seed, lambda piece: None)
        if plain.interrupted:
            write(plain.generation.text)
            return plain, None
        answer = self._answerer.stream(method, prompt_ids, seed, write)
        if answer.interrupted:
            return answer, None
        greedy = self._request.sampling.temperature < GREEDY_BELOW
        return answer, compare(self._answerer.target, prompt_ids, plain.generation, answer.generation, greedy=greedy)

    def _report(self, answer: Answer, comparison: Comparison | None) -> None:
        self._console.note(describe(answer, self._answerer.target.device))
        self._total.add(answer.generation)
        self._answers += 1
        if comparison is not None:
            self._plain_total.add(comparison.plain)
            self._identical += comparison.identical is True
            for line in comparison.lines():
                self._console.note(line)

    def _summary(self, prompts: int) -> str:
        total, plain = self._total, self._plain_total
        line = f"all {prompts} prompts: τ {total.acceptance_length:.2f}, {total.tokens_per_second:.1f} tokens/s"
        if plain.tokens_per_second:
            line += f", {total.tokens_per_second / plain.tokens_per_second:.2f} times plain decoding's speed"
            line += f", tokens identical in {self._identical} of {self._answers} answers"
        return line


def answer_seed(seed: int, index: int, turn: int) -> int:
    """The seed of one answer: `seed` itself for the first, for others one of their own that follows from it."""
    if index == turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _read(config: GenerateConfig) -> list[Prompt]:
    if config.prompt_file is not None:
        return read_prompts(config.prompt_file)
    if config.prompt is None:
        return []
    return [
        text_prompt(read_standard_input(), "standard input") if config.prompt == "-" else text_prompt(config.prompt)
    ]


def _record(text: str, answer: Answer, comparison: Comparison | None) -> dict[str, Any]:
    generation = answer.generation
    record = {
        "prompt": text,
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "method": generation.method,
        "acceptance_length": generation.acceptance_length,
        "accepted_lengths": generation.accepted_lengths,
        "tree_sizes": generation.tree_sizes,
        "seconds": generation.seconds,
        "tokens_per_second": generation.tokens_per_second,
        "first_token_seconds": answer.first_token_seconds,
    }
    return record if comparison is None else {**record, "compare": comparison.record()}
