"""torchao: classes of headers, swizzled scales, zero points of 0, declared inputs, refusals by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.detect import effective_claims, loader_from_config
from qload.errors import (
    ConfigError,
    CutError,
    FieldValueError,
    MismatchError,
    RepackError,
    ShapeError,
    UnsupportedFormatError,
)
from qload.formats import (
    MXFP8Config,
    MXFP8Weight,
    TorchAOInt4Config,
    TorchAOInt4Weight,
    TorchAOIntxConfig,
    TorchAOIntxWeight,
)
from qload.kernel_formats import repack, restore
from qload.layouts import swizzle
from qload.parallel import FakeWorld, Rank
from qload.testing import assert_same_bits, assert_within_bound
from qload.verify import verify
from qload.weights import Weights
from tests.detect.torchao_headers import (
    CONFIG,
    KINDS,
    K,
    N,
    described,
    layer,
    stored,
    torchao_mutations,
    try_torchao,
    value,
)
from tests.paths import cases
from tests.support.owners import StorageWithHeader

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def opened(storage: StorageWithHeader, rank: Any = None, config: Any = CONFIG) -> Weights:
    return Weights(storage, loader=loader_from_config(config, storage), process_group=rank)


def formula(kind: str, parts: dict[str, Tensor]) -> Tensor:
    """Weight of a layer by the formula of its class, in float64."""
    numbers = {name: part.double() for name, part in parts.items() if "float8_e8m0" not in str(part.dtype)}
    if kind in ("Float8Tensor", "Int8Tensor"):
        return (numbers["qdata"] - numbers.get("zero_point", torch.zeros(1))) * numbers["scale"]
    if kind == "IntxUnpackedToInt8Tensor":
        spread = {name: numbers[name].repeat_interleave(32, 1) for name in ("scale", "zero_point")}
        return (numbers["qdata"] - spread["zero_point"]) * spread["scale"]
    if kind == "MXTensor":
        powers = 2.0 ** (parts["scale"].view(torch.uint8).double() - 127)
        return numbers["qdata"] * powers.repeat_interleave(32, 1)
    pairs = parts["qdata"].view(torch.uint8).long()
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
    if kind == "Int4Tensor":
        spread = {name: numbers[name].T.repeat_interleave(32, 1) for name in ("scale", "zero_point")}
        return (codes - 16 * (codes > 7)) * spread["scale"] + spread["zero_point"]
    scales = numbers["scale"].repeat_interleave(16, 1) * numbers["per_tensor_scale"]
    return torch.tensor(E2M1).double()[codes] * scales


def test_intx_by_hand() -> None:
    weight = TorchAOIntxWeight(
        config=TorchAOIntxConfig(bits=4, group_size=2),
        weight=torch.tensor([[-8, 7, 3, 0]], dtype=torch.int8),
        weight_scale=torch.tensor([[0.5, 2]]).bfloat16(),
        weight_zero_point=torch.tensor([[1, -2]], dtype=torch.int8),
    )

    assert weight.dequantize().tolist() == [[-4.5, 3, 10, 4]]


def test_int4_by_hand() -> None:
    """The bytes 0x7F and 0x80 are the codes -1, 7 and 0, -8."""
    weight = TorchAOInt4Weight(
        config=TorchAOInt4Config(group_size=2),
        weight=torch.tensor([[0x7F, -0x80]], dtype=torch.int8),
        weight_scale=torch.tensor([[0.5], [2]]),
        weight_zero_point=torch.tensor([[1.0], [-3]]),
    )

    assert weight.dequantize().tolist() == [[0.5, 4.5, -3, -19]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_class_whole_and_cut(kind: str, world: int) -> None:
    storage = stored({"up": layer(kind)})
    want = formula(kind, layer(kind)[1]).float()

    for dim, load in ((0, Weights.get_weights_col), (1, Weights.get_weights_row)):
        shares = [load(opened(storage, rank), "up").dequantize() for rank in FakeWorld(world)]
        assert torch.equal(torch.cat(shares, dim), want)


@pytest.mark.parametrize("kind", KINDS)
def test_each_class_multiplies(kind: str) -> None:
    weight = opened(stored({"up": layer(kind)})).get_weights("up")
    x = torch.arange(-192, 192).reshape(3, K).float() / 64

    assert_within_bound(weight.get_linear(), weight, x)


def test_swizzled_scales_have_the_documented_order() -> None:
    """Of output 128 * a + 32 * j + i and group 4 * c + g the byte is at [a, c, i, j, g]."""
    plain = np.arange(256 * 8, dtype=np.uint32).reshape(256, 8).astype(np.uint8)
    plain[:, 1] = np.arange(256)
    want = np.zeros((2, 2, 32, 4, 4), np.uint8)
    for output in range(256):
        for group in range(8):
            i, j = output % 32, output % 128 // 32
            want[output // 128, group // 4, i, j, group % 4] = plain[output, group]

    got = swizzle.swizzle_scales(torch.from_numpy(plain))

    assert got.shape == (64, 32)
    assert np.array_equal(got.numpy().reshape(want.shape), want)
    assert np.array_equal(swizzle.unswizzle_scales(got, 256, 8).numpy(), plain)


@pytest.mark.parametrize(("outputs", "inputs"), [(256, 256), (200, 96)])
def test_swizzled_scales_are_cut_between_tiles(outputs: int, inputs: int) -> None:
    exponents = (torch.arange(outputs * inputs // 32).reshape(outputs, -1) % 11 + 120).to(torch.uint8)
    codes = (torch.arange(outputs * inputs).reshape(outputs, inputs) % 120).to(torch.uint8)
    codes = codes.view(torch.float8_e4m3fn)
    plain = MXFP8Weight(config=MXFP8Config(), weight=codes, weight_scale=exponents)
    parts = {"qdata": codes, "scale": swizzle.swizzle_scales(exponents).view(torch.float8_e8m0fnu)}
    element = value("torch.dtype", "float8_e4m3fn")
    text = described("MXTensor", parts, block_size=32, elem_dtype=element, is_swizzled_scales=True)
    storage = stored({"up": (text, parts)})

    weight = opened(storage).get_weights("up")
    assert_same_bits(weight.dequantize(), plain.dequantize())
    assert_same_bits(restore(repack(weight, "strips")).weight_scale, weight.weight_scale)
    for dim, load, tile in ((0, Weights.get_weights_col, 128), (1, Weights.get_weights_row, 128)):
        if (outputs, inputs)[dim] % (2 * tile):
            with pytest.raises(CutError, match=r"up\._weight_scale"):
                load(opened(storage, Rank(0, 2)), "up")
            continue
        shares = [load(opened(storage, rank), "up").dequantize() for rank in FakeWorld(2)]
        assert_same_bits(torch.cat(shares, dim), plain.dequantize())


@pytest.mark.parametrize("second", [0.25, None])
def test_swizzled_scales_of_e4m3_multiply(second: float | None) -> None:
    text, parts = layer("NVFP4Tensor")
    plain = opened(stored({"up": (text, parts)})).get_weights("up").dequantize()
    parts["scale"] = swizzle.swizzle_scales(parts["scale"])
    if second is None:
        del parts["per_tensor_scale"]
        text = text.replace('"per_tensor_scale", ', "")
    else:
        parts["per_tensor_scale"] = torch.tensor(second)
    text = text.replace('"is_swizzled_scales": false', '"is_swizzled_scales": true')
    weight = opened(stored({"up": (text, parts)})).get_weights("up")

    assert torch.equal(weight.dequantize(), plain * (second or 1) / 0.5)
    assert_within_bound(weight.get_linear(), weight, torch.arange(-192, 192).reshape(3, K).float() / 64)
    restored = restore(repack(weight, "marlin", dtype=torch.bfloat16)).fields()
    assert restored.keys() == weight.fields().keys()
    for name, tensor in restored.items():
        assert_same_bits(tensor, weight.fields()[name])


def test_padding_that_is_no_zero_is_not_lost() -> None:
    exponents = torch.full((32, 16), 127, dtype=torch.uint8)
    weight = MXFP8Weight(
        config=MXFP8Config(swizzled=True),
        weight=torch.ones(8, 32).to(torch.float8_e4m3fn),
        weight_scale=exponents,
    )

    with pytest.raises(RepackError, match="padding"):
        repack(weight, "strips")


def test_zero_points_of_0_are_left_out() -> None:
    text, parts = layer("Int8Tensor")
    weight = opened(stored({"up": (text, parts)})).get_weights("up")
    assert weight.weight_zero_point is None
    assert repack(weight, "strips").format == "int8_strips"

    parts["zero_point"][3] = 5
    shifted = opened(stored({"up": (text, parts)})).get_weights("up")
    assert torch.equal(shifted.dequantize(), formula("Int8Tensor", parts).float())
    with pytest.raises(RepackError, match="zero points"):
        repack(shifted, "strips")


def test_fused_layers_keep_their_own_zero_points() -> None:
    layers = {name: layer("Int8Tensor") for name in ("q", "k")}
    layers["q"][1]["zero_point"][:] = 3
    layers["k"][1]["zero_point"][:] = -4

    weight = opened(stored(layers)).get_multi_weights_col(["q", "k"])

    want = torch.cat([formula("Int8Tensor", parts) for _, parts in layers.values()])
    assert torch.equal(weight.dequantize(), want.float())
    layers["q"][1]["zero_point"][:] = 0
    with pytest.raises(MismatchError, match="zeros = 0"):
        opened(stored(layers)).get_multi_weights_col(["q", "k"])


def test_codes_of_four_bits_are_repacked_and_restored() -> None:
    weight = opened(stored({"up": layer("IntxUnpackedToInt8Tensor")})).get_weights("up")

    for layout in ("panels", "strips", "gptq_v2"):
        packed = repack(weight, layout)
        assert_same_bits(packed.dequantize(), weight.dequantize())
        for name, tensor in restore(packed).fields().items():
            assert_same_bits(tensor, weight.fields()[name])

    weight.weight[2, 5] = 8
    with pytest.raises(RepackError, match="1 of its codes are outside of -8 to 7"):
        repack(weight, "panels")


@pytest.mark.parametrize("field", ["qdata", "zero_point"])
@pytest.mark.parametrize("code", [-9, 8])
def test_codes_of_four_bits_out_of_range_are_refused(field: str, code: int) -> None:
    text, parts = layer("IntxUnpackedToInt8Tensor")
    parts[field][2, 1] = code

    with pytest.raises(FieldValueError, match=rf"up\._weight_{field}: .*4 bits") as caught:
        opened(stored({"up": (text, parts)})).get_weights("up")
    assert caught.value.expected == "-8 to 7"
    assert f"{code} at (2, 1); 1 of " in caught.value.got


def test_codes_are_in_the_range_of_the_stated_bits() -> None:
    """Codes of 4 bits under a header with 2: the values of the file are not those of the header."""
    text, parts = layer("IntxUnpackedToInt8Tensor", target_dtype=value("torch.dtype", "int2"))

    with pytest.raises(FieldValueError, match="codes of 2 bits"):
        opened(stored({"up": (text, parts)})).get_weights("up")


ROW = value("PerRow", {"dim": -1})
BOUNDED = value("Kwargs", {"granularity": ROW, "hp_value_ub": 2})
FLOAT8 = value("QuantizeTensorToFloat8Kwargs", {"granularity": ROW, "hp_value_ub": None})


OWNERS = {"float": "transformers", "int": "compressed-tensors"}  # whose rounding torchao's is


@pytest.mark.parametrize(
    ("kind", "stated", "want"),
    [
        ("Float8Tensor", {"act_quant_kwargs": FLOAT8}, "float8 token dynamic"),
        (
            "Float8Tensor",
            {"act_quant_kwargs": value("Kwargs", {"granularity": value("PerTensor", {})})},
            "float8 tensor dynamic",
        ),
        ("Int8Tensor", {"act_quant_kwargs": value("Kwargs", {"granularity": ROW})}, "int8 token dynamic"),
        (
            "IntxUnpackedToInt8Tensor",
            {"activation_quantization": "int8_asym_per_token"},
            "int8 token dynamic asymmetric",
        ),
        ("Float8Tensor", {"act_quant_kwargs": None}, "None"),
        (
            "Float8Tensor",
            {"act_quant_kwargs": value("Kwargs", {"granularity": ROW, "hp_value_ub": 2})},
            "None",
        ),
    ],
)
def test_declared_inputs(kind: str, stated: dict[str, Any], want: str) -> None:
    weight = opened(stored({"up": layer(kind, **stated)})).get_weights("up")

    assert str(weight.activations) == want
    assert weight.activations is None or weight.activations.owner == OWNERS[weight.activations.type]


@pytest.mark.parametrize(
    ("kind", "owner"), [("Float8Tensor", "transformers"), ("Int8Tensor", "compressed-tensors")]
)
def test_inputs_are_rounded_as_by_the_owner_of_their_numbers(kind: str, owner: str) -> None:
    stated = value("Kwargs", {"granularity": ROW})
    weight = opened(stored({"up": layer(kind, act_quant_kwargs=stated)})).get_weights("up")

    assert weight.activations is not None
    assert weight.activations.owner == owner


def test_inputs_that_no_linear_quantizes_are_a_note(tmp_path: Path) -> None:
    text, parts = layer("NVFP4Tensor", act_quant_kwargs=value("QuantizeTensorToNVFP4Kwargs", {}))
    folder = written(tmp_path, {"up": (text, parts)})

    notes = " ".join(str(note) for note in verify(folder).notes)

    assert "torchao quantizes the inputs of 1 layers, as up.weight" in notes


def written(folder: Path, layers: dict[str, tuple[str, dict[str, Tensor]]], config: Any = CONFIG) -> Path:
    storage = stored(layers)
    tensors = {name: storage.read(name) for name in storage.keys()}  # noqa: SIM118
    save_file(tensors, folder / "model.safetensors", metadata=storage.metadata["model.safetensors"])
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def test_a_folder_of_torchao_s_own_layers_is_sound(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for case in cases("torchao"):
        with safe_open(case / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensors[name.replace("up_proj", case.name)] = file.get_tensor(name)
            described_layer = file.metadata()["model.layers.0.mlp.up_proj.weight"]
        metadata[f"model.layers.0.mlp.{case.name}.weight"] = described_layer
    metadata["tensor_names"] = json.dumps([*metadata])
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))

    assert verify(tmp_path).findings == ()


def test_a_folder_of_all_classes_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path, {f"layers.0.{kind.lower()}": layer(kind) for kind in KINDS})

    with open_checkpoint(folder) as weights:
        for kind in KINDS:
            got = weights.get_weights(f"layers.0.{kind.lower()}").dequantize()
            assert torch.equal(got, formula(kind, layer(kind)[1]).float())
        assert weights.report().complete


@pytest.mark.parametrize("lists_all", [False, True])
def test_headers_of_a_split_checkpoint_are_joined(lists_all: bool, tmp_path: Path) -> None:
    index: dict[str, str] = {}
    for at, kind in enumerate(("Float8Tensor", "IntxUnpackedToInt8Tensor")):
        storage = stored({f"layers.{at}.up": layer(kind)})
        tensors = {name: storage.read(name) for name in storage.keys()}  # noqa: SIM118
        file, metadata = f"model-0000{at + 1}-of-00002.safetensors", storage.metadata["model.safetensors"]
        if lists_all:
            metadata = {**metadata, "tensor_names": '["layers.0.up.weight", "layers.1.up.weight"]'}
        save_file(tensors, tmp_path / file, metadata=dict(metadata))
        index |= dict.fromkeys(tensors, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))

    with open_checkpoint(tmp_path) as weights:
        found = [weights.get_weights(f"layers.{at}.up").format for at in range(2)]

    assert found == ["fp8", "torchao_intx"]


def test_headers_alone_are_enough_and_take_precedence() -> None:
    storage = stored({"up": layer("Int8Tensor")})
    assert opened(storage, config=None).get_weights("up").format == "ct_int"

    stated = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}}
    assert opened(storage, config=stated).get_weights("up").format == "ct_int"


REFUSED: list[Any] = [
    ("Int4TilePackedTo4dTensor", {}, "Int4TilePackedTo4dTensor"),
    ("Float8Tensor", {"block_size": [1, 1, K]}, "Float8Tensor of stacked experts"),
    ("IntxUnpackedToInt8Tensor", {"target_dtype": value("torch.dtype", "uint4")}, "intx of uint4"),
    ("MXTensor", {"elem_dtype": value("torch.dtype", "float8_e5m2")}, "MXTensor of float8_e5m2"),
]


@pytest.mark.parametrize(("kind", "changes", "name"), REFUSED)
def test_other_classes_are_refused_by_name(kind: str, changes: dict[str, Any], name: str) -> None:
    source = kind if kind in KINDS else "Int4Tensor"
    text, parts = layer(source, **changes)
    text = text.replace(source, kind)

    with pytest.raises(UnsupportedFormatError) as caught:
        opened(stored({"up": (text, parts)}))
    assert name in caught.value.format
    assert "up.weight" in caught.value.reason
    assert "dequantize()" in caught.value.remedy

    weights = opened(stored({"up": (text, parts), "down": layer("Int8Tensor")}))
    assert weights.get_weights("down").shape == (N, K)
    with pytest.raises(UnsupportedFormatError, match="up"):
        weights.get_weights("up")


def test_further_tensors_of_a_layer_are_refused() -> None:
    text, parts = layer("Int4Tensor")
    parts["act_pre_scale"] = torch.ones(K)
    text = text.replace('"zero_point"]', '"zero_point", "act_pre_scale"]')

    with pytest.raises(UnsupportedFormatError, match="Int4Tensor with act_pre_scale"):
        opened(stored({"up": (text, parts)}))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{", "up.weight"),
        ("[1]", "up.weight"),
        ('{"_data": {}}', "up.weight._type"),
        ('{"_type": "MXTensor", "_data": {"block_size": 16}}', "up.weight.block_size"),
        ('{"_type": "Int8Tensor", "_data": {"block_size": [0, 1]}}', "up.weight.block_size"),
    ],
)
def test_a_malformed_header_names_file_tensor_and_key(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(stored({"up": (text, layer("Int8Tensor")[1])}))

    assert caught.value.file == "model.safetensors"
    assert key in caught.value.key


def test_zero_points_off_by_one_are_found_by_their_stored_name(tmp_path: Path) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).reshape(64, 4, 32)
    low, high = weight.amin(-1), weight.amax(-1)
    scale = (high - low) / 15
    zero = (-8 - low / scale).round()
    codes = ((weight / scale[..., None]).round() + zero[..., None]).clamp(-8, 7).reshape(64, 128)
    parts = {
        "qdata": codes.to(torch.int8),
        "scale": scale,
        "zero_point": (zero + 1).clamp(-8, 7).to(torch.int8),
    }
    text = described(
        "IntxUnpackedToInt8Tensor", parts, block_size=[1, 32], target_dtype=value("torch.dtype", "int4")
    )
    name = "model.layers.0.mlp.up_proj"
    storage = stored({name: (text, parts)})
    save(tmp_path, storage)

    (finding,) = verify(tmp_path).findings
    assert (finding.rule, finding.tensor) == ("zero-point-mean", f"{name}._weight_zero_point")


def save(folder: Path, storage: StorageWithHeader) -> None:
    tensors = {key: storage.read(key) for key in storage.keys()}  # noqa: SIM118
    save_file(tensors, folder / "model.safetensors", storage.metadata["model.safetensors"])


def test_codes_of_one_bit_may_be_nearly_all_zero(tmp_path: Path) -> None:
    """torchao divides by twice the largest weight, which rounds to 0 as all others do."""
    codes = torch.zeros(64, 128, dtype=torch.int8)
    codes[::9, 5] = -1
    parts = {"qdata": codes, "scale": torch.rand(64, 4), "zero_point": torch.zeros(64, 4, dtype=torch.int8)}
    text = described(
        "IntxUnpackedToInt8Tensor", parts, block_size=[1, 32], target_dtype=value("torch.dtype", "int1")
    )
    save(tmp_path, stored({"model.layers.0.mlp.up_proj": (text, parts)}))

    assert verify(tmp_path).findings == ()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [0, 3])
def test_int8_with_a_scale_for_the_tensor(world: int, zero: int) -> None:
    codes = (torch.arange(N * K).reshape(N, K) % 251 - 125).to(torch.int8)
    parts = {"qdata": codes, "scale": torch.full((1, 1), 0.5)}
    parts["zero_point"] = torch.full((1, 1), zero, dtype=torch.int8)
    storage = stored({"up": (described("Int8Tensor", parts, block_size=[N, K]), parts)})

    for dim, load in ((0, Weights.get_weights_col), (1, Weights.get_weights_row)):
        shares = [load(opened(storage, rank), "up").dequantize() for rank in FakeWorld(world)]
        assert torch.equal(torch.cat(shares, dim), (codes.float() - zero) / 2)


def test_a_described_layer_raises_its_own_error() -> None:
    text, parts = layer("Int8Tensor")

    with pytest.raises(ShapeError, match=r"up\._weight_scale: wrong shape"):
        opened(stored({"up": (text, parts | {"scale": parts["scale"][:-1]})})).get_weights("up")


def test_a_layer_without_a_description_is_refused_by_name() -> None:
    storage = stored({"up": layer("Int8Tensor"), "down": layer("Int8Tensor")})
    del storage.metadata["model.safetensors"]["down.weight"]
    weights = opened(storage)

    assert weights.get_weights("up").shape == (N, K)
    with pytest.raises(UnsupportedFormatError, match="down: no header describes it"):
        weights.get_weights("down")


def test_tensors_without_a_header_are_refused(tmp_path: Path) -> None:
    storage = stored({"up": layer("Int8Tensor")})
    storage.metadata = {}

    with pytest.raises(UnsupportedFormatError, match="keep the metadata of its headers"):
        opened(storage)


def test_too_many_kinds_of_layers_are_refused() -> None:
    layers = {}
    for size in range(1, 300):
        layers[f"l{size}"] = layer("Int4Tensor", block_size=[1, size])

    with pytest.raises(ConfigError, match="at most 256 kinds"):
        opened(stored(layers))


def test_mutated_headers_raise_only_errors_of_qload() -> None:
    outcomes = {try_torchao(metadata) for metadata in torchao_mutations(1_000)}

    assert outcomes == {True, False}


def test_a_plain_module_needs_no_entry_in_the_header() -> None:
    claims = effective_claims(None, stored({"up": layer("Float8Tensor")}))

    assert claims is not None
    formats = {
        name: next(rule.formats for rule in claims.rules if rule.selects(name)) for name in ("up", "down")
    }
    assert [fmt.weight_type.format for fmt in formats["up"]] == ["fp8"]
    assert isinstance(formats["down"], UnsupportedFormatError)
    storage = stored({"up": layer("Float8Tensor")})
    storage = StorageWithHeader({"down.weight": torch.ones(8, 8)}, storage.metadata["model.safetensors"])
    assert opened(storage, config=None).get_weights("down").plain
