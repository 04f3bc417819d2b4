"""The library in two calls: `load` a target with its drafter, `generate` with a method."""

from __future__ import annotations

from collections.abc import Sequence

from .chat import encode_chat, encode_raw
from .decode.generation import Generation
from .decode.methods import make_method
from .decode.sampling import Sampling
from .decode.stream import TextGeneration
from .draft.checkpoint import check_fits, load_draft
from .draft.model import DraftModel
from .errors import UserError
from .target import Target

Messages = list[dict[str, str]]


def load(
    target: str,
    draft: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    shift_label: bool | None = None,
) -> tuple[Target, DraftModel | None]:
    """Load a target, and a drafter that is checked to fit it, from directories or hub ids.

    `dtype` (auto, float32, bfloat16, float16) and `device` (auto, cpu, cuda, cuda:N) hold for both.
    `shift_label` states the alignment of a Domino checkpoint that does not say it itself.
    Raises UserError naming the file, tensor or size at fault.
    """
    loaded = Target.load(target, dtype=dtype, device=device)
    if draft is None:
        return loaded, None
    drafter = load_draft(draft, dtype=dtype, device=loaded.device, shift_label=shift_label)
    check_fits(drafter, loaded)
    return loaded, drafter


def generate(
    target: Target,
    draft: DraftModel | None,
    prompt: str | Messages,
    *,
    method: str = "dominotree",
    raw: bool = False,
    system: str | None = None,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    **method_options: int,
) -> Generation:
    """Answer `prompt`, a user's text or a list of chat messages, losslessly by the named method.

    The target's chat template is applied unless `raw`. `stop` strings end the text before them. `method_options` are
    node_budget, candidate_width and node_topk where the method has them.
    Raises UserError for a request that cannot be served; nothing is generated then.
    """
    if target.tokenizer is None:
        raise UserError("generate needs the target's tokenizer, this target was made without one")
    chosen = make_method(method, **method_options)
    sampling = Sampling(temperature, top_k, top_p, seed)
    prompt_ids = encode_prompt(target, prompt, raw=raw, system=system)
    text = TextGeneration(
        target, draft, chosen, prompt_ids, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop
    )
    for _ in text:
        pass
    text.finish()
    return text.generation


def encode_prompt(target: Target, prompt: str | Messages, *, raw: bool = False, system: str | None = None) -> list[int]:
    """Token ids of a prompt: through the chat template with `system` in front, or the text as it is when `raw`."""
    assert target.tokenizer is not None
    if raw:
        if not isinstance(prompt, str) or system is not None:
            raise UserError("raw=true takes one text as it is: no chat messages and no system text")
        return encode_raw(target.tokenizer, prompt)
    if prompt in ("", []):
        raise UserError("the prompt is empty: give a text, or chat messages")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    opening = [] if system is None else [{"role": "system", "content": system}]
    return encode_chat(target.tokenizer, opening + messages)
