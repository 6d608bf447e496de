"""Blocks of ggml: values of gguf-py for each type, and by hand for the types that gguf-py does not decode."""

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qload import FakeWorld, GGUFConfig, GGUFWeight, open_checkpoint
from qload.errors import ArgumentError, CutError, NonfiniteScaleError
from qload.layouts import ggml_grids
from qload.layouts.ggml_grids import ALL_DECODERS, scale_bytes
from qload.spec.weight import Layer
from qload.storage import BLOCK_TYPES
from qload.testing import assert_same_bits
from qload.verify import verify
from tests.paths import FIXTURES
from tests.storage.gguf_files import blocks, gguf_file

ALL_TYPES = FIXTURES / "gguf" / "all_types"
EXPECTED = load_file(ALL_TYPES / "expected" / "expected.safetensors")
UNKNOWN_TO_GGUF_PY = {"Q1_0", "Q2_0"}


def weight_of(kind: str, content: bytes, K: int) -> GGUFWeight:
    stored = BLOCK_TYPES[kind]
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return GGUFWeight(config=GGUFConfig(kind), blocks=tensor.reshape(-1, K // stored.elements, stored.nbytes))


def half(value: float) -> bytes:
    return struct.pack("<e", value)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_type_means_what_gguf_py_says(name: str) -> None:
    with open_checkpoint(ALL_TYPES) as weights:
        assert_same_bits(weights.get_weights(f"layers.{name}").dequantize(), EXPECTED[name])


def test_the_fixture_has_every_type_that_its_tool_decodes() -> None:
    assert {name.upper() for name in EXPECTED} - {"F32", "F16"} == BLOCK_TYPES.keys() - UNKNOWN_TO_GGUF_PY
    assert ALL_DECODERS.keys() == BLOCK_TYPES.keys()


def test_q4_0_by_hand() -> None:
    """Byte 0 has the elements 0 and 16; codes count from 8."""
    weight = weight_of("Q4_0", half(0.5) + bytes([0x9F] + [0x88] * 14 + [0x01]), 32)
    want = torch.zeros(1, 32)
    want[0, 0], want[0, 16], want[0, 15], want[0, 31] = 3.5, 0.5, -3.5, -4

    assert torch.equal(weight.dequantize(), want)


def test_q1_0_by_hand() -> None:
    """Bit j of byte i is the sign of element 8 i + j."""
    weight = weight_of("Q1_0", half(0.25) + bytes([0b101] + [0] * 14 + [0x80]), 128)
    want = torch.full((1, 128), -0.25)
    want[0, [0, 2, 127]] = 0.25

    assert torch.equal(weight.dequantize(), want)


def test_q2_0_by_hand() -> None:
    """Four codes a byte, the first in the low bits; they count from 1."""
    weight = weight_of("Q2_0", half(0.5) + bytes([0b11100100] + [0x55] * 15), 64)

    assert torch.equal(weight.dequantize()[0, :4], torch.tensor([-0.5, 0, 0.5, 1]))
    assert not weight.dequantize()[0, 4:].any()


def test_mxfp4_exponents_are_those_of_ggml() -> None:
    """An exponent of 255 is 2**127 and no NaN; those of 0 and 1 give subnormal floats."""
    content = b"".join(bytes([exponent] + [0x21] * 16) for exponent in (0, 1, 128, 255))
    values = weight_of("MXFP4", content, 128).dequantize()[0, ::32].double()  # e2m1 0.5

    assert values.tolist() == [2.0**-128, 2.0**-127, 1.0, 2.0**127]


def test_the_second_scale_of_nvfp4_multiplies_after_the_product(tmp_path: Path) -> None:
    content = bytes([0x38] * 4 + [0x22] * 32)  # e4m3 1, e2m1 1
    tensors = {
        "blk.0.a.weight": ("NVFP4", (2, 64), 2 * content),
        "blk.0.a.scale": ("F32", (1,), struct.pack("<f", 0.3)),
        "blk.0.a.input_scale": ("F32", (1,), struct.pack("<f", 7.0)),
    }
    (tmp_path / "a.gguf").write_bytes(gguf_file({}, tensors))

    with open_checkpoint(tmp_path) as weights:
        assert torch.equal(weights.get_weights("blk.0.a").dequantize(), torch.full((2, 64), 0.3))
    assert torch.equal(weight_of("NVFP4", content, 64).dequantize(), torch.ones(1, 64))


def test_fused_layers_keep_their_own_second_scales(tmp_path: Path) -> None:
    content = bytes([0x38] * 4 + [0x22] * 32)
    tensors = {}
    for name, scale in (("a", 0.5), ("b", 3.0)):
        tensors[f"blk.0.{name}.weight"] = ("NVFP4", (2, 64), 2 * content)
        tensors[f"blk.0.{name}.scale"] = ("F32", (1,), struct.pack("<f", scale))
    (tmp_path / "a.gguf").write_bytes(gguf_file({}, tensors))
    with open_checkpoint(tmp_path) as weights:
        fused = weights.get_multi_weights_col(["blk.0.a", "blk.0.b"], 0)

    assert fused.dequantize()[:, 0].tolist() == [0.5, 0.5, 3.0, 3.0]


def test_second_scales_of_parts_are_those_of_their_rows() -> None:
    content = torch.frombuffer(bytearray([0x38] * 4 + [0x22] * 32), dtype=torch.uint8).expand(3, 1, 36)
    weight = GGUFWeight(
        config=GGUFConfig("NVFP4"),
        blocks=content.contiguous(),
        scale=torch.tensor([2.0, 5.0]),
        layer=Layer(parts=(1, 2), K=64, whole=(3, 64)),
    )

    assert weight.dequantize()[:, 63].tolist() == [2.0, 5.0, 5.0]


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_TYPES if scale_bytes(kind)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path, kind: str, value: float) -> None:
    found, stored = scale_bytes(kind), BLOCK_TYPES[kind]
    assert found is not None
    start, stop, _ = found
    content = bytearray(4 * stored.nbytes)
    wrong = int.from_bytes(half(value), "little")
    at = 2 * stored.nbytes
    if kind == "IQ1_M":
        content[at + start + 1 : at + stop : 2] = bytes((wrong >> shift & 15) << 4 for shift in (0, 4, 8, 12))
    else:
        content[at + stop - 2 : at + stop] = half(value)
    tensors = {"blk.0.a.weight": (kind, (2, 2 * stored.elements), bytes(content))}
    (tmp_path / "a.gguf").write_bytes(gguf_file({}, tensors))

    with open_checkpoint(tmp_path) as weights, pytest.raises(NonfiniteScaleError) as caught:
        weights.get_weights("blk.0.a")
    assert caught.value.tensor == f"blk.0.a.{stored.suffix}"
    assert "scale-value" in [finding.rule for finding in verify(tmp_path).findings]
    with open_checkpoint(tmp_path, nonfinite="allow") as weights:
        assert not weights.get_weights("blk.0.a").dequantize()[1].isfinite().all()


def test_the_config_names_a_type_with_a_decoder() -> None:
    with pytest.raises(ArgumentError, match="gguf: type"):
        GGUFConfig("Q8_K")


@pytest.mark.parametrize(
    ("name", "entries", "elements"),
    [
        ("iq2_xxs", 256, 8),
        ("iq2_xs", 512, 8),
        ("iq2_s", 1024, 8),
        ("iq3_xxs", 256, 4),
        ("iq3_s", 512, 4),
        ("iq1_s", 2048, 8),
    ],
)
def test_entries_of_a_grid_are_all_different(name: str, entries: int, elements: int) -> None:
    grid = ggml_grids.grid(name)

    assert grid.shape == (entries, elements)
    assert len({tuple(entry) for entry in grid.tolist()}) == entries


def test_blocks_are_cut_between_blocks(tmp_path: Path) -> None:
    stored = blocks("Q8_0", (4, 96))
    (tmp_path / "a.gguf").write_bytes(gguf_file({}, {"blk.0.a.weight": stored}))
    with open_checkpoint(tmp_path, nonfinite="allow") as weights:
        whole = weights.get_weights("blk.0.a").dequantize()
    for rank in FakeWorld(3):
        with open_checkpoint(tmp_path, process_group=rank, nonfinite="allow") as weights:
            share = weights.get_weights_row("blk.0.a").dequantize()
            assert_same_bits(share, whole[:, 32 * rank.rank() : 32 * rank.rank() + 32])
    for rank in FakeWorld(2):
        with open_checkpoint(tmp_path, process_group=rank) as weights, pytest.raises(CutError):
            weights.get_weights_row("blk.0.a")
