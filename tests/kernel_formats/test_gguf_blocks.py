"""Blocks of GGUF in the orders of kernels: values and bytes bit for bit, shares, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import explain
from qload.checkpoint import open_checkpoint
from qload.errors import RepackError
from qload.formats import GGUFConfig, GGUFWeight
from qload.kernel_formats import Fp4StripsWeight, StripsWeight, repack, restore
from qload.layouts.ggml_grids import sample_blocks
from qload.parallel import FakeWorld
from qload.repacking import loaders
from qload.spec import Layer
from qload.storage import BLOCK_TYPES
from qload.testing import assert_same_bits
from tests.kernel_formats.test_fp4_strips import kernel_weight
from tests.paths import FIXTURES
from tests.storage.gguf_files import gguf_file

TYPES = {"Q4_0": StripsWeight, "Q8_0": StripsWeight, "MXFP4": Fp4StripsWeight, "NVFP4": Fp4StripsWeight}
every_type = pytest.mark.parametrize("kind", TYPES)
ALL_TYPES = FIXTURES / "gguf" / "all_types"


def weight_of(kind: str, N: int, K: int, scale: Tensor | None = None, **layer: Any) -> GGUFWeight:
    """Build a layer of random codes; scales that differ between the blocks of an output."""
    stored = BLOCK_TYPES[kind]
    blocks = sample_blocks(kind, N, K // stored.elements, stored.nbytes)
    if kind == "NVFP4":
        make = torch.Generator().manual_seed(N)
        blocks[..., :4] = torch.randint(0x7F, (*blocks.shape[:2], 4), generator=make)
    parts = layer.get("parts", (N,))
    return GGUFWeight(
        config=GGUFConfig(kind), blocks=blocks, scale=scale, layer=Layer(parts, K, (N, K), "up")
    )


def assert_is_stored(packed: Any, weight: GGUFWeight) -> None:
    restored = restore(packed)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert (type(restored), restored.config, restored.layer) == (GGUFWeight, weight.config, weight.layer)
    assert restored.fields().keys() == weight.fields().keys()
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name], tensor)


@every_type
@pytest.mark.parametrize(("N", "K"), [(64, 128), (3, 64), (72, 320)])
def test_blocks_have_the_same_values_in_strips_and_come_back_bit_for_bit(kind: str, N: int, K: int) -> None:
    weight = weight_of(kind, N, K)

    packed = repack(weight, "strips")

    assert type(packed) is TYPES[kind]
    assert_is_stored(packed, weight)
    if isinstance(packed, Fp4StripsWeight):  # as a kernel reads it
        assert torch.equal(kernel_weight(packed)[:N, :K], weight.dequantize().double())


@every_type
def test_fused_parts_come_back_bit_for_bit(kind: str) -> None:
    weight = weight_of(kind, 64, 128, parts=(40, 24))

    assert_is_stored(repack(weight, "strips"), weight)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("layout", ["panels", "marlin", "exllama", "gptq"])
def test_integers_of_blocks_come_back_from_other_layouts(kind: str, layout: str) -> None:
    weight = weight_of(kind, 64, 128)

    assert_is_stored(repack(weight, layout), weight)


@pytest.mark.parametrize("layout", ["marlin_vllm_0_11", "marlin_vllm_0_33"])
def test_fused_parts_without_a_second_scale_have_one_each_in_marlins_orders(layout: str) -> None:
    weight = weight_of("NVFP4", 64, 128, parts=(40, 24))
    weight.blocks[..., :4] = weight.blocks[..., :4] & 7 | 0x38  # scales that are read with bfloat16

    assert_is_stored(repack(weight, layout, dtype=torch.float16), weight)


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4"])
@pytest.mark.parametrize("layout", ["marlin_vllm_0_11", "marlin_vllm_0_33"])
def test_floats_of_blocks_come_back_from_marlins_orders(kind: str, layout: str) -> None:
    weight = weight_of("MXFP4", 64, 128)
    if kind == "NVFP4":
        weight = weight_of(kind, 64, 128, torch.tensor([0.3]))
        weight.blocks[..., :4] = weight.blocks[..., :4] & 7 | 0x38  # scales that are read with bfloat16

    assert_is_stored(repack(weight, layout, dtype=torch.bfloat16), weight)


@pytest.mark.parametrize("scale", [[0.3], [0.3, 7.1]], ids=["one", "one per part"])
def test_a_second_scale_multiplies_products_as_in_ggml(scale: list[float]) -> None:
    """Products of code, scale of 16 inputs and second scale are rounded once, those of ModelOpt twice."""
    parts = (16, 48) if len(scale) > 1 else (64,)
    weight = weight_of("NVFP4", 64, 128, torch.tensor(scale), parts=parts)

    packed: Any = repack(weight, "strips")

    assert_is_stored(packed, weight)
    each = [scale[0]] * 16 + [scale[-1]] * 48
    assert_same_bits(packed.column_scales, torch.tensor(each) * 2.0**8)


@pytest.mark.parametrize(("kind", "codes"), [("MXFP4", 1), ("NVFP4", 4)])
def test_no_zero_has_a_sign(kind: str, codes: int) -> None:
    weight = weight_of(kind, 64, 128)
    weight.blocks[..., codes:] = 0x88

    assert_same_bits(repack(weight, "strips").dequantize(), torch.zeros(64, 128))


@every_type
@pytest.mark.parametrize("rows", [False, True], ids=["outputs", "inputs"])
def test_shares_together_are_the_layer(kind: str, rows: bool, tmp_path: Path) -> None:
    stored = weight_of(kind, 128, 256)
    content = stored.blocks.numpy().tobytes()
    (tmp_path / "a.gguf").write_bytes(gguf_file({}, {"blk.0.a.weight": (kind, (128, 256), content)}))

    shares = []
    for rank in FakeWorld(2):
        with open_checkpoint(tmp_path, target="strips", process_group=rank) as weights:
            get = weights.get_weights_row if rows else weights.get_weights_col
            shares.append(get("blk.0.a"))

    assert {type(each) for each in shares} == {TYPES[kind]}
    joined = torch.cat([each.dequantize() for each in shares], 1 if rows else 0)
    assert_same_bits(joined, stored.dequantize())


def mxfp4_with(*exponents: int) -> GGUFWeight:
    weight = weight_of("MXFP4", 1, 32 * len(exponents))
    weight.blocks[0, :, 0] = torch.tensor(exponents)
    return weight


def nvfp4_with(byte: int) -> GGUFWeight:
    weight = weight_of("NVFP4", 2, 64)
    weight.blocks[1, 0, 2] = byte
    return weight


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("weight", "text"),
    [
        pytest.param(
            mxfp4_with(127, 255), r"1 of 2 scales of up.mxfp4 are 2\*\*127 in GGUF, and NaN", id="255"
        ),
        pytest.param(mxfp4_with(100, 125), r"1 of 2 .* more than 2\*\*24 times smaller", id="far apart"),
        pytest.param(nvfp4_with(0x7F), "1 of 8 scales of up.nvfp4 are 0 in GGUF, and NaN", id="0x7F"),
        pytest.param(nvfp4_with(0xB8), "1 of 8 scales of up.nvfp4 are negative", id="sign"),
        pytest.param(weight_of("IQ4_NL", 1, 32), "IQ4_NL are values of a table, or have 1 or", id="IQ4_NL"),
    ],
)
def test_what_strips_cannot_represent_is_refused(weight: GGUFWeight, text: str) -> None:
    with pytest.raises(RepackError, match=text):
        repack(weight, "strips")


def test_a_share_is_refused_for_the_exponents_of_its_layer() -> None:
    with pytest.raises(RepackError, match="more than"):
        repack(mxfp4_with(125), "strips", whole=mxfp4_with(125, 100))


def test_every_rank_refuses_for_the_exponents_of_one(tmp_path: Path) -> None:
    content = mxfp4_with(125, 125, 125, 100).blocks.numpy().tobytes()
    (tmp_path / "a.gguf").write_bytes(gguf_file({}, {"blk.0.a.weight": ("MXFP4", (1, 128), content)}))

    for rank in FakeWorld(2):
        with (
            open_checkpoint(tmp_path, target="strips", process_group=rank) as weights,
            pytest.raises(RepackError, match=r"1 of 4 scales .* more than"),
        ):
            weights.get_weights_row("blk.0.a")


IN_STRIPS_WITH_OFFSETS = ("Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K")


def test_auto_and_explain_choose_the_same_kernel_format_for_every_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test random blocks; strips cannot represent some of them."""
    monkeypatch.setattr(loaders, "compute_capability", lambda device: 90)
    explained = {
        layer.prefix: layer
        for layer in explain(ALL_TYPES, arch="sm90", tokens=(1,)).layers
        if layer.format == "gguf"
    }

    with open_checkpoint(ALL_TYPES, target="auto") as weights:
        loaded = {prefix: weights.get_weights(prefix) for prefix in explained}

    assert {prefix: layer.kernel_format for prefix, layer in explained.items()} == {
        prefix: weight.format for prefix, weight in loaded.items()
    }
    repacked = {prefix for prefix, weight in loaded.items() if weight.format != "gguf"}
    assert {explained[prefix].choices[0].kernel.endswith("decode") for prefix in repacked} == {True}
    assert {prefix.rpartition(".")[2].upper() for prefix in repacked} <= {*TYPES, *IN_STRIPS_WITH_OFFSETS}
    assert {"layers.q4_0", "layers.q8_0"} <= repacked
