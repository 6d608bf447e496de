"""Quark: int4 and uint4 in both orders, MXFP6, patterns of single layers, and types of other programs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.configs import FoundConfig
from qload.detect import loader_from_config, read_claims
from qload.errors import (
    ConfigError,
    CutError,
    MissingTensorError,
    RepackError,
    ShapeError,
    UnsupportedFormatError,
)
from qload.formats import QuarkInt4Config, QuarkInt4Weight, QuarkMXFP6Config, QuarkMXFP6Weight
from qload.kernel_formats import repack, restore
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits, assert_within_bound
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

REORDERED = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word
N, K, GROUP = 32, 128, 32
INT4 = {"dtype": "int4", "qscheme": "per_group", "group_size": GROUP}


def section(weight: dict[str, Any] | None, **keys: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, **keys}


def pack(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Pack codes (R, C) along C, nibble i of word c with column 8 * c + order[i]."""
    rows = codes.reshape(codes.shape[0], -1, 8)[:, :, list(order)].long() & 15
    words = sum(rows[:, :, at] << 4 * at for at in range(8))
    assert isinstance(words, Tensor)
    return (words - (words >> 31 << 32)).int()


def int4(signed: bool, order: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a layer with drawn codes, and its values in float64."""
    chance = torch.Generator().manual_seed(7)
    low, high = (-8, 8) if signed else (0, 16)
    codes = torch.randint(low, high, (K, N), generator=chance)
    zeros = torch.randint(low, high, (K // GROUP, N), generator=chance)
    scales = (torch.arange(K // GROUP * N).reshape(-1, N) % 9 + 1.0) / 8
    tensors = {"weight": pack(codes, order), "weight_scale": scales.bfloat16()}
    tensors["weight_zero_point"] = pack(zeros, order)
    spread = [each.repeat_interleave(GROUP, 0).double() for each in (zeros, scales)]
    return tensors, ((codes.double() - spread[0]) * spread[1]).T


def weights(tensors: dict[str, Tensor], config: dict[str, Any], rank: Any = None) -> Weights:
    storage = MemoryStorage({f"mlp.up.{name}": tensor for name, tensor in tensors.items()})
    return Weights(storage, loader=loader_from_config(config, storage), process_group=rank)


def test_a_word_by_hand() -> None:
    """The nibbles of 0x76543210 are columns 0, 2, 4, 6, 1, 3, 5, 7, and 8 to 15 are negative as int4."""
    stored = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)  # 0xFEDCBA98
    scales = torch.ones(1, 16).bfloat16()
    want = [0, 4, 1, 5, 2, 6, 3, 7]

    for signed, shift in ((False, 8), (True, 0)):
        config = QuarkInt4Config(-1, signed)
        weight = QuarkInt4Weight(config=config, weight=stored, weight_scale=scales)
        upper = [code + 8 - 16 * signed for code in want]
        assert weight.dequantize()[:, 0].tolist() == [code - shift for code in (*want, *upper)]


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize("method", ["reorder", "order"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_codes_of_four_bits_whole_and_cut(dtype: str, method: str, world: int) -> None:
    tensors, want = int4(dtype == "int4", REORDERED if method == "reorder" else tuple(range(8)))
    config = section({**INT4, "dtype": dtype}, export={"pack_method": method})

    for dim, load in ((0, Weights.get_weights_col), (1, Weights.get_weights_row)):
        shares = [load(weights(tensors, config, rank), "mlp.up").dequantize() for rank in FakeWorld(world)]
        assert torch.equal(torch.cat(shares, dim), want.float())

    weight = weights(tensors, config).get_weights("mlp.up")
    for layout in ("panels", "strips", "awq"):
        packed = repack(weight, layout)
        assert_same_bits(packed.dequantize(), weight.dequantize())
        for name, tensor in restore(packed).fields().items():
            assert_same_bits(tensor, tensors[name])
    assert_within_bound(weight.get_linear(), weight, torch.arange(-192, 192).reshape(3, K).float() / 64)


def test_words_and_groups_are_not_cut() -> None:
    tensors, _ = int4(signed=True, order=REORDERED)

    for load, world in ((Weights.get_weights_col, 8), (Weights.get_weights_row, 8)):
        with pytest.raises(CutError, match=r"mlp\.up"):
            load(weights(tensors, section(INT4), Rank(0, world)), "mlp.up")


@pytest.mark.parametrize("outputs", [4, 12])
def test_outputs_that_do_not_fill_a_word_are_refused_by_name(outputs: int) -> None:
    tensors, _ = int4(signed=True, order=REORDERED)
    words = {"weight", "weight_zero_point"}
    padded = {
        name: tensor[:, : -(-outputs // 8) if name in words else outputs] for name, tensor in tensors.items()
    }

    with pytest.raises(UnsupportedFormatError) as caught:
        weights(padded, section(INT4)).get_weights("mlp.up")
    assert str(caught.value) == (
        f"quark_int4 of {outputs} outputs: not read by this qload\n"
        f"  reason   mlp.up.weight has {outputs} outputs, no multiple of 8, and pads its last word\n"
        "  remedy   amd-quark loads it, and its dequantize() gives plain weights"
    )
    scales = {**padded, "weight_scale": tensors["weight_scale"][:, :20]}
    with pytest.raises(ShapeError, match=r"mlp\.up\.weight: wrong shape"):
        weights(scales, section(INT4)).get_weights("mlp.up")


def six_bits(codes: Tensor) -> Tensor:
    """Pack codes (N, K) as little-endian numbers of four codes in three bytes."""
    rows = codes.reshape(codes.shape[0], -1, 4).long()
    numbers = sum(rows[:, :, at] << 6 * at for at in range(4))
    assert isinstance(numbers, Tensor)
    return torch.stack([numbers >> 8 * at & 255 for at in range(3)], -1).flatten(1).to(torch.uint8)


@pytest.mark.parametrize(
    ("element", "start", "largest"),
    [("e2m3", [0, 0.125, 0.25, 0.375, 0.5], 7.5), ("e3m2", [0, 0.0625, 0.125, 0.1875, 0.25], 28)],
)
def test_floats_of_six_bits_by_hand(element: Any, start: list[float], largest: float) -> None:
    codes = torch.arange(64)[None]
    weight = QuarkMXFP6Weight(
        config=QuarkMXFP6Config(element),
        weight=six_bits(codes),
        weight_scale=torch.tensor([[127, 129]], dtype=torch.uint8),
    )

    got = weight.dequantize()[0]

    assert got[:5].tolist() == start
    assert (got[31].item(), got[63].item()) == (largest, -4 * largest)
    assert got[:32].tolist() == sorted(got[:32].tolist())
    assert torch.equal(got[32:], -4 * got[:32])


def test_floats_of_six_bits_are_cut_between_groups() -> None:
    chance = torch.Generator().manual_seed(7)
    tensors = {"weight": six_bits(torch.randint(0, 64, (8, 128), generator=chance))}
    tensors["weight_scale"] = (torch.arange(32).reshape(8, 4) % 7 + 124).to(torch.uint8)
    stated = {"dtype": "fp6_e2m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    whole = weights(tensors, section(stated)).get_weights("mlp.up").dequantize()

    for dim, load in ((0, Weights.get_weights_col), (1, Weights.get_weights_row)):
        shares = [load(weights(tensors, section(stated), rank), "mlp.up") for rank in FakeWorld(4)]
        assert torch.equal(torch.cat([share.dequantize() for share in shares], dim), whole)
    with pytest.raises(CutError, match=r"mlp\.up"):
        Weights.get_weights_row(weights(tensors, section(stated), Rank(0, 8)), "mlp.up")


INT8 = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}


def int8() -> dict[str, Tensor]:
    codes = (torch.arange(8 * 64).reshape(8, 64) % 251 - 125).to(torch.int8)
    zeros = torch.zeros(8, dtype=torch.int8)
    return {"weight": codes, "weight_scale": torch.arange(8).bfloat16() + 1, "weight_zero_point": zeros}


def test_zero_points_of_int8_that_are_0_are_left_out() -> None:
    tensors = int8()
    weight = weights(tensors, section(INT8)).get_weights("mlp.up")

    assert weight.weight_zero_point is None
    assert torch.equal(weight.dequantize(), tensors["weight"] * tensors["weight_scale"].float()[:, None])


def test_int8_is_repacked_and_restored() -> None:
    tensors = int8()
    weight = weights(tensors, section(INT8)).get_weights("mlp.up")

    packed = repack(weight, "strips")

    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(restore(packed).weight_scale, tensors["weight_scale"])


def test_other_zero_points_of_int8_count() -> None:
    tensors = int8()
    tensors["weight_zero_point"][5] = 2
    weight = weights(tensors, section(INT8)).get_weights("mlp.up")

    shifted = tensors["weight"].float() - tensors["weight_zero_point"].float()[:, None]
    assert torch.equal(weight.dequantize(), shifted * tensors["weight_scale"].float()[:, None])
    with pytest.raises(RepackError, match="zero points"):
        repack(weight, "strips")


def test_patterns_of_layers_and_exclusions() -> None:
    layers = {
        "*.down_proj": {"weight": {**INT4, "dtype": "uint4"}},
        "model.layers.1.*": {"weight": None},
        "*.k_proj": None,
    }
    config = section(INT4, layer_quant_config=layers, exclude=["*lm_head"])
    tensors, _ = int4(signed=True, order=REORDERED)
    names = [f"model.layers.0.{name}_proj" for name in ("up", "down")]
    stored = {f"{name}.{field}": each for name in names for field, each in tensors.items()}
    plain = [f"model.layers.{at}.{name}_proj" for at, name in ((1, "up"), (0, "k"))] + ["lm_head"]
    stored |= {f"{name}.weight": torch.ones(8, 64).bfloat16() for name in plain}
    storage = MemoryStorage(stored)
    opened = Weights(storage, loader=loader_from_config(config, storage))

    assert [opened.get_weights(name).config.signed for name in names] == [True, False]
    assert {opened.get_weights(name).format for name in plain} == {"unquantized"}
    assert opened.report().complete


def test_patterns_of_keys_and_values_leave_the_queries() -> None:
    """`*v_proj` matches `qkv_proj`, the fused name of all three."""
    layers = {f"*{name}_proj": {"weight": {**INT4, "dtype": "uint4"}, "output_tensors": {}} for name in "kv"}
    tensors, _ = int4(signed=True, order=REORDERED)
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    storage = MemoryStorage({f"{name}.{field}": each for name in names for field, each in tensors.items()})
    opened = Weights(storage, loader=loader_from_config(section(INT4, layer_quant_config=layers), storage))

    assert [opened.get_weights(name).config.signed for name in names] == [True, False, False]


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "fp8"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}, "fp8"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}, "fp8"),
        (
            {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
            "mxfp8",
        ),
        ({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}, "ct_mxfp4"),
        (
            {"dtype": "fp6_e3m2", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
            "quark_mxfp6",
        ),
    ],
)
def test_each_type_has_its_format(stated: dict[str, Any], name: str) -> None:
    claims = read_claims(FoundConfig("config.json", "quantization_config", section(stated)))

    assert [fmt.weight_type.format for fmt in claims.formats] == [name]


@pytest.mark.parametrize(
    ("stated", "variant"),
    [
        ({"dtype": "int4", "qscheme": "per_channel"}, "dtype int4, qscheme per_channel"),
        ({"dtype": "uint2", "qscheme": "per_group", "group_size": 32}, "dtype uint2, qscheme per_group"),
        (
            {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "scale_format": "e4m3"},
            "dtype fp4, qscheme per_group",
        ),
        ({**INT4, "zero_point_type": "float32"}, "dtype int4, qscheme per_group"),
        ({**INT8, "ch_axis": 1}, "dtype int8, qscheme per_channel, ch_axis 1"),
        ({**INT4, "ch_axis": 0}, "dtype int4, qscheme per_group, ch_axis 0"),
    ],
)
def test_other_types_are_refused_by_name(stated: dict[str, Any], variant: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=variant) as caught:
        read_claims(FoundConfig("config.json", "quantization_config", section(stated)))
    assert "amd-quark" in caught.value.remedy

    layers = {"*.down": {"weight": stated}}
    claims = read_claims(
        FoundConfig("config.json", "quantization_config", section(INT4, layer_quant_config=layers))
    )
    assert isinstance(claims.rules[0].formats, UnsupportedFormatError)


def test_quantized_biases_are_refused_by_name() -> None:
    layer = {"weight": INT8, "bias": {"dtype": "int8", "qscheme": "per_tensor"}}

    with pytest.raises(UnsupportedFormatError, match=r"quantized biases.*\n.*global_quant_config\.bias"):
        read_claims(FoundConfig("config.json", "", {**section(INT8), "global_quant_config": layer}))


@pytest.mark.parametrize("pattern", ["pack_method", "group_size"])
def test_a_wrong_value_names_its_key(pattern: str) -> None:
    changed = section({**INT4, "group_size": 0}) if pattern == "group_size" else section(INT4)
    changed |= {"export": {"pack_method": "sorted"}} if pattern == "pack_method" else {}

    with pytest.raises(ConfigError, match=pattern):
        read_claims(FoundConfig("config.json", "quantization_config", changed))


@pytest.mark.parametrize("name", ["input_rotation", "input_prescale"])
def test_a_layer_with_a_change_of_its_inputs_is_refused(name: str) -> None:
    tensors, _ = int4(signed=True, order=REORDERED)

    with pytest.raises(UnsupportedFormatError, match=f"mlp.up.{name} changes the result") as caught:
        weights({**tensors, name: torch.ones(K)}, section(INT4)).get_weights("mlp.up")
    assert "amd-quark" in caught.value.remedy


def test_a_rotation_shared_by_layers_is_refused() -> None:
    tensors, _ = int4(signed=True, order=REORDERED)
    storage = MemoryStorage({"mlp.up.weight": tensors["weight"], "shared_input_rotation_128": torch.eye(K)})

    with pytest.raises(UnsupportedFormatError, match="shared_input_rotation_128 changes the result"):
        loader_from_config(section(INT4), storage)


@pytest.mark.parametrize(
    "online",
    [
        {"r1": True, "online_r1_rotation": True},
        {"r1": False, "r4": True},
        {"online_config": {"online_rotation_layers": ["mlp.up"]}},
    ],
)
def test_rotations_at_runtime_are_refused(online: dict[str, Any]) -> None:
    config = section(INT4, algo_config=[{"name": "awq"}, {"name": "rotation", **online}])

    with pytest.raises(UnsupportedFormatError, match=r"algo_config\.1"):
        read_claims(FoundConfig("config.json", "quantization_config", config))


def test_rotations_in_the_weights_are_read() -> None:
    tensors, want = int4(signed=True, order=REORDERED)
    config = section(INT4, algo_config=[{"name": "rotation", "r1": True, "r2": True, "r3": True}])

    assert torch.equal(weights(tensors, config).get_weights("mlp.up").dequantize(), want.float())


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_zero_points_may_be_missing_only_from_a_symmetric_type(dtype: str) -> None:
    tensors, _ = int4(signed=dtype == "int4", order=REORDERED)
    del tensors["weight_zero_point"]

    weight = weights(tensors, section({**INT4, "dtype": dtype, "symmetric": True})).get_weights("mlp.up")
    assert weight.weight_zero_point is None
    with pytest.raises(MissingTensorError, match=r"mlp\.up\.weight_zero_point"):
        weights(tensors, section({**INT4, "dtype": dtype, "symmetric": False})).get_weights("mlp.up")
