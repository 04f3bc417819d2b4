"""A target of a few hundred thousand parameters, trained in a minute on text every machine has: Python's own library.

    python -m train.tiny_target runs/tiny/target

Writes a model directory with a tokenizer, and beside it `prompts.jsonl`: beginnings of held-out sources to go on from.
It exists so that the whole way from data to a drafter can be tried, and tested, on any CPU.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dominotree.command import reporting
from dominotree.errors import UserError

VOCAB_SIZE, END, MASK = 1024, "<|end|>", "<|mask|>"
SEQUENCE, BATCH, UPDATES, LEARNING_RATE, WARM_UP = 128, 16, 350, 4e-3, 30
PROMPTS, PROMPT_CHARACTERS = 1200, 160
# A document is a user's beginning and the model's continuation, with nothing in between.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def library_sources() -> list[str]:
    """Top-level modules of the standard library, in order of name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))]


def train_tokenizer(sources: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with an end, a mask and the chat template of plain continuation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, mask_token=MASK, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def train_model(model: Qwen3ForCausalLM, stream: Tensor) -> None:  # stream [T] token ids
    """Plain next-token training on random windows, one-cycle learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=UPDATES, pct_start=WARM_UP / UPDATES
    )
    generator = torch.Generator().manual_seed(0)
    console = Console(stderr=True)
    for _ in track(range(UPDATES), "training the tiny target", console=console, disable=not console.is_terminal):
        starts = torch.randint(len(stream) - SEQUENCE - 1, (BATCH,), generator=generator)
        windows = torch.stack([stream[start : start + SEQUENCE] for start in starts])
        loss = model(input_ids=windows, labels=windows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print(f"tiny target: last loss {loss.item():.3f}", file=sys.stderr)


def write_prompts(sources: list[str], path: Path) -> None:
    """Beginnings at random lines of the sources, one JSON object a line."""
    generator = torch.Generator().manual_seed(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(PROMPTS):
            source = sources[int(torch.randint(len(sources), (1,), generator=generator))]
            lines = source.splitlines(keepends=True)
            first = int(torch.randint(max(1, len(lines) - 8), (1,), generator=generator))
            text = "".join(lines[first:])[:PROMPT_CHARACTERS]
            if text.strip():
                file.write(json.dumps({"prompt": text}) + "\n")


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        raise UserError(f"give one argument, the directory to write the tiny target to; got {len(argv)}")
    output = Path(argv[0])
    sources = library_sources()
    tokenizer = train_tokenizer(sources)
    end = tokenizer.eos_token_id
    stream = torch.tensor([token for source in sources for token in [*tokenizer(source)["input_ids"], end]])
    model = make_model()
    train_model(model, stream)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    write_prompts(sources, output / "prompts.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(reporting(lambda: main(sys.argv[1:])))
