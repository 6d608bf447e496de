"""DeepSeek V3.2's indexer: its choice of keys against the formula, and attention to the chosen keys alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError, ConfigError
from qload.models import Engine, PagedCache, Step, load_model, text_config
from qload.models import indexer as module
from qload.models.config import IndexerConfig
from qload.models.indexer import Indexer, index_scores
from qload.models.rope import Rope, RopeConfig
from tests.models.drawn import config, tensors, weights
from tests.models.recorded import logits

KIND = "deepseek_v32"
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])
HEADS, SIZE, ROTATED, TOP = 16, 8, 4, 4


def rotated(head: Tensor, position: int) -> Tensor:
    """Rotate the first elements of a head, as complex numbers of two halves."""
    half = ROTATED // 2
    angles = position * 100.0 ** (-torch.arange(half).double() / half)
    turned = torch.complex(head[:half], head[half:ROTATED]) * torch.polar(torch.ones(half).double(), angles)
    return torch.cat([turned.real, turned.imag, head[ROTATED:]])


def chosen_by_formula(stored: dict[str, Tensor], x: Tensor, compressed: Tensor) -> list[set[int]]:
    """Choose the keys of each token of one sequence in float64, head by head."""
    matrix = {name.removeprefix("indexer."): tensor.double() for name, tensor in stored.items()}
    keys = []
    for at, token in enumerate(x.double()):
        key = matrix["wk.weight"] @ token
        normed = (key - key.mean()) / (key.var(correction=0) + 1e-6).sqrt()
        keys.append(rotated(normed * matrix["k_norm.weight"] + matrix["k_norm.bias"], at))
    found = []
    for at, token in enumerate(x.double()):
        heads = (matrix["wq_b.weight"] @ compressed[at].double()).view(HEADS, SIZE)
        factors = matrix["weights_proj.weight"] @ token
        scores = [
            sum(
                float(factor * max(rotated(head, at) @ key, torch.zeros(())))
                for head, factor in zip(heads, factors, strict=True)
            )
            for key in keys[: at + 1]
        ]
        found.append({*sorted(range(at + 1), key=lambda key: -scores[key])[:TOP]})
    return found


@pytest.mark.parametrize("pieces", [1, 5])
def test_the_chosen_keys_are_those_of_the_formula(pieces: int) -> None:
    said = config(KIND)
    prefix = "model.layers.1.self_attn."
    stored = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors(said, seed=2).items()
        if name.startswith(f"{prefix}indexer.")
    }
    sizes = IndexerConfig(HEADS, SIZE, TOP)
    rope = Rope(RopeConfig("default", 100.0, ROTATED))
    layer = Indexer(weights(said, stored), "indexer", sizes, said["hidden_size"], said["q_lora_rank"], rope)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(10, said["hidden_size"], generator=generator)
    compressed = torch.randn(10, said["q_lora_rank"], generator=generator)
    cache = PagedCache(2, 3, 4, 1, 8, 8, torch.float32, index_dim=SIZE)

    found, start = [], 0
    for part, also in zip(x.chunk(pieces), compressed.chunk(pieces), strict=True):
        step = Step.of([start], tokens=len(part), pages=[[2, 0, 1]], page_size=4)
        bias = layer(part, also, step, cache, 1)
        assert bias is not None
        found += [{*row.isfinite().nonzero().flatten().tolist()} for row in bias[0, 0]]
        start += len(part)

    assert found == chosen_by_formula(stored, x, compressed)


def test_a_limited_number_of_products_gives_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randint(-3, 4, shape, generator=generator).float()
        for shape in ((2, 7, 5, 6), (2, 7, 5), (2, 9, 6))
    ]
    want = index_scores(*drawn)

    monkeypatch.setattr(module, "MAX_PRODUCTS", 3 * 2 * 5 * 9)

    assert torch.equal(index_scores(*drawn), want)
    queries, factors, keys = drawn
    products = torch.einsum("sqhd,sld->sqhl", queries, keys).clamp(min=0)
    assert torch.equal(want, torch.einsum("sqhl,sqh->sql", products, factors))


def test_no_more_keys_than_are_chosen_is_dense_attention() -> None:
    said = config(KIND, index_topk=16)  # two pages of eight
    stored = tensors(said)
    dense = {**said, "model_type": "deepseek_v3"}
    plain = {name: tensor for name, tensor in stored.items() if ".indexer." not in name}
    want = logits(load_model(weights(dense, plain), dense), IDS)

    assert torch.equal(logits(load_model(weights(said, stored), said), IDS), want)
    fewer = {**said, "index_topk": 4}
    sparse = logits(load_model(weights(fewer, stored), fewer), IDS)
    assert torch.equal(sparse[:, :4], want[:, :4])
    assert not torch.isclose(sparse[:, 4:], want[:, 4:]).all(-1).any()


def test_dropped_sequences_leave_no_index_keys() -> None:
    said = config(KIND)
    engine = Engine(load_model(weights(said, tensors(said)), said), max_tokens=32, max_sequences=2)
    first = engine.prefill(IDS[0].tolist())
    assert engine.cache.index_keys is not None
    assert engine.cache.index_keys.count_nonzero()
    engine.prefill([7] * 20)

    assert torch.equal(engine.prefill(IDS[0].tolist()), first)
    engine.reset()
    assert not any(cells.count_nonzero() for cells in engine.cache.buffers())
    assert engine.cache.bytes == sum(cells.nbytes for cells in engine.cache.buffers())


def test_a_cache_without_index_keys_is_refused() -> None:
    said = config(KIND)
    model = load_model(weights(said, tensors(said)), said)
    cache = PagedCache(2, 2, 8, 4, 10, 8, torch.float32)

    with pytest.raises(ArgumentError, match="of the indexer"):
        model(IDS[0], Step.of([0], tokens=10, pages=[[1, 0]], page_size=8), cache)


@pytest.mark.parametrize(
    ("entries", "key"),
    [
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"index_head_dim": 2}, "index_head_dim"),
        ({"index_topk": 0}, "index_topk"),
    ],
    ids=str,
)
def test_sizes_that_no_indexer_has_are_refused_by_their_key(entries: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        text_config(config(KIND, **entries))
    assert refusal.value.key == key


def test_layers_and_rotated_elements_follow_from_a_published_config() -> None:
    said = {
        **config(KIND, num_hidden_layers=3, first_k_dense_replace=2),
        "architectures": ["DeepseekV32ForCausalLM"],
    }
    model = text_config(said)

    assert "head_dim" not in said
    assert model.sparse_layers == {2}
    assert model.architecture.expected("model.layers.0.self_attn.kv_a_proj_with_mqa") == (20, 32)
