"""The draft configuration: published layouts as they are, contradictions refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from conftest import small_config
from hypothesis import given, settings
from hypothesis import strategies as st

from dominotree.draft.config import DraftConfig, HeadConfig, build_target_layer_ids
from dominotree.draft.layout import parse_config, render_config

# As published: the Domino drafter of Qwen3-8B, and z-lab's DFlash drafter of Qwen3-4B.
DOMINO_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "dflash_config": {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "shift_label": True,
    },
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DFLASH_4B: dict[str, Any] = DOMINO_8B | {
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "max_window_layers": 5,
}


def changed(layout: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy with keys replaced, those of `dflash_config` where they are; None removes a key."""
    raw = copy.deepcopy(layout)
    for key, value in values.items():
        section = raw["dflash_config"] if key in SECTION_KEYS else raw
        section[key] = value
        if value is None:
            del section[key]
    return raw


SECTION_KEYS = {
    "mask_token_id",
    "target_layer_ids",
    "projector_type",
    "pure_draft_prefix_len",
    "emb_dim",
    "gru_hidden_dim",
    "shift_label",
    "causal_head",
    "is_causal",
    "use_bias_gate",
    "use_bias_norm",
}


def refusal(raw: dict[str, Any], **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        parse_config(raw, **options)
    return str(caught.value)


def test_the_published_domino_layout_is_read() -> None:
    config = parse_config(DOMINO_8B)
    assert config == DraftConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        shift_label=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000},
        head=HeadConfig(gru_hidden_dim=1024, emb_dim=256, pure_draft_prefix_len=1),
    )
    assert config.rms_norm_eps == 1e-6 and config.max_position_embeddings == 40960
    assert config.layer_types == ("full_attention",) * 5 and config.hidden_act == "silu"


def test_the_published_dflash_layout_is_same_position_and_headless() -> None:
    config = parse_config(DFLASH_4B)
    assert (config.hidden_size, config.intermediate_size, config.head) == (2560, 9728, None)
    assert config.shift_label is False
    assert config.draft_length == config.uncorrected_length == 15


@pytest.mark.parametrize(("shift_label", "length"), [(True, 16), (False, 15)])
def test_the_anchor_s_slot_drafts_only_with_shift_label(shift_label: bool, length: int) -> None:
    config = parse_config(changed(DOMINO_8B, shift_label=shift_label))
    assert config.shift_label is shift_label
    assert config.draft_length == length


def test_emb_dim_may_stand_at_the_top_level() -> None:
    raw = changed(DOMINO_8B, emb_dim=None) | {"emb_dim": 192}
    head = parse_config(raw).head
    assert head is not None and head.emb_dim == 192
    assert "emb_dim" in refusal(changed(DOMINO_8B, emb_dim=None))


def test_causal_v5_is_the_older_name_of_the_domino_projector() -> None:
    assert parse_config(changed(DOMINO_8B, projector_type="causal_v5")) == parse_config(DOMINO_8B)


def test_the_domino_architecture_name_is_read_alike() -> None:
    assert parse_config(changed(DOMINO_8B, architectures=["DominoDraftModel"])) == parse_config(DOMINO_8B)
    plain = DFLASH_4B | {"architectures": ["DominoDraftModel"]}
    assert "projector_type" in refusal(plain)


def test_target_layer_ids_default_to_the_published_formula() -> None:
    assert build_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert build_target_layer_ids(28, 5) == (1, 7, 13, 19, 25)
    assert build_target_layer_ids(36, 1) == (18,)
    assert parse_config(changed(DOMINO_8B, target_layer_ids=None)).target_layer_ids == (1, 9, 17, 25, 33)


@given(layers=st.integers(1, 80), count=st.integers(1, 9))
def test_default_layer_ids_are_distinct_ascending_layers_of_the_target(layers: int, count: int) -> None:
    ids = build_target_layer_ids(layers, count)
    assert list(ids) == sorted(set(ids))
    assert ids[0] >= 0 and ids[-1] < layers
    assert len(ids) == min(count, layers)


def test_rope_parameters_win_over_the_older_rope_theta() -> None:
    raw = DOMINO_8B | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 7.0}
    assert parse_config(raw).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_an_older_yarn_scaling_is_kept(key: str) -> None:
    scaling = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse_config(DOMINO_8B | {"rope_scaling": scaling}).rope_parameters == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 1000000,
    }


def test_a_missing_rotary_base_is_not_guessed() -> None:
    assert "rope_theta" in refusal(changed(DOMINO_8B, rope_theta=None))


def test_a_domino_checkpoint_without_alignment_is_refused_unless_it_is_given() -> None:
    silent = changed(DOMINO_8B, shift_label=None)
    assert "shift_label" in refusal(silent)
    assert parse_config(silent, shift_label=True).draft_length == 16
    assert parse_config(silent, shift_label=False).draft_length == 15


@pytest.mark.parametrize("own", [True, False])
def test_an_alignment_that_contradicts_the_checkpoint_is_refused(own: bool) -> None:
    raw = changed(DOMINO_8B, shift_label=own)
    assert parse_config(raw, shift_label=own).shift_label is own
    message = refusal(raw, shift_label=not own)
    assert f"shift_label={own}" in message and f"shift_label={not own}" in message


@pytest.mark.parametrize("stated", ["false", "true", 2, [True]])
def test_an_alignment_that_is_no_boolean_is_refused(stated: Any) -> None:
    message = refusal(changed(DOMINO_8B, shift_label=stated))
    assert "shift_label" in message and repr(stated) in message


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"mask_token_id": None}, ["mask_token_id"]),
        ({"mask_token_id": -1}, ["mask_token_id", "-1"]),
        ({"block_size": 1}, ["block_size", "1", "at least 2"]),
        ({"block_size": None}, ["block_size"]),
        ({"target_layer_ids": [1, 9, 36]}, ["target_layer_ids", "36", "[1, 9, 36]"]),
        ({"target_layer_ids": [-1, 9]}, ["target_layer_ids", "[-1, 9]"]),
        ({"use_bias_gate": True}, ["use_bias_gate"]),
        ({"use_bias_norm": True}, ["use_bias_norm"]),
        ({"projector_type": "mamba"}, ["projector_type", "mamba"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["architectures", "LlamaForCausalLM", "DFlashDraftModel"]),
        ({"architectures": None}, ["architectures"]),
        ({"num_target_layers": None}, ["num_target_layers"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"num_attention_heads": 30}, ["num_attention_heads", "30", "8"]),
        ({"gru_hidden_dim": None}, ["gru_hidden_dim"]),
        ({"gru_hidden_dim": 0}, ["gru_hidden_dim", "0"]),
        ({"pure_draft_prefix_len": 17}, ["pure_draft_prefix_len", "17", "16"]),
        ({"layer_types": ["full_attention"] * 4}, ["layer_types", "5"]),
        ({"layer_types": ["linear_attention"] * 5}, ["layer_types", "linear_attention"]),
        ({"layer_types": ["sliding_attention"] * 5}, ["sliding_window", "None"]),
        ({"dflash_config": None}, ["mask_token_id"]),
    ],
)
def test_what_is_missing_or_wrong_is_named_with_its_value(values: dict[str, Any], parts: list[str]) -> None:
    message = refusal(changed(DOMINO_8B, **values))
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "4096"),
        ("num_hidden_layers", 5.0),
        ("num_target_layers", "36"),
        ("block_size", "16"),
        ("block_size", True),
        ("mask_token_id", "151669"),
        ("target_layer_ids", 5),
        ("target_layer_ids", [1.5, 2.5]),
        ("target_layer_ids", ["1", "9"]),
        ("pure_draft_prefix_len", "1"),
        ("gru_hidden_dim", 10.5),
        ("emb_dim", "256"),
        ("sliding_window", "512"),
        ("rms_norm_eps", "tiny"),
        ("dflash_config", "domino"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(key: str, value: Any) -> None:
    raw = changed(DOMINO_8B, **{key: value})
    if key == "sliding_window":
        raw["layer_types"] = ["sliding_attention"] * 5
    message = refusal(raw)
    assert key in message and str(value) in message


def test_older_sliding_options_name_the_upper_layers() -> None:
    raw = DFLASH_4B | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 3, "layer_types": None}
    config = parse_config(raw)
    assert [config.window(layer) for layer in range(5)] == [None, None, None, 512, 512]
    raw["use_sliding_window"] = False
    assert [parse_config(raw).window(layer) for layer in range(5)] == [None] * 5


def test_only_sliding_layers_are_causal_unless_stated() -> None:
    types = ["full_attention", "sliding_attention"]
    sliding = {"layer_types": types, "sliding_window": 8, "num_hidden_layers": 2}
    assert [parse_config(DFLASH_4B | sliding).causal(layer) for layer in (0, 1)] == [False, True]
    for stated in (True, False):
        config = parse_config(changed(DFLASH_4B | sliding, is_causal=stated))
        assert [config.causal(layer) for layer in (0, 1)] == [stated, stated]
    assert parse_config(changed(DFLASH_4B, causal_head=True)).causal(0)


@st.composite
def configs(draw: st.DrawFn) -> DraftConfig:
    """Any valid configuration."""
    layers = draw(st.integers(1, 4))
    kv_heads = draw(st.integers(1, 3))
    target_layers = draw(st.integers(1, 40))
    block_size = draw(st.integers(2, 20))
    shift_label = draw(st.booleans())
    length = block_size if shift_label else block_size - 1
    dims = st.integers(1, 300)
    scaled = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
    return DraftConfig(
        hidden_size=draw(dims),
        intermediate_size=draw(dims),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * draw(st.integers(1, 4)),
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(dims),
        vocab_size=draw(dims),
        block_size=block_size,
        mask_token_id=draw(st.integers(0, 200000)),
        target_layer_ids=tuple(draw(st.lists(st.integers(0, target_layers - 1), min_size=1, max_size=5))),
        num_target_layers=target_layers,
        shift_label=shift_label,
        rope_parameters=draw(st.sampled_from([{"rope_type": "default", "rope_theta": 5e5}, scaled])),
        head=draw(st.none() | st.builds(HeadConfig, dims, dims, st.integers(0, length))),
        layer_types=tuple(
            draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers))
        ),
        sliding_window=draw(st.integers(1, 4096)),
        is_causal=draw(st.none() | st.booleans()),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        max_position_embeddings=draw(st.integers(1, 10**6)),
        hidden_act=draw(st.sampled_from(["silu", "gelu"])),
        attention_bias=draw(st.booleans()),
        initializer_range=draw(st.floats(0.001, 1.0)),
    )


@settings(max_examples=200, deadline=None)
@given(config=configs())
def test_what_is_rendered_is_read_back_equal(config: DraftConfig) -> None:
    assert parse_config(render_config(config, "bfloat16")) == config


@settings(max_examples=50, deadline=None)
@given(config=configs())
def test_what_is_rendered_is_read_back_equal_with_the_older_rotary_keys_alone(config: DraftConfig) -> None:
    raw = render_config(config, "bfloat16")
    del raw["rope_parameters"]
    assert parse_config(raw) == config


def test_a_rendered_layout_carries_the_keys_that_public_tools_read() -> None:
    raw = render_config(small_config(), "bfloat16")
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["model_type"] == "qwen3"
    assert raw["dtype"] == "bfloat16" and raw["emb_dim"] == raw["dflash_config"]["emb_dim"] == 6
    assert raw["dflash_config"] == {
        "mask_token_id": 12,
        "target_layer_ids": [0, 2, 3],
        "shift_label": True,
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": 6,
        "gru_hidden_dim": 10,
    }
    assert raw["rope_theta"] == 10000.0
    assert "projector_type" not in render_config(small_config(head=None), "float32")["dflash_config"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "bogus"), ("head_dim", 63), ("layer_types", [{}] * 5), ("rope_parameters", {"rope_type": "bogus"})],
)
def test_a_value_that_no_layer_could_use_is_refused(key: str, value: Any) -> None:
    assert key.removesuffix("_parameters") in refusal(DOMINO_8B | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("input_embedding_scale", 2.0), ("output_multiplier", 0.5), ("final_logit_softcapping", 30.0)],
)
def test_an_option_that_would_change_the_drafts_is_refused(key: str, value: float) -> None:
    assert key in refusal(changed(DOMINO_8B, **{key: value}))
    assert key in refusal(DOMINO_8B | {key: value})


def test_causality_is_read_wherever_it_is_stated() -> None:
    sliding = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 512}
    assert parse_config(DFLASH_4B | sliding).causal(0) is True
    assert parse_config(DFLASH_4B | sliding | {"is_causal": False}).causal(0) is False
    assert parse_config(DFLASH_4B | {"is_causal": True}).causal(0) is True


def test_a_rotary_base_beside_its_parameters_counts() -> None:
    raw = {key: value for key, value in DOMINO_8B.items() if key not in ("rope_theta", "rope_parameters")}
    config = parse_config(raw | {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e6})
    assert config.rope_parameters["rope_theta"] == 5e6


def test_a_plain_dflash_checkpoint_is_not_shifted_on_request() -> None:
    assert parse_config(DFLASH_4B, shift_label=False).shift_label is False
    assert "plain DFlash" in refusal(DFLASH_4B, shift_label=True)
