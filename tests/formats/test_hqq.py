"""HQQ: settings of layers, groups on both axes, words of every width, shares, and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.detect import loader_from_config
from qload.errors import (
    ArgumentError,
    ConfigError,
    CutError,
    ShapeError,
    UnsupportedFormatError,
)
from qload.formats import HQQConfig, HQQWeight
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.verify import verify
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

BLOCKS = {1: 8, 2: 4, 3: 10, 4: 2, 5: 1, 6: 1, 8: 1}
NAMES = {1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8", 5: "8bit_u8", 6: "8bit_u8", 8: "8bit_u8"}


def ascii_of(text: str) -> Tensor:
    return torch.tensor([ord(letter) for letter in text], dtype=torch.uint8)


def layer(
    N: int, K: int, bits: int, group: int | None, axis: int, *, as_floats: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Return a layer's tensors, and its weight; differences and products are exact."""
    codes = np.arange(N * K).reshape(N, K) * 5 % 2**bits
    matrix = codes if group is None else codes.reshape(-1, group) if axis else codes.reshape(group, -1)
    shape = (matrix.shape[0], 1) if axis else (1, matrix.shape[1])
    count = max(shape)
    scales = (2.0 ** (np.arange(count) % 4 - 1)).reshape(shape)
    zeros = (np.arange(count) % 7 / 2 - 1).reshape(shape)
    weight = torch.from_numpy(((matrix - zeros) * scales).reshape(N, K)).float()
    per = BLOCKS[bits]
    height = -(-len(matrix) // per)
    padded = np.zeros((per, height, matrix.shape[1]), np.int64)
    padded.reshape(-1, matrix.shape[1])[: len(matrix)] = matrix
    words = sum(block << bits * (per - 1 - at) for at, block in enumerate(padded))
    packed = torch.from_numpy(words).to(torch.int32 if bits == 3 else torch.uint8)
    tensors = {
        "W_q": packed.view(torch.float16) if as_floats else packed,
        "scale": torch.from_numpy(scales).half(), "zero": torch.from_numpy(zeros).half(),
        "nbits": torch.tensor(bits, dtype=torch.int32), "axis": torch.tensor(axis, dtype=torch.int32),
        "shape": torch.tensor([N, K]), "packing": ascii_of(NAMES[bits]),
        "compute_dtype": ascii_of("torch.float16"), "unpack_view_dtype": ascii_of("torch.uint8"),
    }  # fmt: skip
    flags = ("view_as_float", "quant_scale", "quant_zero", "channel_wise", "encoded_state_dict", "optimize")
    tensors |= {name: torch.tensor(int(name[0] in "ceo"), dtype=torch.uint8) for name in flags}
    tensors["view_as_float"] += as_floats
    return tensors | ({} if group is None else {"group_size": torch.tensor(group, dtype=torch.int32)}), weight


def weights(stored: dict[str, Tensor], rank: Any = None) -> Weights:
    storage = MemoryStorage({f"mlp.up.{name}": tensor for name, tensor in stored.items()})
    return Weights(storage, loader=loader_from_config(None, storage), process_group=rank)


def test_a_word_by_hand() -> None:
    """The first of two rows has the high bits; 15 - 0.0009765625 rounds to 15 in float16."""
    weight = HQQWeight(
        config=HQQConfig(bits=4, N=2, K=2),
        weight=torch.tensor([[0xF1, 0x0A]], dtype=torch.uint8),
        scale=torch.tensor([[2.0], [0.5]]).half(),
        zero=torch.tensor([[0.0009765625], [3.0]]).half(),
    )

    assert weight.dequantize().tolist() == [[30, -0.001953125], [-1, 3.5]]


@pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16, torch.float32])
def test_steps_are_rounded_to_the_wider_of_two_dtypes(compute: torch.dtype) -> None:
    """Codes have compute_dtype, scales and zero points float16: torch promotes them."""
    codes = torch.arange(16.0).reshape(2, 8)
    scale, zero = torch.tensor([[2.0], [0.3]]).half(), torch.tensor([[0.0009765625], [7.3]]).half()
    packed = (codes[0] * 16 + codes[1]).to(torch.uint8)[None]
    config = HQQConfig(bits=4, N=2, K=8, compute_dtype=compute)

    weight = HQQWeight(config=config, weight=packed, scale=scale, zero=zero)

    assert torch.equal(weight.dequantize(), ((codes.to(compute) - zero) * scale).float())


@pytest.mark.parametrize("bits", BLOCKS)
@pytest.mark.parametrize(("group", "axis"), [(16, 1), (None, 1), (8, 0), (None, 0), (96, 1), (48, 0)])
def test_every_width_whole_and_cut(bits: int, group: int | None, axis: int) -> None:
    N, K = 24, 64
    stored, want = layer(N, K, bits, group, axis)
    for world in (1, 2, 4):
        ranks = [weights(stored, rank) for rank in FakeWorld(world)]
        for dim, load in ((0, Weights.get_weights_col), (1, Weights.get_weights_row)):
            share = (N, K)[dim] // world
            lawful = group is None or (axis == 0 and dim == 1 and N % group == 0)
            if axis == 1 and group is not None:
                lawful = share * K % group == 0 if dim == 0 else K % group == share % group == 0
            if world > 1 and not lawful:
                with pytest.raises(CutError, match=r"mlp\.up\."):
                    load(ranks[0], "mlp.up")
                continue
            assert torch.equal(torch.cat([load(rank, "mlp.up").dequantize() for rank in ranks], dim), want)
        assert world > 1 or not ranks[0].report().unused


@pytest.mark.parametrize(("group", "axis"), [(16, 1), (None, 1), (8, 0), (None, 0)])
def test_bytes_that_are_stored_as_floats(group: int | None, axis: int) -> None:
    stored, want = layer(24, 64, 4, group, axis, as_floats=True)

    assert stored["W_q"].dtype == torch.float16
    assert torch.equal(weights(stored).get_weights("mlp.up").dequantize(), want)
    rows = [weights(stored, rank) for rank in FakeWorld(2)]
    if axis == 1 or group is None:
        assert torch.equal(torch.cat([w.get_weights_col("mlp.up").dequantize() for w in rows]), want)
        assert torch.equal(torch.cat([w.get_weights_row("mlp.up").dequantize() for w in rows], 1), want)


@pytest.mark.parametrize(("group", "axis"), [(16, 1), (8, 0), (None, 0)])
@pytest.mark.parametrize("bits", [2, 3])
def test_fused_parts_are_packed_anew(bits: int, group: int | None, axis: int) -> None:
    (q, q_weight), (k, k_weight) = layer(32, 64, bits, group, axis), layer(16, 64, bits, group, axis)
    k["scale"], k_weight = k["scale"] * 2, k_weight * 2
    tensors = {f"{name}.{key}": t for name, part in (("q", q), ("k", k)) for key, t in part.items()}
    storage = MemoryStorage(tensors)

    fused = Weights(storage, loader=loader_from_config(None, storage)).get_multi_weights_col(["q", "k"])

    assert torch.equal(fused.dequantize(), torch.cat([q_weight, k_weight]))


def test_a_file_without_a_config_is_read(tmp_path: Path) -> None:
    stored, want = layer(16, 64, 4, 16, 1)
    tensors = {f"model.up.{name}": tensor for name, tensor in stored.items()}
    save_file(tensors | {"model.up.bias": torch.ones(16)}, tmp_path / "model.safetensors")

    with open_checkpoint(tmp_path) as opened:
        assert torch.equal(opened.get_weights("model.up").dequantize(), want)
        assert opened.report().unused == ["model.up.bias"]
    assert verify(tmp_path).verdict == "ok"


def test_negative_scales_are_findings(tmp_path: Path) -> None:
    stored, _ = layer(16, 64, 4, 16, 1)
    stored["scale"][3] *= -1
    save_file({f"model.up.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors")

    assert [(each.rule, each.tensor) for each in verify(tmp_path).findings] == [
        ("scale-value", "model.up.scale")
    ]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("nbits", 7, r"mlp\.up\.nbits: value\n  expected 1, 2, 3, 4, 5, 6, 8 or 1\.58\n  got      7"),
        ("axis", 2, r"mlp\.up\.axis: value\n  expected 0 or 1\n  got      2"),
        ("group_size", 48, r"group_size: value\n  expected a divisor of the 1024 elements\n  got      48"),
        ("packing", "2bit_u8", r"packing: value\n  expected 4bit_u8 for 4 bits\n  got      2bit_u8"),
        ("compute_dtype", "torch.int8", "compute_dtype: value"),
    ],
)
def test_settings_that_fit_no_layer_are_errors(name: str, value: Any, text: str) -> None:
    stored, _ = layer(16, 64, 4, 16, 1)
    stored[name] = ascii_of(value) if isinstance(value, str) else torch.tensor(value, dtype=torch.int32)

    with pytest.raises(ConfigError, match=text):
        weights(stored).get_weights("mlp.up")


@pytest.mark.parametrize("name", ["W_q", "scale", "zero"])
def test_shapes_that_contradict_the_settings_are_errors(name: str) -> None:
    stored, _ = layer(16, 64, 4, 16, 1)
    stored[name] = stored[name][:-1].contiguous()

    with pytest.raises(ShapeError, match=rf"mlp\.up\.{name}"):
        weights(stored).get_weights("mlp.up")


@pytest.mark.parametrize(("name", "value"), [("quant_scale", 1), ("quant_zero", 1), ("channel_wise", 0)])
def test_quantized_scales_are_refused(name: str, value: int) -> None:
    stored, _ = layer(16, 64, 4, 16, 1)
    stored[name] = torch.tensor(value, dtype=torch.uint8)

    with pytest.raises(UnsupportedFormatError) as caught:
        weights(stored).get_weights("mlp.up")

    assert str(caught.value) == (
        f"hqq with {name} {value}: not read by this qload\n"
        f"  reason   mlp.up.{name} is {value}\n"
        "  remedy   hqq loads it, and its dequantize() gives plain weights"
    )


@pytest.mark.parametrize("name", ["quant_scale", "quant_zero"])
def test_a_checkpoint_of_quantized_scales_is_not_called_sound(name: str, tmp_path: Path) -> None:
    stored, _ = layer(16, 64, 4, 16, 1)
    stored[name] = torch.tensor(1, dtype=torch.uint8)
    save_file({f"model.up.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors")

    assert verify(tmp_path).verdict == "incomplete"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_ternary_codes_are_packed_in_two_bits(dtype: torch.dtype) -> None:
    """hqq states 1.58 bits, in its encoded form as a float."""
    stored, want = layer(16, 64, 2, 16, 1)
    stored["nbits"] = torch.tensor(1.58 if dtype == torch.float32 else 2, dtype=dtype)

    weight = weights(stored).get_weights("mlp.up")

    assert weight.config.bits == 2
    assert torch.equal(weight.dequantize(), want)


@pytest.mark.parametrize("bits", [1, 4])
def test_ternary_codes_have_no_other_packing(bits: int) -> None:
    stored, _ = layer(16, 64, bits, 16, 1)
    stored["nbits"] = torch.tensor(1.58)

    with pytest.raises(ConfigError, match=r"packing: value\n  expected 2bit_u8 for 2 bits"):
        weights(stored).get_weights("mlp.up")


def test_a_weight_without_settings_needs_its_sizes() -> None:
    with pytest.raises(ArgumentError, match="bits, N and K"):
        HQQWeight(
            config=HQQConfig(bits=4), weight=torch.zeros(1, 2, dtype=torch.uint8),
            scale=torch.ones(2, 1).half(), zero=torch.ones(2, 1).half(),
        )  # fmt: skip
