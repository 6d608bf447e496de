"""MXFP4, as compressed-tensors writes it and as gpt-oss stores its experts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.checkpoint import layers
from qload.detect import loader_from_config
from qload.errors import ArgumentError, CutError
from qload.formats import CTMXFP4Weight, MXFP4Config, MXFP4ExpertsWeight
from qload.kernel_formats import repack, restore
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

CODES = torch.arange(0x10, 0x100, 0x22).to(torch.uint8)  # 0x10, 0x32, ... 0xFE: the codes 0 to 15 in order
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def experts(E: int = 2, N: int = 4, groups: int = 2) -> dict[str, Tensor]:
    """Every group holds the codes 0 to 15 twice; expert e, output n and group g scale by 2**(e + n + g)."""
    exponents = torch.arange(E)[:, None, None] + torch.arange(N)[:, None] + torch.arange(groups) + 127
    return {"_blocks": CODES.repeat(E, N, groups, 2), "_scales": exponents.to(torch.uint8)}


def load(stored: dict[str, Tensor], kind: Any, rank: Any = None) -> Weights:
    mark = "" if kind is MXFP4ExpertsWeight else "."
    named = {f"mlp.up{mark}{name}": tensor for name, tensor in stored.items()}
    loader = FormatLoader(ConfiguredFormat(kind, MXFP4Config()))
    return Weights(MemoryStorage(named), loader=loader, process_group=rank)


def test_dequantize_by_hand() -> None:
    """Scales of 2, of 2**-127 and of NaN."""
    weight = CTMXFP4Weight(
        config=MXFP4Config(),
        weight_packed=CODES.repeat(1, 6),
        weight_scale=torch.tensor([[128, 0, 255]], dtype=torch.uint8),
    )

    got = weight.dequantize()

    assert got[0, :32].tolist() == [2 * value for value in VALUES] * 2
    assert got[0, 32:64].tolist() == [2.0**-127 * value for value in VALUES] * 2
    assert got[0, 64:].isnan().all()


def test_experts_by_hand() -> None:
    weight = load(experts(), MXFP4ExpertsWeight).get_weights("mlp.up")

    assert weight.shape == (2, 4, 64)
    assert weight.dequantize()[1, 2].tolist() == [8 * v for v in VALUES * 2] + [16 * v for v in VALUES * 2]


def test_experts_have_their_own_codes() -> None:
    blocks = torch.randint(256, (3, 4, 2, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scales = torch.arange(24).reshape(3, 4, 2).to(torch.uint8) + 115
    fields = torch.stack([blocks & 15, blocks >> 4], -1).reshape(3, 4, 64).long()
    want = torch.tensor(VALUES)[fields] * torch.exp2(scales.float() - 127).repeat_interleave(32, 2)

    weight = load({"_blocks": blocks, "_scales": scales}, MXFP4ExpertsWeight).get_weights("mlp.up")

    assert torch.equal(weight.dequantize(), want)
    assert torch.equal(weight.expert(2).dequantize(), want[2])


@pytest.mark.parametrize(
    ("dim", "load_share"), [(1, Weights.get_weights_col), (2, Weights.get_weights_row)], ids=["N", "K"]
)
def test_every_rank_has_its_share_of_every_expert(dim: int, load_share: Any) -> None:
    whole = load(experts(), MXFP4ExpertsWeight).get_weights("mlp.up").dequantize()

    shares = [load_share(load(experts(), MXFP4ExpertsWeight, rank), "mlp.up") for rank in FakeWorld(2)]

    assert torch.equal(torch.cat([share.dequantize() for share in shares], dim), whole)


@pytest.mark.parametrize("config", [None, {"quant_method": "mxfp4"}])
def test_openai_stores_blocks_and_scales_with_a_dot(config: dict[str, Any] | None) -> None:
    matrix, tensors = "block.0.mlp.mlp1_weight", experts()
    stored = MemoryStorage({f"{matrix}.{name[1:]}": tensor for name, tensor in tensors.items()})
    want = load(tensors, MXFP4ExpertsWeight).get_weights("mlp.up").dequantize()

    def weights(rank: Any) -> Weights:
        return Weights(stored, loader=loader_from_config(config, stored), process_group=rank)

    for world in (1, 2):
        for dim, cut in ((1, Weights.get_weights_col), (2, Weights.get_weights_row)):
            shares = [cut(weights(rank), matrix).dequantize() for rank in FakeWorld(world)]
            assert torch.equal(torch.cat(shares, dim), want)
    assert [layer.prefix for layer in layers(weights(None))] == [matrix]


def test_gate_and_up_that_are_stored_fused_are_shared_apart() -> None:
    whole = load(experts(), MXFP4ExpertsWeight).get_weights("mlp.up").dequantize()

    share = load(experts(), MXFP4ExpertsWeight, Rank(1, 2)).get_weights_col_packed("mlp.up", 2)

    assert torch.equal(share.dequantize(), whole[:, [1, 3]])


@pytest.mark.parametrize("kind", [CTMXFP4Weight, MXFP4ExpertsWeight], ids=lambda kind: kind.format)
def test_a_cut_inside_of_a_block_is_refused(kind: Any) -> None:
    plain = {"weight_packed": torch.zeros(1, 32).byte(), "weight_scale": torch.zeros(1, 2).byte()}
    stored = experts() if kind is MXFP4ExpertsWeight else plain

    with pytest.raises(CutError, match="cuts must be multiples of 32 "):
        load(stored, kind, Rank(0, 4)).get_weights_row("mlp.up")


def test_experts_are_no_single_linear() -> None:
    with pytest.raises(ArgumentError, match=r"expected a matrix \(N, K\)"):
        load(experts(), MXFP4ExpertsWeight).get_weights("mlp.up").get_linear()


def test_an_expert_is_one_of_those_there_are() -> None:
    stack = load(experts(E=2, N=4, groups=3), MXFP4ExpertsWeight).get_weights("mlp.up")

    assert stack.shape == (2, 4, 96)
    for index in (0, 1):
        assert torch.equal(stack.expert(index).dequantize(), stack.dequantize()[index])
        assert stack.expert(index).layer.name == f"mlp.up.expert {index}"
    for index in (-1, 2, 3):
        with pytest.raises(ArgumentError, match=f"index\n  expected an expert, 0 to 1\n  got      {index}"):
            stack.expert(index)


@pytest.mark.parametrize("codes", [torch.uint8, torch.int8])
@pytest.mark.parametrize("exponents", [torch.uint8, torch.float8_e8m0fnu])
def test_bytes_mean_the_same_in_each_dtype_and_come_back_from_a_kernel(
    codes: torch.dtype, exponents: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (128, 64), generator=generator).to(torch.uint8)
    scales = torch.randint(120, 130, (128, 4), generator=generator).to(torch.uint8)
    config = MXFP4Config(("weight", "scale"))
    stored = {"mlp.up.weight": packed.view(codes), "mlp.up.scale": scales.view(exponents)}
    loader = FormatLoader(ConfiguredFormat(CTMXFP4Weight, config))
    fields = torch.stack([packed & 15, packed >> 4], -1).reshape(128, 128).long()
    want = torch.tensor(VALUES)[fields] * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)

    weight = Weights(MemoryStorage(stored), loader=loader).get_weights("mlp.up")

    assert torch.equal(weight.dequantize(), want)
    assert (weight.weight_packed.dtype, weight.weight_scale.dtype) == (codes, exponents)
    marlin = repack(weight, "marlin", dtype=torch.bfloat16)
    back = restore(marlin)
    assert torch.equal(marlin.dequantize(), want)
    assert (back.config, back.weight_packed.dtype, back.weight_scale.dtype) == (
        weight.config,
        codes,
        exponents,
    )
    assert torch.equal(back.weight_packed.view(torch.uint8), packed)
    assert torch.equal(back.weight_scale.view(torch.uint8), scales)
    x = torch.randint(-2, 3, (3, 128), generator=generator).float()
    assert torch.equal(weight.get_linear()(x), x @ want.T)
