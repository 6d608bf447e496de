"""FP8: every shape of scale through every load, at several world sizes, and where cuts may fall."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import CutError, MismatchError
from qload.formats import Fp8Config
from qload.parallel import FakeWorld, Rank
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.formats.fp8_layers import BLOCKS, codes, layer, weights

pytestmark = pytest.mark.usefixtures("seen_texts")

N, K = 64, 48
SMALL = Fp8Config("block", (8, 12))
SCALES = [
    pytest.param((), Fp8Config(), id="()"),
    pytest.param((1,), Fp8Config(), id="(1,)"),
    pytest.param((1, 1), Fp8Config(), id="(1, 1)"),
    pytest.param((N,), Fp8Config(), id="(N,)"),
    pytest.param((N, 1), Fp8Config(), id="(N, 1)"),
    pytest.param((1, N), Fp8Config(), id="(1, N)"),
    pytest.param((N,), Fp8Config("channel", divide=True), id="(N,), inverse"),
    pytest.param((8, 4), SMALL, id="blocks"),
]


def stored(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes, and scales that all differ."""
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    return codes(N, K, seed), scale


def meant(weight: Tensor, scale: Tensor, config: Fp8Config) -> Tensor:
    """What the layer means, written out: a scale for every element."""
    if config.block:
        wide = scale.repeat_interleave(8, 0).repeat_interleave(12, 1)
    else:
        wide = scale.reshape(-1, 1).expand(N, 1) if scale.numel() == 1 else scale.reshape(N, 1)
    return weight.float() / wide if config.divide else weight.float() * wide


def opened(shape: tuple[int, ...], config: Fp8Config, rank: Rank) -> tuple[Weights, list[Tensor]]:
    """Two layers, q and k, and what they mean."""
    pairs = [stored(shape, seed) for seed in (0, 1)]
    tensors = [layer(name, *pair, "weight_scale_inv") for name, pair in zip("qk", pairs, strict=True)]
    return weights({**tensors[0], **tensors[1]}, config, rank), [meant(*pair, config) for pair in pairs]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("shape", "config"), SCALES)
def test_trap_43_every_shape_of_scale_goes_through_every_load(
    shape: tuple[int, ...], config: Fp8Config, world: int
) -> None:
    for rank in FakeWorld(world):
        view, (q, k) = opened(shape, config, rank)
        here = rank.rank()

        assert_same_bits(view.get_weights("q").dequantize(), q)
        assert_same_bits(view.get_weights_col("q").dequantize(), q.chunk(world)[here])
        assert_same_bits(view.get_weights_row("q").dequantize(), q.chunk(world, 1)[here])
        halves = torch.cat([half.chunk(world)[here] for half in q.chunk(2)])
        assert_same_bits(view.get_weights_col_packed("q", 2).dequantize(), halves)
        both = torch.cat([q.chunk(world)[here], k.chunk(world)[here]])
        assert_same_bits(view.get_multi_weights_col(["q", "k"]).dequantize(), both)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_trap_43_fused_parts_keep_a_scale_each(world: int) -> None:
    """Queries, keys and values of other widths and other scales: nothing is requantized, no maximum taken."""
    parts = {"q": (codes(64, K), 0.5), "k": (codes(16, K, 1), 3.0), "v": (codes(16, K, 2), 0.1)}
    tensors: dict[str, Tensor] = {}
    for name, (weight, scale) in parts.items():
        tensors |= {**layer(name, weight, torch.tensor(scale)), f"{name}.input_scale": torch.tensor([scale])}

    for rank in FakeWorld(world):
        fused: Any = weights(tensors, rank=rank).get_multi_weights_col(["q", "k", "v"])

        want = [w.float().chunk(world)[rank.rank()] * torch.tensor(s) for w, s in parts.values()]
        assert_same_bits(fused.dequantize(), torch.cat(want))
        assert (
            fused.weight_scale.tolist() == fused.input_scale.tolist() == torch.tensor([0.5, 3, 0.1]).tolist()
        )
        assert fused.layer.parts == tuple(len(part) for part in want)


@pytest.mark.parametrize("world", [1, 2])
def test_trap_43_a_layer_that_is_stored_fused_may_have_a_scale_for_each_part(world: int) -> None:
    scale = torch.tensor([0.5, 3.0, 0.1])
    tensors = layer("qkv", codes(96, K), scale)

    for rank in FakeWorld(world):
        got = weights(tensors, rank=rank).get_weights_col_packed("qkv", (4, 1, 1)).dequantize()

        parts = zip(codes(96, K).float().split([64, 16, 16]), scale, strict=True)
        assert_same_bits(got, torch.cat([(part * s).chunk(world)[rank.rank()] for part, s in parts]))
    with pytest.raises(MismatchError, match="a load in 3 parts"):
        weights(tensors).get_weights("qkv")


@pytest.mark.parametrize(("shape", "other"), [((), (N,)), ((N, 1), (1,)), ((), (3,))], ids=str)
def test_parts_whose_scales_mean_something_else_do_not_fuse(
    shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    tensors = {**layer("q", codes(N, K), torch.ones(shape)), **layer("k", codes(N, K), torch.ones(other))}

    with pytest.raises(MismatchError, match="parts of a fused layer differ in config"):
        weights(tensors).get_multi_weights_col(["q", "k"])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("shape", "other"),
    [((), (1, 1)), ((1, 1), (1,)), ((N,), (N, 1)), ((1, N), (N,)), ((N, 1), (1, N))],
    ids=str,
)
def test_parts_whose_scales_mean_the_same_fuse_in_the_shape_of_the_first(
    shape: tuple[int, ...], other: tuple[int, ...], world: int
) -> None:
    a, b = 1 + torch.rand(shape), 1 + torch.rand(other)
    tensors = {**layer("q", codes(N, K), a), **layer("k", codes(N, K, 1), b)}

    for rank in FakeWorld(world):
        fused: Any = weights(tensors, rank=rank).get_multi_weights_col(["q", "k"])

        both = [codes(N, K, i).float() * s.reshape(-1, 1) for i, s in enumerate((a, b))]
        assert_same_bits(fused.dequantize(), torch.cat([w.chunk(world)[rank.rank()] for w in both]))
        assert fused.weight_scale.ndim == max(len(shape), 1)


def test_trap_46_parts_of_which_one_has_an_activation_scale_do_not_fuse() -> None:
    tensors = {**layer("q", codes(N, K), torch.ones(1)), **layer("k", codes(N, K), torch.ones(1))}

    with pytest.raises(MismatchError, match="differ in tensors"):
        weights({**tensors, "q.input_scale": torch.ones(1)}).get_multi_weights_col(["q", "k"])


@pytest.mark.parametrize(("outputs", "inputs"), [(576, 192), (200, 320), (192, 128)])
def test_trap_44_the_last_block_of_outputs_and_inputs_may_be_short(outputs: int, inputs: int) -> None:
    grid = (-(-outputs // 128), -(-inputs // 128))
    scale = torch.arange(1.0, 1 + grid[0] * grid[1]).reshape(grid)
    tensors = layer("a", codes(outputs, inputs), scale, "weight_scale_inv")

    got = weights(tensors, BLOCKS).get_weights("a").dequantize()

    for n in range(grid[0]):
        for k in range(grid[1]):
            here = slice(128 * n, 128 * n + 128), slice(128 * k, 128 * k + 128)
            assert_same_bits(got[here], codes(outputs, inputs)[here].float() * scale[n, k])


@pytest.mark.parametrize("load", [Weights.get_weights_col, Weights.get_weights_row])
def test_trap_44_a_cut_inside_of_a_block_is_refused_by_every_rank_alike(load: Any) -> None:
    tensors = layer("a", codes(192, 192), torch.ones(2, 2), "weight_scale_inv")
    texts = set()
    for rank in FakeWorld(2):
        with pytest.raises(
            CutError, match="= 192 at 96 for 2 ranks\n  cuts must be multiples of 128"
        ) as caught:
            load(weights(tensors, BLOCKS, rank), "a")
        texts.add(str(caught.value))

    assert len(texts) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_trap_44_a_seam_inside_of_a_block_is_refused(world: int) -> None:
    """The second part's rows would take the scale of the first's last block."""
    tensors = {
        **layer("q", codes(192, 8), torch.ones(2, 1), "weight_scale_inv"),
        **layer("k", codes(128, 8), torch.ones(1, 1), "weight_scale_inv"),
    }

    with pytest.raises(CutError, match=r"q\.weight_scale_inv: cannot cut N = 192"):
        weights(tensors, BLOCKS, Rank(0, world)).get_multi_weights_col(["q", "k"])


def test_trap_44_a_packed_layer_of_blocks_is_shared_part_by_part() -> None:
    scale = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    tensors = layer("qkv", codes(512, 8), scale, "weight_scale_inv")

    for rank in FakeWorld(2):
        got = weights(tensors, BLOCKS, rank).get_weights_col_packed("qkv", 2).dequantize()

        blocks = [block * s for block, s in zip(codes(512, 8).float().split(128), scale, strict=True)]
        assert_same_bits(got, torch.cat([blocks[rank.rank()], blocks[2 + rank.rank()]]))


def test_transformers_calls_the_scale_of_activations_by_another_name() -> None:
    tensors = layer("up", *stored(()), "weight_scale_inv")
    view = weights({**tensors, "up.activation_scale": torch.tensor(0.25)}, Fp8Config(input_scale=True))

    weight = view.get_weights("up")

    assert weight.fields()["input_scale"].tolist() == [0.25]
    assert view.report().complete
