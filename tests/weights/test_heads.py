"""Heads of attention among ranks: whole ones, or an error that every rank words alike."""

import pytest
import torch

from qload.architecture import Architecture, architecture_of
from qload.detect import DefaultWeightsLoader, GPTQWeightsLoader
from qload.errors import ArgumentError, CutError, DivideError
from qload.loader import Heads, WeightsLoader
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.usefixtures("seen_texts")

PLAIN = DefaultWeightsLoader()


def refused(
    tensors: dict[str, torch.Tensor], loader: WeightsLoader, heads: tuple[int, int], world: int
) -> tuple[type[Exception], str]:
    """The one error of all ranks."""
    found = set()
    for rank in FakeWorld(world):
        weights = Weights(MemoryStorage(tensors), loader=loader, process_group=rank)
        with pytest.raises((CutError, DivideError)) as caught:
            weights.get_weights_col_packed_qkv("a", *heads)
        found.add((type(caught.value), str(caught.value)))
        assert not weights.report().used
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("heads", "world", "what", "lawful"),
    [
        pytest.param((6, 6), 4, "query heads = 6", "2, 3, 6", id="queries"),
        pytest.param((12, 3), 4, "key/value heads = 3", "3, 6, 12", id="fewer keys than ranks"),
        pytest.param((12, 6), 4, "key/value heads = 6", "2, 3, 6, 12", id="more keys than ranks"),
        pytest.param((7, 7), 2, "query heads = 7", "7", id="a prime"),
    ],
)
def test_heads_that_no_ranks_can_share_are_refused(
    heads: tuple[int, int], world: int, what: str, lawful: str
) -> None:
    tensors = {"a.weight": torch.zeros((heads[0] + 2 * heads[1]) * 4, 2)}

    assert refused(tensors, PLAIN, heads, world) == (
        DivideError,
        f"a: {what} does not divide into {world} ranks\n  lawful   world sizes {lawful}",
    )


def test_the_worlds_that_an_error_offers_are_lawful() -> None:
    tensors = {"a.weight": torch.arange(18.0 * 4)[:, None].repeat(1, 2)}

    for world in (3, 6, 12):
        for rank in FakeWorld(world):
            weights = Weights(MemoryStorage(tensors), loader=PLAIN, process_group=rank)
            rows = weights.get_weights_col_packed_qkv("a", 12, 3).dequantize()[:, 0]
            q, k, v = rows.split([48 // world, 4, 4])
            key = rank.rank() * 3 // world
            assert q[0] == rank.rank() * (48 // world)
            assert k.tolist() == [48 + 4 * key + i for i in range(4)]
            assert v.tolist() == [60 + 4 * key + i for i in range(4)]


def test_one_key_head_is_on_every_rank() -> None:
    tensors = {"a.weight": torch.arange(10.0)[:, None].repeat(1, 2)}

    for rank in FakeWorld(4):
        weights = Weights(MemoryStorage(tensors), loader=PLAIN, process_group=rank)
        rows = weights.get_weights_col_packed_qkv("a", 8, 1).dequantize()[:, 0]
        assert rows.tolist() == [2 * rank.rank(), 2 * rank.rank() + 1, 8, 9]


def test_a_head_that_ends_inside_a_word_is_refused() -> None:
    weight = Case(N=96, K=32).weight()  # 24 heads of four outputs, in words of eight
    loader = GPTQWeightsLoader(bits=4, group_size=32, zeros=weight.config.zeros)
    tensors = {f"a.{name}": tensor for name, tensor in weight.fields().items()}

    kind, text = refused(tensors, loader, (20, 2), 4)

    assert kind is CutError
    assert "cannot cut N = 96 at 20 for 4 ranks" in text


@pytest.mark.parametrize("heads", [(0, 1), (8, 0), (8.0, 1), (True, 1)], ids=repr)
def test_what_is_no_count_of_heads_is_refused(heads: tuple[int, int]) -> None:
    weights = Weights(MemoryStorage({"a.weight": torch.zeros(24, 2)}), loader=PLAIN)

    with pytest.raises(ArgumentError, match=r"whole numbers, at least 1|num_heads\n  expected int"):
        weights.get_weights_col_packed_qkv("a", *heads)


def rows(*names: str, N: int) -> dict[str, torch.Tensor]:
    """Layers of N outputs, whose values are their numbers."""
    return {f"{name}.weight": torch.arange(float(N))[:, None].repeat(1, 2) for name in names}


SEPARATE = {**rows("q", N=24), **rows("k", "v", N=8)}  # six heads of queries, two of keys, of four outputs


def refusal_of_separate(heads: Heads, world: int) -> str:
    """The one refusal of all ranks, before any of them has read or used anything."""
    found = set()
    for rank in FakeWorld(world):
        storage = MemoryStorage(SEPARATE)
        weights = Weights(storage, loader=PLAIN, process_group=rank)
        with pytest.raises(DivideError) as caught:
            weights.get_multi_weights_col(["q", "k", "v"], heads=heads)
        found.add(str(caught.value))
        assert not storage.reads
        assert not weights.report().used
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("heads", "world", "text"),
    [
        pytest.param(
            Heads(6, 2),
            4,
            "q: query heads = 6 does not divide into 4 ranks\n  lawful   world sizes 2, 6",
            id="queries",
        ),
        pytest.param(
            Heads(12, 4),
            6,
            "k: key/value heads = 4 does not divide into 6 ranks\n  lawful   world sizes 2, 4, 12",
            id="keys",
        ),
        pytest.param(Heads(5, 2), 1, "q: N = 24 does not divide into blocks in proportion 5", id="no heads"),
    ],
)
def test_separate_layers_that_no_ranks_can_share_are_refused(heads: Heads, world: int, text: str) -> None:
    assert refusal_of_separate(heads, world) == text


@pytest.mark.parametrize("dim", [0, -2])
def test_few_heads_of_keys_are_repeated_and_shares_are_the_whole(dim: int) -> None:
    for world in (2, 6):
        for rank in FakeWorld(world):
            weights = Weights(MemoryStorage(SEPARATE), loader=PLAIN, process_group=rank)
            got = weights.get_multi_weights_col(["q", "k", "v"], dim, heads=Heads(6, 2)).dequantize()[:, 0]
            q, k, v = got.split([24 // world, 4, 4])
            key = rank.rank() * 2 // world
            assert q.tolist() == [rank.rank() * (24 // world) + at for at in range(24 // world)]
            assert k.tolist() == v.tolist() == [4 * key + at for at in range(4)]


SIZES = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 2}
MODEL = architecture_of({"model_type": "llama", **SIZES})
ATTENTION = "model.layers.0.self_attn."
NAMES = {f"{ATTENTION}{name.replace('.', '_proj.')}": tensor for name, tensor in SEPARATE.items()}


def test_half_a_head_is_refused_where_the_config_is_known() -> None:
    found = set()
    for rank in FakeWorld(4):
        storage = MemoryStorage(NAMES)
        weights = Weights(
            storage, loader=PLAIN, process_group=rank, architecture=MODEL, prefix=ATTENTION[:-1]
        )
        for load in (
            lambda w: w.get_weights_col("k_proj"),
            lambda w: w.get_multi_weights_col(["k_proj", "v_proj"]),
        ):
            with pytest.raises(DivideError) as caught:
                load(weights)
            found.add(str(caught.value))
        assert not storage.reads
    assert found == {
        "k_proj: key/value heads = 2 does not divide into equal shares of 4 ranks\n"
        "  remedy   heads=Heads(keys=2), which shares whole heads"
    }


@pytest.mark.parametrize(("name", "count"), [("q", "query heads = 6"), ("v", "key/value heads = 2")])
def test_no_layer_of_a_known_model_is_cut_within_a_head(name: str, count: str) -> None:
    for rank in FakeWorld(8):
        weights = Weights(MemoryStorage(NAMES), loader=PLAIN, process_group=rank, architecture=MODEL)
        with pytest.raises(DivideError, match=f"{count} does not divide into equal shares of 8 ranks"):
            weights.get_weights_col(f"{ATTENTION}{name}_proj")


def test_whole_heads_are_loaded_without_a_word() -> None:
    for rank in FakeWorld(2):
        weights = Weights(MemoryStorage(NAMES), loader=PLAIN, process_group=rank, architecture=MODEL)
        names = [f"{ATTENTION}{name}_proj" for name in "qkv"]
        plain = weights.get_multi_weights_col(names)
        said = weights.get_multi_weights_col(names, heads=Heads(6, 2))
        assert torch.equal(plain.dequantize(), said.dequantize())


def test_a_fused_layer_is_never_cut_as_if_it_were_one() -> None:
    tensors = rows(f"{ATTENTION}qkv_proj", N=40)
    for rank in FakeWorld(2):
        weights = Weights(MemoryStorage(tensors), loader=PLAIN, process_group=rank, architecture=MODEL)
        with pytest.raises(DivideError, match=r"heads=Heads\(queries=6, keys=2\)"):
            weights.get_weights_col(f"{ATTENTION}qkv_proj")
        share = weights.get_weights_col(f"{ATTENTION}qkv_proj", heads=Heads(6, 2))
        packed = weights.get_weights_col_packed_qkv(f"{ATTENTION}qkv_proj", 6, 2)
        assert torch.equal(share.dequantize(), packed.dequantize())


@pytest.mark.parametrize("arguments", [(), (0,), (-1, 2), (4, 0), (2.0,), (True,), ("4",)], ids=repr)
def test_what_are_no_heads_is_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"heads|queries"):
        Heads(*arguments)  # type: ignore[arg-type]


def test_two_layers_are_not_queries_keys_and_values() -> None:
    weights = Weights(MemoryStorage(SEPARATE), loader=PLAIN)

    with pytest.raises(ArgumentError, match="both, for 2 layers"):
        weights.get_multi_weights_col(["q", "k"], heads=Heads(6, 2))
    for prefixes, dim in (("qkv", 0), ([], 0), (["q", "k", "v"], 1)):
        with pytest.raises(ArgumentError, match=r"prefixes|dim"):
            weights.get_multi_weights_col(prefixes, dim, heads=Heads(6, 2))


@pytest.mark.parametrize("prefix", [None, ATTENTION[:-1]])
def test_a_layer_is_looked_up_by_names_that_tensors_may_have(
    prefix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def heads(self: Architecture, name: str) -> None:
        asked.append(name)

    monkeypatch.setattr(Architecture, "heads", heads)
    weights = Weights(
        MemoryStorage(NAMES),
        loader=PLAIN,
        process_group=next(iter(FakeWorld(2))),
        architecture=MODEL,
        prefix=prefix,
    )

    weights.get_weights_col(f"{ATTENTION}q_proj" if prefix is None else "q_proj")

    own = [] if prefix is None else ["q_proj"]
    assert asked == [*own, f"{ATTENTION}q_proj"]
