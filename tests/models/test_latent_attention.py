"""Latent attention against its formula, at several worlds, with padded heads; DeepSeek's traps by number."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload import DivideError, FakeWorld, Fp8Quantizer, MemoryStorage, QuantizingLoader, Weights
from qload.detect import loader_from_config
from qload.errors import MissingTensorError, ShapeError
from qload.kernels.declared import Maximum
from qload.models.attention import LatentAttention, pairs_as_halves
from qload.models.config import TextConfig, text_config
from qload.models.decoder import load_model
from qload.models.kv_cache import HeadSizes, PagedCache, Step
from qload.models.rope import Rope, rotate_halves, rotate_pairs
from qload.parallel import ProcessGroup, Rank
from qload.spec import Weight
from tests.models import drawn as text_models
from tests.models.latent_formula import PREFIX, SMALL, attention_by_formula, drawn

pytestmark = pytest.mark.usefixtures("seen_texts")

ALONE = Rank(0, 1)
PLAIN = loader_from_config(None)
T = 7
BIASED = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
OF_RANGE = 1e-5  # how far float32 may be off: what logits of models are held to


def loaded(config: TextConfig, tensors: dict[str, Tensor], group: ProcessGroup = ALONE) -> LatentAttention:
    weights = Weights(MemoryStorage(tensors), loader=PLAIN, process_group=group)
    return LatentAttention(weights, PREFIX, config, Rope(config.rope))


def cache_of(config: TextConfig, ranks: int = 1, sizes: tuple[int, int] | None = None) -> PagedCache:
    k, v = sizes or (config.head_dim, config.v_head_dim)
    return PagedCache(1, 4, 2, config.heads // ranks, k, v, torch.float32)


def at_once(attention: nn.Module, x: Tensor, cache: PagedCache) -> Tensor:
    return attention(x, Step.of([0], tokens=T, pages=[[3, 1, 0, 2]], page_size=2), cache, 0)


def close(made: Tensor, expected: Tensor) -> bool:
    return bool((made - expected).abs().max() <= OF_RANGE * (expected.max() - expected.min()))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(T, SMALL["hidden_size"], generator=torch.Generator().manual_seed(1))


OTHERS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v2": {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
    "queries not compressed": {"model_type": "deepseek_v2", "q_lora_rank": None},
    "values wider than keys": {"v_head_dim": 26},
    "no rope_scaling": {"rope_scaling": None},
    "rotated in halves": {"rope_interleave": False},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_attention_is_that_of_the_formula(other: str, ranks: int, x: Tensor) -> None:
    said = {**SMALL, **OTHERS[other]}
    config, tensors = text_config(said), drawn(said)
    expected = attention_by_formula(x, tensors, config, pairs=other != "rotated in halves")

    def work(group: ProcessGroup) -> Tensor:
        return at_once(loaded(config, tensors, group), x, cache_of(config, ranks))

    made = FakeWorld(ranks).run(work)

    assert all(each.equal(made[0]) for each in made)
    assert close(made[0], expected)


def test_tokens_one_by_one_are_those_at_once(x: Tensor) -> None:
    config, tensors = text_config(SMALL), drawn(SMALL)
    attention, cache = loaded(config, tensors), cache_of(config)

    made = [
        attention(x[t : t + 1], Step.of([t], tokens=1, pages=[[3, 1, 0, 2]], page_size=2), cache, 0)
        for t in range(T)
    ]

    assert close(torch.cat(made), attention_by_formula(x, tensors, config))


def test_trap_59_projections_that_are_not_cut_are_the_same_on_all_ranks_and_quantized_like_the_rest() -> None:
    tensors = drawn(SMALL)
    loader, config = QuantizingLoader(PLAIN, Fp8Quantizer()), text_config(SMALL)
    formats: set[str] = set()

    def work(group: ProcessGroup) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}

        def make(weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
            formats.add(weight.format)
            values[weight.layer.name.rpartition(".")[2]] = weight.dequantize()
            return weight.get_linear(bias, activations="unquantized")

        weights = Weights(MemoryStorage(tensors), loader=loader, process_group=group)
        LatentAttention(weights, PREFIX, config, Rope(config.rope), make)
        return values

    first, *others = FakeWorld(4).run(work)

    assert formats == {"fp8"}
    assert {name: tuple(each.shape) for name, each in first.items()} == {
        "q_a_proj": (20, 24),
        "kv_a_proj_with_mqa": (20, 24),
        "q_b_proj": (18, 20),
        "kv_b_proj": (16, 12),
        "o_proj": (24, 6),
    }
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        assert all(first[name].equal(other[name]) for other in others)
        assert not first[name].equal(tensors[f"{PREFIX}.{name}.weight"])


def test_trap_60_queries_and_keys_are_both_put_from_pairs_into_halves() -> None:
    draw = torch.Generator().manual_seed(0)
    rope = Rope(text_config(SMALL).rope)
    q, k = (torch.randint(-3, 4, (T, 4, 8), generator=draw).float() for _ in range(2))
    cos, sin = rope(torch.arange(T))

    in_halves = [rotate_halves(pairs_as_halves(each), cos, sin) for each in (q, k)]
    in_pairs = [rotate_pairs(each, cos, sin) for each in (q, k)]

    for halves, pairs in zip(in_halves, in_pairs, strict=True):
        assert halves.equal(pairs_as_halves(pairs))
    assert pairs_as_halves(torch.arange(8)).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_trap_60_the_softmax_scale_follows_from_the_config() -> None:
    plain = loaded(text_config({**SMALL, "rope_scaling": None}), drawn(SMALL)).scale
    shrunk = loaded(
        text_config({**SMALL, "rope_scaling": {**SMALL["rope_scaling"], "factor": 0.5}}), drawn(SMALL)
    )
    linear = {"type": "linear", "factor": 8.0, "mscale_all_dim": 1.0}  # what only yarn has

    assert plain == 18**-0.5
    assert shrunk.scale == plain
    assert loaded(text_config({**SMALL, "rope_scaling": linear}), drawn(SMALL)).scale == plain
    assert loaded(text_config(SMALL), drawn(SMALL)).scale > plain


@pytest.mark.parametrize("sizes", [(32, 32), (18, 18), (24, 6), HeadSizes(only=(64,)).padded(18, 6)])
def test_trap_61_heads_of_a_wider_cache_change_nothing(sizes: tuple[int, int], x: Tensor) -> None:
    config, tensors = text_config(SMALL), drawn(SMALL)
    cache = cache_of(config, sizes=sizes)

    made = at_once(loaded(config, tensors), x, cache)

    assert close(made, attention_by_formula(x, tensors, config))
    assert cache.keys[..., 18:].eq(0).all()
    assert cache.values[..., 6:].eq(0).all()


def test_trap_61_a_cache_is_made_for_both_parts_of_keys_and_for_values() -> None:
    config = text_config({**SMALL, "head_dim": 8, "num_key_value_heads": 1})
    cache = PagedCache.of(config, pages=2, ranks=2, dtype=torch.float32)

    assert cache.keys.shape[3:] == (2, 10 + 8)
    assert cache.values.shape[3:] == (2, 6)


@pytest.mark.parametrize(
    "sizes", [HeadSizes(multiple=24), HeadSizes(only=(32, 64)), HeadSizes(multiple=16, equal=True)]
)
@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "deepseek_v3"])
def test_trap_61_a_whole_model_answers_alike_with_the_heads_of_a_backend(kind: str, sizes: HeadSizes) -> None:
    said = SMALL if kind == "deepseek_v3" else text_models.config(kind)
    tensors = drawn(SMALL) if kind == "deepseek_v3" else text_models.tensors(said)
    model = load_model(Weights(MemoryStorage(tensors), loader=PLAIN), said)
    step, ids = Step.of([0], tokens=T, pages=[[1]], page_size=16), torch.arange(T)
    caches = [
        PagedCache.of(model.config, pages=2, head_sizes=own, dtype=torch.float32) for own in (None, sizes)
    ]

    plain, wide = (model(ids, step, cache) for cache in caches)

    assert caches[0].keys.shape[-1] == model.config.head_dim
    assert caches[1].bytes > caches[0].bytes
    assert close(wide, plain)


def test_a_cache_of_narrower_heads_is_refused(x: Tensor) -> None:
    config = text_config(SMALL)

    with pytest.raises(ShapeError, match="D <= 17"):
        at_once(loaded(config, drawn(SMALL)), x, cache_of(config, sizes=(17, 6)))


@pytest.mark.parametrize("name", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])
def test_matrices_of_other_sizes_than_the_config_says_are_refused(name: str) -> None:
    tensors = drawn(SMALL)
    tensors[f"{PREFIX}.{name}.weight"] = torch.ones(16, 16)

    with pytest.raises(ShapeError, match=name):
        loaded(text_config(SMALL), tensors)


def test_heads_that_ranks_cannot_share_are_refused_by_all_alike() -> None:
    def work(group: ProcessGroup) -> str:
        with pytest.raises(DivideError, match="q_b_proj") as refused:
            loaded(text_config(SMALL), drawn(SMALL), group)
        return str(refused.value)

    assert len(set(FakeWorld(3).run(work))) == 1


def biased() -> dict[str, Tensor]:
    """The tensors of `SMALL` with biases, of which that of the outputs alone is not zero."""
    tensors = drawn(SMALL)
    for name in BIASED:
        N = tensors[f"{PREFIX}.{name}.weight"].shape[0]
        tensors[f"{PREFIX}.{name}.bias"] = torch.full((N,), 5.0 if name == "o_proj" else 0.0)
    return tensors


def test_biases_of_whole_projections_are_added_once(x: Tensor) -> None:
    config = text_config({**SMALL, "attention_bias": True})
    without = attention_by_formula(x, drawn(SMALL), text_config(SMALL))

    made = FakeWorld(2).run(lambda group: at_once(loaded(config, biased(), group), x, cache_of(config, 2)))

    assert close(made[1], without + 5)


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_that_the_config_promises_is_missed(name: str) -> None:
    tensors = biased()
    del tensors[f"{PREFIX}.{name}.bias"]

    with pytest.raises(MissingTensorError, match=rf"{name}\.bias"):
        loaded(text_config({**SMALL, "attention_bias": True}), tensors)


def test_a_whole_model_of_dense_and_sparse_layers_loads_all_of_its_tensors() -> None:
    tensors = drawn(SMALL)
    weights = Weights(MemoryStorage(tensors), loader=PLAIN)
    model = load_model(weights, SMALL)
    ids = torch.arange(T)

    cache = PagedCache.of(model.config, pages=1, dtype=torch.float32)
    made = model(ids, Step.of([0], tokens=T, pages=[[0]], page_size=16), cache)

    assert made.shape == (T, 40)
    assert made.isfinite().all()
    assert weights.report().unused == []


def test_a_step_looks_at_no_number_so_that_it_can_be_captured() -> None:
    """On a device that has no numbers, whatever looks at one is an error."""
    config, device = text_config(SMALL), "meta"
    attention = loaded(config, drawn(SMALL)).to(device)
    cache = cache_of(config, sizes=(32, 32)).to(device)
    step = Step.of([0, 3], tokens=1, pages=[[0, 1], [2, 3]], page_size=2, device=device)

    made = attention(torch.empty(2, 24, device=device), step, cache, 0)

    assert made.shape == (2, 24)
    with pytest.raises(RuntimeError):
        made.sum().item()
