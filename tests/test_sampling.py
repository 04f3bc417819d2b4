"""Above temperature 0 every method draws from the target's own distribution: chi-square on the first tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import READY_METHODS, SIZES, greedy, make_draft, make_target
from measured_files import ADAPTIVE, write_measured
from scipy.stats import chi2
from torch import Tensor

from dominotree.decode import loop
from dominotree.decode import sampling as sampling_module
from dominotree.decode.cache import DraftCache, TargetCache
from dominotree.decode.loop import decode, decode_rounds
from dominotree.decode.methods import METHODS, Method, make_method
from dominotree.decode.sampling import Sampling, TokenPicker
from dominotree.draft.model import DraftModel
from dominotree.errors import UserError
from dominotree.target import Target, TargetOutput
from dominotree.tree.children import Proposal
from dominotree.tree.nodes import DraftTree
from dominotree.tree.walk import walk

VOCABULARY = 8
PROMPT = [3, 1, 4]
RUNS = 3000
Tokens = tuple[int, ...]
OPTIONS = {name: {"node_budget": 6} for name in ("ddtree", "static_corrected", "dominotree")}


def content(*tensors: Tensor) -> bytes:
    return b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)


def remember_target(target: Target, patch: pytest.MonkeyPatch) -> None:
    """Let `target.forward` look up what it has computed before: a function of the cache's content and the arguments."""
    plain, memory = target.forward, {}

    def forward(token_ids: Tensor, cache: TargetCache, **options: Any) -> TargetOutput:
        past = cache.length
        live = [part[:, :, :past] for layer in cache.layers for part in (layer.keys, layer.values)]
        key = (content(token_ids, *live), *(_key(value) for value in options.values()))
        if key not in memory:
            output = plain(token_ids, cache, **options)
            added = [(layer.keys[:, :, past:].clone(), layer.values[:, :, past:].clone()) for layer in cache.layers]
            memory[key] = output, added
        else:
            for layer, (keys, values) in enumerate(memory[key][1]):
                cache.update(keys, values, layer)
        return memory[key][0]

    patch.setattr(target, "forward", forward)


def remember_draft(draft: DraftModel, patch: pytest.MonkeyPatch) -> None:
    """The same for the drafter's block and its projection of target features."""
    draft_hidden, project = draft.draft_hidden, draft.backbone.project_context
    hidden_memory, projected_memory = {}, {}
    nothing = torch.empty(1, draft.config.num_key_value_heads, 0, draft.config.head_dim)

    def remembered_hidden(ids: Tensor, positions: Tensor, embed: Any, context: DraftCache, length: int) -> Tensor:
        live = [
            part for layer in range(len(draft.backbone.layers)) for part in context.with_block(layer, nothing, nothing)
        ]
        key = content(ids, positions, *live)
        if key not in hidden_memory:
            hidden_memory[key] = draft_hidden(ids, positions, embed, context, length)
        return hidden_memory[key]

    def remembered_project(features: Tensor, positions: Tensor) -> Any:
        key = content(features, positions)
        if key not in projected_memory:
            projected_memory[key] = project(features, positions)
        return projected_memory[key]

    patch.setattr(draft, "draft_hidden", remembered_hidden)
    patch.setattr(draft.backbone, "project_context", remembered_project)


def remember_trees(method: Method, patch: pytest.MonkeyPatch) -> None:
    """And for the tree that a method builds from a block."""
    build, memory = type(method).build, {}

    def remembered(self: Method, proposal: Proposal) -> DraftTree:
        key = content(proposal.root_id, proposal.hidden)
        if key not in memory:
            memory[key] = build(self, proposal)
        return memory[key]

    patch.setattr(type(method), "build", remembered)


def _key(value: Any) -> Any:
    return content(value) if isinstance(value, Tensor) else value


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Target, DraftModel]]:
    """A target over 8 tokens with soft choices; both models remember, so that thousands of runs take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "num_hidden_layers", 2)
        target = make_target(vocab_size=VOCABULARY)
        with torch.no_grad():
            target.model.get_output_embeddings().weight.mul_(0.4)
        draft = make_draft(target, block_size=3, num_layers=1, num_features=2)
        with torch.no_grad():
            assert draft.head is not None
            draft.head.output_rows.mul_(12.0)  # so that every method builds another tree
        remember_target(target, patch)
        remember_draft(draft, patch)
        yield target, draft


def law_of_one(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:  # [V]
    """The definitions, token by token: soften, keep the k likeliest, then the smallest set of probability top_p."""
    weights = [float(value) for value in (logits.double() / temperature).softmax(-1)]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    order = order[: top_k or len(order)]
    total = sum(weights[token] for token in order)
    nucleus: list[int] = []
    for token in order:
        if sum(weights[chosen] for chosen in nucleus) >= top_p * total:
            break
        nucleus.append(token)
    kept = sum(weights[token] for token in nucleus)
    return [weights[token] / kept if token in nucleus else 0.0 for token in range(len(weights))]


def law(
    target: Target, length: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> dict[Tokens, float]:
    """Probability of every first `length` tokens, each prefix run through the bare model without a cache."""
    beginnings: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        grown: dict[Tokens, float] = {}
        for tokens, probability in beginnings.items():
            logits = target.model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
            for token, share in enumerate(law_of_one(logits, temperature, top_k, top_p)):
                grown[(*tokens, token)] = probability * share
        beginnings = grown
    return beginnings


def p_value(observed: Counter[Tokens], expected: dict[Tokens, float]) -> float:
    """Chi-square of counts against probabilities; cells that expect fewer than 5 are taken together."""
    runs = sum(observed.values())
    assert all(expected[tokens] > 0 for tokens in observed)  # nothing impossible was seen
    large = [tokens for tokens, probability in expected.items() if probability * runs >= 5]
    cells = [(observed[tokens], expected[tokens] * runs) for tokens in large]
    rest = runs - sum(seen for seen, _ in cells), runs - sum(due for _, due in cells)
    cells += [rest] if rest[1] >= 5 else []
    return float(chi2.sf(sum((seen - due) ** 2 / due for seen, due in cells), df=len(cells) - 1))


def sample(
    pair: tuple[Target, DraftModel], method: str | Method, runs: int = RUNS, **options: Any
) -> tuple[Counter[Tokens], float]:
    """Counts of the first three tokens over many seeds, and the mean accepted length of the rounds it took."""
    made = make_method(method, **OPTIONS.get(method, {})) if isinstance(method, str) else method
    counts: Counter[Tokens] = Counter()
    accepted: list[int] = []
    first_seed = 1_000_000 * list(METHODS).index(made.name)  # methods share no noise
    with pytest.MonkeyPatch.context() as patch:
        remember_trees(made, patch)
        for seed in range(first_seed, first_seed + runs):
            tokens: list[int] = []
            shape = Sampling(seed=seed, **options)
            # Four tokens are asked for, so that two slots are drafted; three are looked at.
            for round_ in decode_rounds(*pair, made, PROMPT, max_new_tokens=4, sampling=shape):
                tokens += round_.token_ids
                accepted += [round_.accepted_length] if round_.accepted_length else []
                if len(tokens) >= 3:
                    break
            counts[tuple(tokens[:3])] += 1
    return counts, sum(accepted) / len(accepted)


def first_two(counts: Counter[Tokens]) -> Counter[Tokens]:
    shorter: Counter[Tokens] = Counter()
    for tokens, count in counts.items():
        shorter[tokens[:2]] += count
    return shorter


@pytest.mark.parametrize("method", READY_METHODS)
def test_the_first_tokens_follow_the_target_s_distribution(pair: tuple[Target, DraftModel], method: str) -> None:
    counts, accepted = sample(pair, method, temperature=1.0)
    assert p_value(first_two(counts), law(pair[0], 2)) > 0.001
    assert p_value(counts, law(pair[0], 3)) > 0.001
    assert accepted > 1.05 or method == "ar"  # drafted tokens were accepted


@pytest.mark.parametrize("name", ADAPTIVE)
def test_budgets_chosen_by_the_round_keep_the_distribution(
    pair: tuple[Target, DraftModel], name: str, tmp_path: Path
) -> None:
    counts, accepted = sample(pair, write_measured(*pair, tmp_path).checked(name), RUNS // 4, temperature=1.0)
    assert p_value(counts, law(pair[0], 3)) > 0.001
    assert accepted > 1.05


@pytest.mark.parametrize("method", ["ddtree", "dominotree"])
def test_temperature_top_k_and_top_p_shape_the_distribution(pair: tuple[Target, DraftModel], method: str) -> None:
    shape: dict[str, Any] = {"temperature": 1.4, "top_k": 6, "top_p": 0.9}
    counts, accepted = sample(pair, method, **shape)
    expected = law(pair[0], 3, **shape)
    assert 0 in expected.values()
    assert p_value(first_two(counts), law(pair[0], 2, **shape)) > 0.001
    assert p_value(counts, expected) > 0.001
    assert accepted > 1.05


def test_the_test_rejects_a_slightly_wrong_law(pair: tuple[Target, DraftModel]) -> None:
    counts, _ = sample(pair, "ar", temperature=1.0)
    assert p_value(first_two(counts), law(pair[0], 2, temperature=1.3)) < 1e-4
    assert p_value(counts, law(pair[0], 3, temperature=1.3)) < 1e-4


@pytest.mark.parametrize("method", ["dflash", "dominotree"])
def test_the_test_rejects_a_bonus_token_from_the_wrong_node(
    pair: tuple[Target, DraftModel], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def wrong(tree: DraftTree, posterior: Tensor) -> tuple[Tensor, Tensor]:
        return walk(tree, posterior)[0], posterior[:, -1]

    monkeypatch.setattr(loop, "walk", wrong)
    counts, _ = sample(pair, method, runs=1500, temperature=1.0)
    assert p_value(counts, law(pair[0], 3)) < 1e-4


def test_the_test_rejects_a_walk_that_prefers_drafted_tokens(
    pair: tuple[Target, DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(tree: DraftTree, posterior: Tensor) -> tuple[Tensor, Tensor]:
        if tree.size and posterior[0, 0] % 2:  # takes the first drafted token without asking the target
            posterior = posterior.clone()
            posterior[0, 0] = tree.token_ids[0, 0]
        return walk(tree, posterior)

    monkeypatch.setattr(loop, "walk", wrong)
    counts, _ = sample(pair, "dominotree", runs=1500, temperature=1.0)
    assert p_value(first_two(counts), law(pair[0], 2)) < 1e-4


def test_choices_at_several_nodes_of_one_forward_are_independent() -> None:
    logits = torch.tensor([1.0, 0.3, -0.5, 0.0]).expand(1, 20_000, 4)
    draws = TokenPicker(Sampling(1.0, seed=5), torch.device("cpu")).pick(logits)[0].view(-1, 2)
    one = law_of_one(logits[0, 0], 1.0, 0, 1.0)
    pairs: dict[Tokens, float] = {(a, b): one[a] * one[b] for a, b in itertools.product(range(4), repeat=2)}
    assert p_value(Counter(tuple(pair) for pair in draws.tolist()), pairs) > 0.001


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 99},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    ],
)
def test_one_choice_follows_the_definitions(options: dict[str, Any]) -> None:
    logits = torch.tensor([2.0, 1.5, 1.1, 0.2, -0.3, -1.0])
    draws = TokenPicker(Sampling(seed=2, **options), torch.device("cpu")).pick(logits.expand(1, 20_000, 6))
    shape = {"top_k": 0, "top_p": 1.0} | options
    expected: dict[Tokens, float] = {(token,): share for token, share in enumerate(law_of_one(logits, **shape))}
    assert p_value(Counter((token,) for token in draws[0].tolist()), expected) > 0.001


@pytest.mark.parametrize("method", READY_METHODS)
def test_the_seed_decides_the_output(pair: tuple[Target, DraftModel], method: str) -> None:
    def run(seed: int) -> list[int]:
        torch.rand(1)  # the global generator plays no part
        options = Sampling(temperature=1.0, seed=seed)
        return decode(*pair, make_method(method), PROMPT, max_new_tokens=12, sampling=options).token_ids

    assert run(3) == run(3)
    assert len({tuple(run(seed)) for seed in range(5)}) > 1


def never(*arguments: Any) -> None:
    raise AssertionError("greedy decoding divided by a temperature")


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-9])
@pytest.mark.parametrize("method", READY_METHODS)
def test_temperature_zero_or_nearly_is_greedy_and_divides_by_nothing(
    pair: tuple[Target, DraftModel], monkeypatch: pytest.MonkeyPatch, method: str, temperature: float
) -> None:
    monkeypatch.setattr(sampling_module, "TemperatureLogitsWarper", never)
    options = Sampling(temperature, top_k=3, top_p=0.5)
    ours = decode(*pair, make_method(method), PROMPT, max_new_tokens=10, sampling=options)
    assert ours.token_ids == greedy(pair[0], PROMPT, 10)


GREEDY_SHAPES: list[Callable[[], Sampling]] = [
    lambda: Sampling(temperature=1e-4),
    lambda: Sampling(temperature=3.0, top_k=1),
    lambda: Sampling(temperature=1.0, top_p=1e-6),
]


@pytest.mark.parametrize("shape", GREEDY_SHAPES)
def test_shapes_that_leave_one_token_are_greedy(pair: tuple[Target, DraftModel], shape: Callable[[], Sampling]) -> None:
    ours = decode(*pair, make_method("dominotree"), PROMPT, max_new_tokens=10, sampling=shape())
    assert ours.token_ids == greedy(pair[0], PROMPT, 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**64),  # torch takes 64 bits
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name} must.*got {value}"):
        TokenPicker(Sampling(**{name: value}), torch.device("cpu"))
