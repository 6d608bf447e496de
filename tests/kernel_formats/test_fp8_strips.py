"""FP8 in strips: every shape of scales, values and bytes bit for bit, shares, and refusals."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.errors import RepackError
from qload.formats import Fp8Config, Fp8Weight
from qload.kernel_formats import Fp8StripsConfig, Fp8StripsWeight, repack, restore
from qload.layouts import strips
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.repacking import RepackingLoader
from qload.spec import Layer
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights

BLOCK = Fp8Config("block", (128, 128))


def ones(N: int = 64, K: int = 128) -> torch.Tensor:
    return torch.ones(N, K).to(torch.float8_e4m3fn)


def pack(weight: torch.Tensor, scale: torch.Tensor, config: Fp8Config | None = None) -> Fp8StripsWeight:
    stored = Fp8Weight(config=config or Fp8Config(), weight=weight, weight_scale=scale)
    packed = repack(stored, "strips")
    assert isinstance(packed, Fp8StripsWeight)
    return packed


def random_bytes(N: int, K: int, seed: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randint(256, (N, K), generator=make).to(torch.uint8).view(dtype)


@given(
    N=st.integers(1, 200),
    K=st.integers(1, 400),
    per=st.sampled_from(["tensor", "one by one", "channel", "row", "block", "wide blocks", "powers"]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    codes=st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]),
    static=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_values_are_the_same_and_the_checkpoint_comes_back_bit_for_bit(
    N: int, K: int, per: str, dtype: torch.dtype, codes: torch.dtype, static: bool, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    bn, bk = (64, 256) if per == "wide blocks" else (128, 128)
    blocks = -(-N // bn), -(-K // bk)
    shape = {"tensor": (1,), "one by one": (1, 1), "channel": (N, 1), "row": (1, N)}.get(per, blocks)
    scale = (torch.rand(shape, generator=make) + 0.01).to(dtype)
    if per == "powers":
        scale = (2.0 ** torch.randint(-20, 20, shape, generator=make)).to(torch.float8_e8m0fnu)
    config = Fp8Config("block", (bn, bk)) if shape is blocks else Fp8Config()
    weight = Fp8Weight(
        config=config,
        weight=random_bytes(N, K, seed, codes),
        weight_scale=scale,
        input_scale=torch.tensor([0.7]) if static else None,
    )

    packed = repack(weight, "strips")
    restored = restore(packed)

    assert type(packed) is Fp8StripsWeight
    assert_same_bits(packed.dequantize().nan_to_num(), weight.dequantize().nan_to_num())
    assert torch.equal(packed.dequantize().isnan(), weight.dequantize().isnan())
    assert (type(restored), restored.config, restored.layer) == (Fp8Weight, weight.config, weight.layer)
    assert restored.fields().keys() == weight.fields().keys()
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name].view(torch.uint8), tensor.view(torch.uint8))


def test_bytes_lie_as_codes_of_eight_bits_do() -> None:
    weight = random_bytes(128, 256, 0)

    packed = pack(weight, torch.tensor([1.0]))

    assert_same_bits(packed.qweight, strips.rows(8).pack(weight.view(torch.uint8).T.contiguous().int()))
    assert packed.padded_shape == (128, 256)


def test_padding_is_bytes_of_zero_and_scales_of_zero() -> None:
    packed = pack(ones(72, 130), torch.ones(72, 1))

    codes = strips.rows(8).unpack(packed.qweight)
    assert (tuple(codes.shape), packed.padded_shape) == ((256, 128), (128, 256))
    assert not bool(codes[130:].any() or codes[:, 72:].any())
    assert packed.scales.tolist() == [1.0] * 72 + [0.0] * 56


def test_blocks_become_tiles_of_64_outputs_and_128_inputs() -> None:
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])

    packed = pack(ones(200, 300), scale, BLOCK)

    assert packed.config == Fp8StripsConfig(blocks=True)
    assert packed.scales.tolist() == [[1, 1, 8, 8], [2, 2, 16, 16], [4, 4, 32, 32]]


def test_a_block_of_several_tiles_is_repeated() -> None:
    packed = pack(ones(128, 512), torch.tensor([[1.0, 2.0]]), Fp8Config("block", (128, 256)))

    assert packed.scales.tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]


def test_one_block_of_all_inputs_is_a_scale_an_output() -> None:
    packed = pack(ones(200, 100), torch.tensor([[1.0], [2.0]]), BLOCK)

    assert packed.config == Fp8StripsConfig(blocks=False)
    assert packed.scales[:200].tolist() == [1.0] * 128 + [2.0] * 72


def test_fused_parts_have_their_own_scale_in_their_own_columns() -> None:
    weight = Fp8Weight(
        config=Fp8Config("parts", axes="P"),
        weight=ones(96),
        weight_scale=torch.tensor([0.5, 4.0]),
        layer=Layer((32, 64), 128, (96, 128), "qk"),
    )

    packed = repack(weight, "strips")

    assert packed.dequantize()[:, 0].tolist() == [0.5] * 32 + [4.0] * 64
    assert_same_bits(restore(packed).fields()["weight_scale"], weight.weight_scale)


@pytest.mark.parametrize("rows", [False, True], ids=["outputs", "inputs"])
@pytest.mark.parametrize("config", [Fp8Config(), BLOCK], ids=["channel", "block"])
def test_shares_together_are_the_layer(config: Fp8Config, rows: bool) -> None:
    scale = torch.rand(2, 2) + 0.1 if config.block else torch.rand(256, 1) + 0.1
    codes = random_bytes(256, 256, 1).view(torch.uint8) & 0x3F
    tensors = {"a.weight": codes.view(torch.float8_e4m3fn), "a.weight_scale": scale}
    loader = RepackingLoader(FormatLoader(ConfiguredFormat(Fp8Weight, config)), "strips")

    def load(rank: int, world: int) -> Any:
        weights = Weights(MemoryStorage(tensors), loader=loader, process_group=Rank(rank, world))
        return weights.get_weights_row("a") if rows else weights.get_weights_col("a")

    whole, shares = load(0, 1), [load(rank, 2) for rank in (0, 1)]

    assert {type(each) for each in (whole, *shares)} == {Fp8StripsWeight}
    assert_same_bits(torch.cat([each.dequantize() for each in shares], 1 if rows else 0), whole.dequantize())


@pytest.mark.usefixtures("seen_texts")
def test_a_weight_built_by_hand_is_not_restored() -> None:
    packed = pack(ones(), torch.tensor([1.0]))
    by_hand = Fp8StripsWeight(config=packed.config, layer=Layer((64,), 128, (64, 128)), **packed.fields())

    with pytest.raises(RepackError, match="built by hand"):
        restore(by_hand)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("weight", "scale", "config", "text"),
    [
        pytest.param(
            ones().to(torch.float8_e4m3fnuz),
            torch.ones(1),
            Fp8Config(),
            "e4m3fn or float8_e5m2, got float8_e4m3fnuz",
            id="e4m3fnuz",
        ),
        pytest.param(ones(), torch.ones(1), Fp8Config(divide=True), "these divide", id="dividing scales"),
        pytest.param(
            ones(), torch.ones(1, 3), Fp8Config("block", (64, 48)), "got 64 and 48", id="blocks of 48 inputs"
        ),
        pytest.param(
            ones(96, 256), torch.ones(3, 2), Fp8Config("block", (32, 128)), "got 32 and 128", id="32 outputs"
        ),
        pytest.param(
            ones(64, 256), torch.tensor([[1.0, 0.0]]), BLOCK, "64 apart, got 0 to 1", id="a block of scale 0"
        ),
        pytest.param(
            ones(64, 256),
            torch.tensor([[1.0, 1e-30]]),
            BLOCK,
            "64 apart, got 1e-30 to 1",
            id="blocks far apart",
        ),
        pytest.param(
            ones(64, 256), torch.tensor([[1.0, torch.nan]]), BLOCK, "got nan", id="a block without a scale"
        ),
        pytest.param(
            ones(64, 256), torch.tensor([[1.0, torch.inf]]), BLOCK, "to inf", id="a block without end"
        ),
    ],
)
def test_what_strips_cannot_represent_is_refused(
    weight: torch.Tensor, scale: torch.Tensor, config: Fp8Config, text: str
) -> None:
    with pytest.raises(RepackError, match=text):
        pack(weight, scale, config)


@pytest.mark.usefixtures("seen_texts")
def test_a_share_is_refused_for_the_scales_of_its_layer() -> None:
    whole = Fp8Weight(config=BLOCK, weight=ones(128, 256), weight_scale=torch.tensor([[1.0, 0.0]]))
    share = Fp8Weight(config=BLOCK, weight=ones(128, 128), weight_scale=torch.tensor([[1.0]]))

    with pytest.raises(RepackError, match="64 apart, got 0 to 1"):
        repack(share, "strips", whole=whole)
