"""The target: features and logits are transformers' own, trees included; what cannot be rolled back is refused."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, READY_METHODS, SIZES, make_draft, make_target, small_draft
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from dominotree.decode.cache import TargetCache
from dominotree.decode.loop import decode
from dominotree.decode.methods import make_method
from dominotree.draft.checkpoint import save_draft
from dominotree.errors import UserError
from dominotree.target import Target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]  # longer than every window of FAMILIES
# A root and five nodes: 0 and 1 its children, 2 under 0, 3 under 1, 4 under 2.
TREE_PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
TREE_TOKENS = [7, 0, 9, 11, 0, 2]


def tree_window(batch: int = 1) -> tuple[Tensor, Tensor]:
    """Depths [B, 6] and visibility [B, 6, 6] of the tree above."""
    visible = torch.zeros(6, 6, dtype=torch.bool)
    for row, path in enumerate(TREE_PATHS):
        visible[row, path] = True
    depths = torch.tensor([len(path) - 1 for path in TREE_PATHS])
    return depths.expand(batch, -1), visible.expand(batch, -1, -1)


def plain(target: Target, token_ids: list[int]) -> Any:
    """Transformers' own forward, without cache or mask of ours."""
    with torch.no_grad():
        return target.model(input_ids=torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)


def tree_logits(target: Target) -> tuple[Tensor, Tensor]:  # [6, V] each
    """Logits after every tree node: verified at once, and each path as plain text."""
    cache = TargetCache(reserve=8)
    target.forward(torch.tensor([PROMPT]), cache)
    depths, visible = tree_window()
    output = target.forward(torch.tensor([TREE_TOKENS]), cache, positions=depths + len(PROMPT), visible=visible)
    texts = [PROMPT + [TREE_TOKENS[row] for row in path] for path in TREE_PATHS]
    return output.logits[0], torch.stack([plain(target, text).logits[0, -1] for text in texts])


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_hidden_states_after_each_layer(family: str) -> None:
    target = make_target(family)
    output = target.forward(torch.tensor([PROMPT]), TargetCache(16), layer_ids=range(4))
    expected = plain(target, PROMPT)
    assert output.features is not None
    for layer, features in enumerate(output.features.chunk(4, dim=-1)):
        # The one after the last layer is post-norm there.
        torch.testing.assert_close(features, expected.hidden_states[layer + 1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_threads_that_share_a_target_get_their_own_features() -> None:
    target = make_target()
    prompts = [torch.arange(2, 3 + length)[None] for length in range(1, 9)]
    expected = [target.features(ids, (0, 1)) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda ids: target.features(ids, (0, 1)), prompts * 25))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected * 25, strict=True))


def test_features_come_in_the_order_asked_for_and_from_those_layers_only() -> None:
    target = make_target()
    states = plain(target, PROMPT).hidden_states
    output = target.forward(torch.tensor([PROMPT]), TargetCache(16), layer_ids=(3, 0))
    assert output.features is not None
    torch.testing.assert_close(output.features, torch.cat([states[4], states[1]], dim=-1), rtol=1e-5, atol=1e-5)
    assert target.forward(torch.tensor([PROMPT]), TargetCache(16)).features is None


def test_no_hook_outlives_its_forward() -> None:
    target = make_target()
    target.forward(torch.tensor([PROMPT]), TargetCache(16), layer_ids=(0, 3))
    with pytest.raises(IndexError):
        target.forward(torch.tensor([[99]]), TargetCache(16), layer_ids=(0, 3))  # outside the vocabulary
    assert not any(module._forward_hooks for module in target.model.modules())


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tree_node_sees_its_own_path_only(family: str, eager: bool) -> None:
    target = make_target(family)
    if eager:
        target.model.set_attn_implementation("eager")
    verified, expected = tree_logits(target)
    assert (expected[0] - expected[1]).abs().max() > 0.1
    torch.testing.assert_close(verified, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_behind_a_history_is_plain_text(family: str) -> None:
    """Without a mask of ours: transformers' own causal one, over a cache that keeps every position."""
    target, text = make_target(family), PROMPT + TREE_TOKENS
    cache = TargetCache(reserve=4)
    target.forward(torch.tensor([PROMPT]), cache)
    output = target.forward(torch.tensor([TREE_TOKENS]), cache, layer_ids=(3, 1))
    expected = plain(target, text)
    torch.testing.assert_close(output.logits[0], expected.logits[0, len(PROMPT) :], rtol=1e-4, atol=1e-4)
    states = torch.cat([expected.hidden_states[4], expected.hidden_states[2]], dim=-1)
    assert output.features is not None
    torch.testing.assert_close(output.features[0], states[0, len(PROMPT) :], rtol=1e-4, atol=1e-4)


OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},  # eager, with attention sinks
    "cohere2": {"sliding_window": 6},
    "gpt_neo": {
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 6,
    },  # a window of its own making
    "bloom": {"n_layer": 4, "n_head": 4},  # positions enter by the mask
    "falcon": {"alibi": True},  # likewise
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_architecture_is_served_exactly_or_refused(name: str) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = AutoConfig.for_model(name, vocab_size=13, **(sizes | OTHERS[name]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 0.3)
    try:
        target = Target(model)
    except UserError as error:
        assert name in str(error) or type(model).__name__ in str(error)
    else:
        torch.testing.assert_close(*tree_logits(target), rtol=1e-4, atol=1e-4)


def test_sequences_of_a_batch_have_trees_of_their_own() -> None:
    target = make_target()
    prompts, tokens = torch.tensor([PROMPT, PROMPT[::-1]]), torch.tensor([TREE_TOKENS, [1, 2, 3, 4, 5, 6]])
    depths, visible = tree_window(batch=2)
    visible = visible.clone()
    visible[1] = torch.ones(6, 6).tril().bool()
    depths = torch.stack([depths[0], torch.arange(6)])
    cache = TargetCache(16)
    target.forward(prompts, cache)
    both = target.forward(tokens, cache, positions=depths + 12, visible=visible, layer_ids=(1,))
    for row in range(2):
        alone, one = TargetCache(16), slice(row, row + 1)
        target.forward(prompts[one], alone)
        single = target.forward(tokens[one], alone, positions=depths[one] + 12, visible=visible[one], layer_ids=(1,))
        torch.testing.assert_close(both.logits[one], single.logits, rtol=1e-4, atol=1e-4)
        assert both.features is not None and single.features is not None
        torch.testing.assert_close(both.features[one], single.features, rtol=1e-4, atol=1e-4)


def test_only_the_last_logits_are_computed_on_request() -> None:
    target = make_target()
    output = target.forward(torch.tensor([PROMPT]), TargetCache(16), last_only=True)
    assert output.logits.shape == (1, 1, 13)
    expected = plain(target, PROMPT).logits[0, -1]
    torch.testing.assert_close(output.logits[0, 0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.logits_at(PROMPT), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_lm_head_are_the_target_s_own(tied: bool) -> None:
    target = make_target(tied=tied)
    weights = target.model.state_dict()
    table, rows = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    assert torch.equal(table, rows) is tied
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(target.lm_head(hidden), hidden @ rows.T, rtol=1e-5, atol=1e-5)
    assert torch.equal(target.embed(torch.tensor([[3, 12]])), table[[3, 12]][None])


def test_gemma_s_embeddings_keep_their_scale() -> None:
    target = make_target("gemma")
    states = plain(target, PROMPT).hidden_states
    torch.testing.assert_close(target.embed(torch.tensor([PROMPT])), states[0], rtol=1e-5, atol=1e-5)


def test_sizes_are_the_model_s() -> None:
    target = make_target(vocab_size=17)
    assert (target.hidden_size, target.vocab_size, target.num_layers, target.context_length) == (32, 17, 4, 256)
    assert target.dtype == torch.float32 and target.device.type == "cpu"
    assert not target.model.training and not any(weight.requires_grad for weight in target.model.parameters())


# End tokens


def word_tokenizer(size: int = 13, **special: str | None) -> PreTrainedTokenizerFast:
    """Words `t0`, `t1`, ..."""
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.mark.parametrize(
    ("configured", "eos", "expected"),
    [
        (None, None, set()),
        (4, None, {4}),
        ([4, 7], None, {4, 7}),
        (None, "t9", {9}),
        ([4, 7], "t9", {4, 7, 9}),
        (0, "t0", {0}),
    ],
)
def test_end_tokens_are_those_of_generation_config_and_tokenizer(
    configured: int | list[int] | None, eos: str | None, expected: set[int]
) -> None:
    model = make_target().model
    model.generation_config.eos_token_id = configured
    assert Target(model, word_tokenizer(eos_token=eos)).end_token_ids == expected


def test_without_a_tokenizer_the_generation_config_says_what_ends() -> None:
    model = make_target().model
    model.generation_config.eos_token_id = [2, 3]
    assert Target(model).end_token_ids == {2, 3}


# Loading


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    target = make_target()
    target.model.generation_config.eos_token_id = [4, 7]
    target.model.save_pretrained(tmp_path / "target")
    word_tokenizer(eos_token="t9").save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def refusal(path: str | Path, **options: Any) -> str:
    """The one line that refuses to load `path`, with `PATH` for the path itself."""
    with pytest.raises(UserError) as caught:
        Target.load(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(path), "PATH")


def test_a_saved_target_is_loaded_with_its_tokenizer(saved: Path) -> None:
    target = Target.load(saved)
    assert target.tokenizer is not None and target.tokenizer("t3 t11").input_ids == [3, 11]
    assert target.end_token_ids == {4, 7, 9}
    assert torch.equal(plain(target, PROMPT).logits, plain(make_target(), PROMPT).logits)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_a_target_keeps_its_dtype_unless_another_is_asked_for(saved: Path, tmp_path: Path, name: str) -> None:
    asked = Target.load(saved, dtype=name)
    assert asked.dtype == getattr(torch, name)
    asked.model.save_pretrained(tmp_path / "cast")
    word_tokenizer().save_pretrained(tmp_path / "cast")
    assert Target.load(tmp_path / "cast").dtype == getattr(torch, name)


def test_unknown_formats_and_devices_are_named(saved: Path) -> None:
    assert "int4" in refusal(saved, dtype="int4")
    assert "abacus" in refusal(saved, device="abacus")
    assert "cuda:99" in refusal(saved, device="cuda:99")


def test_a_path_that_holds_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    for path in ("empty", "file", "nothing"):
        assert "PATH" in refusal(tmp_path / path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "no_such_model"}'])
def test_a_configuration_that_cannot_be_read_is_refused(saved: Path, content: str) -> None:
    (saved / "config.json").write_text(content)
    assert "PATH" in refusal(saved)


def test_weights_that_are_missing_are_refused(saved: Path) -> None:
    """Transformers would fill them in at random and only print a report."""
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    message = refusal(saved)
    assert "PATH" in message and "layers.1.mlp.up_proj" in message


def test_a_drafter_given_as_the_target_is_refused(tmp_path: Path) -> None:
    """It says it is a Qwen3, and has neither embeddings nor LM head."""
    save_draft(small_draft(), tmp_path / "draft")
    word_tokenizer().save_pretrained(tmp_path / "draft")
    assert "PATH" in refusal(tmp_path / "draft")


def test_weights_of_another_shape_are_refused(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    assert "PATH" in refusal(saved)


def test_weights_cut_short_are_refused(saved: Path) -> None:
    file = saved / "model.safetensors"
    for size in (file.stat().st_size - 100, 0):
        os.truncate(file, size)
        assert "PATH" in refusal(saved)
    file.unlink()
    assert "PATH" in refusal(saved)


# Refusals


STATEFUL: dict[str, dict[str, Any]] = {
    "mamba": {"num_hidden_layers": 2, "state_size": 4},
    "jamba": {"num_experts": 2, "mamba_d_state": 4},
    "qwen3_next": {"num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"lru_width": 32},
    "rwkv": {"attention_hidden_size": 32},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "lfm2": {"full_attn_idxs": [1]},
}


def stateful_config(name: str) -> PretrainedConfig:
    return AutoConfig.for_model(name, vocab_size=13, **(SIZES | STATEFUL[name]))


@pytest.mark.parametrize("name", ["mamba", "jamba", "rwkv"])
def test_a_recurrent_model_is_refused_by_name(name: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 13}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_offset": 1, "attn_layer_period": 2}
    experts = {"num_experts": 2, "pad_token_id": 0, "use_mamba_kernels": False, "mamba_d_state": 4}
    options = {"rwkv": {"attention_hidden_size": 32}, "jamba": attention | experts, "mamba": {"state_size": 4}}[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **options))
    with pytest.raises(UserError, match=f"{name}.*cannot be rolled back"):
        Target(model)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_recurrent_or_hybrid_checkpoint_is_refused_by_name_before_its_weights_are_read(
    tmp_path: Path, name: str
) -> None:
    stateful_config(name).save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert name in message and "cannot be rolled back" in message


def test_chunked_attention_is_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama4_text", layer_types=["chunked_attention", "full_attention"] * 2, **SIZES)
    config.save_pretrained(tmp_path)
    assert "chunked_attention" in refusal(tmp_path)


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    config = T5Config(vocab_size=13, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    with pytest.raises(UserError, match=r"t5.*(encoder-decoder|causal)"):
        Target(T5ForConditionalGeneration(config))
    config.save_pretrained(tmp_path)
    assert "t5" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["bart", "whisper", "vit", "clip"])
def test_what_is_no_decoder_only_language_model_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{name}"}}')
    assert name in refusal(tmp_path)


def test_a_model_that_is_no_causal_one_is_refused_whole() -> None:
    bidirectional = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bert", vocab_size=13, hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
    )
    with pytest.raises(UserError, match=r"(?i)bert"):
        Target(bidirectional)


def test_attention_that_ignores_tree_masks_is_refused() -> None:
    model = make_target().model
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UserError, match="flex_attention"):
        Target(model)


# Half precision


def lag(target: Target, prompt: list[int], token_ids: list[int]) -> float:
    """How far below the best logit, at worst, the generated tokens lie by the target's own plain forward."""
    logits = plain(target, prompt + token_ids).logits[0, len(prompt) - 1 : -1].float()
    return (logits.max(dim=-1).values - logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]).max().item()


HALVES = [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float32")]


@pytest.mark.parametrize(("target_dtype", "draft_dtype"), [*HALVES, ("float16", "bfloat16")])
@pytest.mark.parametrize("name", READY_METHODS)
def test_every_method_decodes_with_drafter_and_target_of_different_dtypes(
    name: str, target_dtype: str, draft_dtype: str
) -> None:
    whole = make_target()
    draft = make_draft(whole).to(getattr(torch, draft_dtype))
    target = Target(whole.model.to(getattr(torch, target_dtype)))
    produced = decode(target, draft, make_method(name), PROMPT, max_new_tokens=24).token_ids
    assert len(produced) == 24
    # Half precision may choose between near-ties only; float32 has none here, whatever the drafter's dtype.
    assert lag(target, PROMPT, produced) < (1e-4 if target_dtype == "float32" else 0.15)
