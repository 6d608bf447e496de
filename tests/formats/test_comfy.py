"""ComfyUI's files: marks of layers, orders of scales and codes, turned inputs."""

import json
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.conversion import convert, shard
from qload.detect import loader_from_config
from qload.errors import ConfigError, CutError, DtypeError, ShapeError, StorageError, UnsupportedFormatError
from qload.formats import ComfyAWQConfig, ComfyAWQWeight, ComfyW4A8Config, ComfyW4A8Weight
from qload.kernel_formats import repack
from qload.kernels import bounds
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.verify import verify

pytestmark = pytest.mark.usefixtures("seen_texts")

UP = "blocks.0.up"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
RANDOM = np.random.default_rng(0)


def mark(**values: Any) -> Tensor:
    return torch.tensor([*json.dumps(values).encode()], dtype=torch.uint8)


def save(folder: Path, layer: dict[str, Tensor], metadata: Any = None, **values: Any) -> Path:
    """Write a layer, with a mark as a tensor or in metadata."""
    named = {f"{UP}.{name}": tensor for name, tensor in layer.items()} | {"norm.weight": torch.ones(4)}
    if values:
        named[f"{UP}.comfy_quant"] = mark(**values)
    header = {"_quantization_metadata": json.dumps({"layers": {UP: metadata}})} if metadata else None
    file = folder / "model.safetensors"
    save_file(named, file, header)
    return file


def swizzled(scales: NDArray[Any], *, flat: bool = False) -> NDArray[Any]:
    """Scales (N, G) in tiles of 128 outputs and 4 groups, each 32 rows of 4 outputs by 4 groups."""
    N, G = scales.shape
    tiles = -(-G // 4)
    stored = np.zeros(-(-N // 128) * tiles * 512, scales.dtype)
    for n in range(N):
        for g in range(G):
            tile = n // 128 * tiles + g // 4
            stored[512 * tile + 16 * (n % 32) + 4 * (n % 128 // 32) + g % 4] = scales[n, g]
    return stored if flat else stored.reshape(-1, 4 * tiles)


def nvfp4(N: int = 144, K: int = 96, **how: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Codes in high nibbles first; scales are powers of two as bytes of e4m3."""
    codes = RANDOM.integers(0, 16, (N, K))
    exponents = RANDOM.integers(4, 10, (N, K // 16))
    scales = torch.from_numpy(swizzled((exponents << 3).astype(np.uint8), **how))
    values = E2M1[codes] * 2.0 ** (exponents.repeat(16, 1) - 7) * 0.5
    layer = {
        "weight": torch.from_numpy((codes[:, ::2] << 4 | codes[:, 1::2]).astype(np.uint8)),
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.5),
    }
    return layer, torch.from_numpy(values).float()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("flat", [False, True])
def test_nvfp4_has_the_high_nibble_first_and_scales_in_tiles(
    flat: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    layer, want = nvfp4(flat=flat)
    layer["weight_scale"] = layer["weight_scale"].view(dtype)

    with open_checkpoint(save(tmp_path, layer, {"format": "nvfp4"})) as weights:
        weight = weights.get_weights(UP)
        assert weight.format == "modelopt_nvfp4"
        assert torch.equal(weight.dequantize(), want)
        assert torch.equal(weights.get_weights("norm").dequantize(), torch.ones(4))
        assert weights.report().complete
        assert torch.equal(repack(weight, "strips").dequantize(), want)


def test_mxfp8_has_exponents_in_tiles(tmp_path: Path) -> None:
    codes = torch.from_numpy(RANDOM.integers(0, 120, (130, 160)).astype(np.uint8))
    exponents = RANDOM.integers(120, 132, (130, 5)).astype(np.uint8)
    steps = torch.from_numpy(2.0 ** (exponents.repeat(32, 1) - 127.0))
    want = codes.view(torch.float8_e4m3fn).double() * steps
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        stored = torch.from_numpy(swizzled(exponents)).view(dtype)
        layer = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": stored}
        with open_checkpoint(save(tmp_path, layer, format="mxfp8")) as weights:
            assert torch.equal(weights.get_weights(UP).dequantize().double(), want)


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5, 2]), torch.tensor([[0.5], [2]])])
def test_int8_has_a_scale_or_one_for_each_output(scale: Tensor, tmp_path: Path) -> None:
    codes = torch.tensor([[1, -128, 3, 0], [127, 5, -6, 7]], dtype=torch.int8)

    file = save(tmp_path, {"weight": codes, "weight_scale": scale}, format="int8_tensorwise")
    with open_checkpoint(file) as weights:
        assert torch.equal(weights.get_weights(UP).dequantize(), codes.float() * scale.reshape(-1, 1))


@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_has_one_scale(form: str, tmp_path: Path) -> None:
    layer = {
        "weight": torch.tensor([[1.0, -2, 3, 0.5]]).to(getattr(torch, form)),
        "weight_scale": torch.tensor(2.0),
        "input_scale": torch.tensor(0.25),
    }

    file = save(tmp_path, layer, {"format": form, "full_precision_matrix_mult": True})
    with open_checkpoint(file) as weights:
        assert weights.get_weights(UP).dequantize().tolist() == [[2, -4, 6, 1]]
        assert weights.report().unused == ["norm.weight"]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_older_files_mark_all_layers_at_once(prefix: str, tmp_path: Path) -> None:
    name = f"{prefix}{UP}"
    layer = {
        f"{name}.weight": torch.tensor([[1.0, -2]]).to(torch.float8_e4m3fn),
        f"{name}.scale_weight": torch.tensor([4.0]),
        f"{name}.scale_input": torch.tensor([1.0]),
        f"{prefix}scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn),
    }
    save_file(layer, tmp_path / "model.safetensors")

    with open_checkpoint(tmp_path / "model.safetensors") as weights:
        assert weights.get_weights(name).dequantize().tolist() == [[4, -8]]
        assert weights.report().complete


def test_a_repeated_scale_is_no_tensor_that_was_never_filled(tmp_path: Path) -> None:
    layers = {"blocks.0.up": torch.tensor(0.5), "blocks.1.up": torch.arange(1.0, 33)[:, None] / 64}
    codes = (torch.arange(32 * 64).reshape(32, 64) * 7 % 251 - 125).to(torch.int8)
    tensors = {f"{name}.weight_scale": scale for name, scale in layers.items()}
    tensors |= {f"{name}.weight": codes.roll(at, 0) for at, name in enumerate(layers)}
    marks = {name: {"format": "int8_tensorwise"} for name in layers}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, {"_quantization_metadata": json.dumps({"layers": marks})})

    assert verify(file).findings == ()


def test_older_files_mark_no_layers_with_another_prefix(tmp_path: Path) -> None:
    layer = {"weight": torch.tensor([[1.0, -2]]).to(torch.float8_e4m3fn), "scale_weight": torch.tensor([4.0])}
    named = {f"{at}.{UP}.{name}": each.clone() for at in ("model", "text") for name, each in layer.items()}
    save_file(named | {"model.scaled_fp8": torch.zeros(2)}, tmp_path / "model.safetensors")

    with open_checkpoint(tmp_path / "model.safetensors") as weights:
        assert weights.get_weights(f"model.{UP}").dequantize().tolist() == [[4, -8]]
        with pytest.raises(DtypeError, match="float8_e4m3fn"):
            weights.get_weights(f"text.{UP}")


FOUR = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])


def test_convrot_turns_inputs_in_blocks(tmp_path: Path) -> None:
    """Bytes of signed codes, the first in the low bits; W = codes @ R with R of four rows, over 2."""
    codes = RANDOM.integers(-8, 8, (2, 16))
    fields = codes & 15
    layer = {
        "weight": torch.from_numpy((fields[:, ::2] | fields[:, 1::2] << 4).astype(np.uint8)).view(torch.int8),
        "weight_scale": torch.tensor([0.5, 2]),
    }
    want = codes * np.array([[0.5], [2]]) @ np.kron(np.eye(4), FOUR) / 2

    file = save(tmp_path, layer, format="convrot_w4a4", convrot_groupsize=4)
    with open_checkpoint(file) as weights:
        weight = weights.get_weights(UP)
        assert torch.equal(weight.dequantize().double(), torch.from_numpy(want))
        x = torch.randn(3, 16)
        assert bool((bounds.excess(weight.get_linear()(x), bounds.of_linear(x, weight)) <= 1).all())
        assert weights.report().unused == ["norm.weight"]
    shares = []
    for rank in FakeWorld(2):
        with open_checkpoint(file, process_group=rank) as weights:
            shares.append(weights.get_weights_row(UP).dequantize())
    assert_same_bits(torch.cat(shares, 1), weight.dequantize())


@pytest.mark.parametrize(
    "values", [{"format": "convrot_w4a4"}, {"format": "int8_tensorwise", "convrot": True}]
)
def test_rotations_without_a_size_have_blocks_of_256(values: dict[str, Any], tmp_path: Path) -> None:
    codes = RANDOM.integers(-8, 8, (2, 256))
    fields = codes & 15
    packed = (fields[:, ::2] | fields[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    stored = packed if values["format"] == "convrot_w4a4" else codes.astype(np.int8)
    layer = {"weight": torch.from_numpy(stored), "weight_scale": torch.ones(2)}

    with open_checkpoint(save(tmp_path, layer, **values)) as weights:
        got = weights.get_weights(UP).dequantize()
        assert torch.equal(got.double(), torch.from_numpy(codes @ rotation(4) / 16))


def rotation(factors: int) -> NDArray[Any]:
    """Kronecker power of four rows."""
    return reduce(np.kron, [FOUR] * factors)


def test_w4a8_without_sizes_has_groups_of_16_and_blocks_of_256(tmp_path: Path) -> None:
    codes = RANDOM.integers(0, 16, (2, 256))
    exponents = RANDOM.integers(-1, 3, (2, 16))
    layer = {
        "weight": torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)).view(torch.int8),
        "weight_s_rel": torch.from_numpy(2.0**exponents).to(torch.float8_e4m3fn),
        "weight_s_channel": torch.ones(2),
    }
    want = ((codes - 8) * 2.0 ** exponents.repeat(16, 1)).round() @ rotation(4) / 16

    with open_checkpoint(save(tmp_path, layer, format="asym_w4a8_int8")) as weights:
        assert torch.equal(weights.get_weights(UP).dequantize().double(), torch.from_numpy(want))


TURNED = {
    "weight": torch.tensor([[1, -2, 3, 4]], dtype=torch.int8),
    "weight_scale": torch.tensor([2.0]),
}
TURNED_VALUES = [[-2, 0, 10, 4]]  # (1, -2, 3, 4) @ R with R of four rows, over 2, times 2


def test_settings_are_also_read_below_params(tmp_path: Path) -> None:
    params = {"convrot": True, "convrot_groupsize": 4}

    with open_checkpoint(save(tmp_path, TURNED, format="int8_tensorwise", params=params)) as weights:
        assert weights.get_weights(UP).dequantize().tolist() == TURNED_VALUES


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [("convrot", True, False), ("convrot_groupsize", 4, 16), ("group_size", 2, 16)],
)
def test_unequal_settings_below_params_are_refused(key: str, value: Any, other: Any, tmp_path: Path) -> None:
    layer, settings = TURNED, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 4}
    if key == "group_size":
        layer, settings = w4a8(), {"format": "asym_w4a8_int8", "group_size": 2, "convrot_groupsize": 4}
    file = save(tmp_path, layer, **settings, params={key: other})

    with pytest.raises(ConfigError, match=f"params.{key}") as refused:
        open_checkpoint(file)
    assert f"{value}" in str(refused.value)
    assert f"{other}" in str(refused.value)


def w4a8(**other: Tensor) -> dict[str, Tensor]:
    return {
        "weight": torch.tensor([[0x10, -1]], dtype=torch.int8),  # the codes 0, 1, 15, 15
        "weight_s_rel": torch.tensor([[2.0, 8]]).to(torch.float8_e4m3fn),
        "weight_s_channel": torch.tensor([0.5]),
        **other,
    }


def test_w4a8_by_hand() -> None:
    """0 - 8 and 1 - 8 twice, 15 - 8 eight times; the codebook has 2.25, -1.25 and 30 in their place."""
    plain = ComfyW4A8Weight(config=ComfyW4A8Config(2), **w4a8())
    values = torch.zeros(16)
    values[0], values[1], values[15] = 2.25, -1.25, 30
    own = ComfyW4A8Weight(config=ComfyW4A8Config(2), **w4a8(weight_codebook=values))

    assert plain.dequantize().tolist() == [[-8, -7, 28, 28]]
    assert own.dequantize().tolist() == [[2, -1, 63.5, 63.5]]  # 4.5 and -2.5 to even, 240 to 127


def test_w4a8_is_read_by_its_mark(tmp_path: Path) -> None:
    file = save(tmp_path, w4a8(), format="asym_w4a8_int8", group_size=2, convrot_groupsize=4)

    with open_checkpoint(file) as weights:
        weight = weights.get_weights(UP)
        assert weight.without_transforms().dequantize().tolist() == [[-8, -7, 28, 28]]
        assert weight.dequantize().tolist() == [[-7.5, -7.5, 27.5, 28.5]]
    for rank in FakeWorld(4):
        cut = pytest.raises(CutError, match="multiples of 4")
        with open_checkpoint(file, process_group=rank) as weights, cut:
            weights.get_weights_row(UP)


AWQ = {
    "weight": torch.tensor([[0x10, -1]], dtype=torch.int8),
    "weight_scale": torch.tensor([[2.0], [4]]),
    "weight_zeros": torch.tensor([[0.5], [-1]]),
}
AWQ_VALUES = [[-15.5, -13.5, 27, 27]]  # codes 0, 1, 15, 15 less 8, times 2 and 4, plus 0.5 and -1


def test_awq_by_hand() -> None:
    assert ComfyAWQWeight(config=ComfyAWQConfig(2), **AWQ).dequantize().tolist() == AWQ_VALUES


def test_the_scales_of_awq_say_the_size_of_a_group(tmp_path: Path) -> None:
    with open_checkpoint(save(tmp_path, AWQ, format="awq_w4a16")) as weights:
        weight = weights.get_weights(UP)
        assert (weight.config.group_size, weight.dequantize().tolist()) == (2, AWQ_VALUES)


def test_groups_of_awq_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    layer = AWQ | {name: torch.ones(3, 1) for name in ("weight_scale", "weight_zeros")}

    refused = pytest.raises(ShapeError, match="with K = 4 a multiple of G")
    with open_checkpoint(save(tmp_path, layer, format="awq_w4a16")) as weights, refused:
        weights.get_weights(UP)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"format": "svdquant_w4a4"}, "svdquant_w4a4, a format without a reader"),
        ({"format": "nvfp4", "num_experts": 8}, "a stack of experts"),
    ],
)
def test_a_marked_layer_without_a_reader_is_refused_alone(values: Any, text: str, tmp_path: Path) -> None:
    file = save(tmp_path, nvfp4()[0], **values)

    with open_checkpoint(file) as weights:
        assert weights.get_weights("norm").shape == (4,)
        with pytest.raises(UnsupportedFormatError, match=text):
            weights.get_weights(UP)


@pytest.mark.parametrize("size", [8, 5])
def test_a_rotation_is_of_a_power_of_four(size: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="convrot_groupsize"):
        open_checkpoint(save(tmp_path, w4a8(), format="convrot_w4a4", convrot_groupsize=size))


@pytest.mark.parametrize(
    "other", [{"format": "int8_tensorwise"}, {"format": "mxfp8"}, {"params": {"convrot": False}}]
)
def test_a_mark_unequal_to_the_metadata_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    values = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 4}
    if "params" in other:
        other = values | other

    with pytest.raises(StorageError, match=r"blocks.0.up.comfy_quant: is .*convrot") as refused:
        open_checkpoint(save(tmp_path, TURNED, other, **values))
    assert all(str(dict(sorted(each.items()))) in str(refused.value) for each in (values, other))


def test_unequal_marks_in_the_metadata_of_two_files_are_refused(tmp_path: Path) -> None:
    for number, form in ((1, "mxfp8"), (2, "nvfp4")):
        header = {"_quantization_metadata": json.dumps({"layers": {UP: {"format": form}}})}
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({f"norm{number}.weight": torch.ones(4)}, tmp_path / name, header)

    with pytest.raises(StorageError, match=r"_quantization_metadata.layers.blocks.0.up: is .*nvfp4.*mxfp8"):
        open_checkpoint(tmp_path)


def test_a_mark_and_the_metadata_may_have_the_same_settings(tmp_path: Path) -> None:
    values = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 4}
    metadata = values | {"full_precision_matrix_mult": True}

    with open_checkpoint(save(tmp_path, TURNED, metadata, **values)) as weights:
        assert weights.get_weights(UP).dequantize().tolist() == TURNED_VALUES


@pytest.mark.parametrize("content", [b"[1]", b"{", b" " * 5000])
def test_a_mark_is_a_json_object(content: bytes, tmp_path: Path) -> None:
    layer = {"up.comfy_quant": torch.tensor([*content], dtype=torch.uint8), "up.weight": torch.ones(2, 2)}
    save_file(layer, tmp_path / "model.safetensors")

    with pytest.raises(StorageError, match="the mark of a layer"):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize("rows", [0, 144, 200])
def test_scales_that_fill_no_tiles_are_refused(rows: int, tmp_path: Path) -> None:
    """A tile has 128 outputs; scales in plain order, of 144 outputs, have no reading here."""
    layer = nvfp4()[0]
    layer["weight_scale"] = layer["weight_scale"][:rows].contiguous()

    with pytest.raises(StorageError, match=r"the tiles of \(144, 6\) have 2048"):
        open_checkpoint(save(tmp_path, layer, format="nvfp4"))


@pytest.mark.parametrize("form", ["convrot_w4a4", "int8_tensorwise"])
def test_scales_of_groups_that_comfyui_does_not_read_are_refused(form: str, tmp_path: Path) -> None:
    layer = {"weight": torch.zeros(2, 8, dtype=torch.int8), "weight_scale": torch.ones(2, 4)}
    file = save(tmp_path, layer, format=form)

    with pytest.raises(
        StorageError, match=f"weight_scale: has 8 scales, and {form} has one, or one for each of 2"
    ):
        open_checkpoint(file)


def test_a_layer_is_not_stored_twice(tmp_path: Path) -> None:
    layer = {"weight": torch.zeros(2, 8, dtype=torch.int8), "weight_scale": torch.ones(2)}
    file = save(
        tmp_path, layer | {"weight_packed": torch.ones(2)}, format="convrot_w4a4", convrot_groupsize=4
    )

    with pytest.raises(StorageError, match="weight_packed: is stored"):
        open_checkpoint(file)


def test_a_file_of_one_layer_needs_no_name(tmp_path: Path) -> None:
    layer, want = nvfp4()
    save_file(layer | {"comfy_quant": mark(format="nvfp4")}, tmp_path / "model.safetensors")

    with open_checkpoint(tmp_path / "model.safetensors") as weights:
        assert torch.equal(weights.get_weights("").dequantize(), want)


def test_marks_without_their_file_are_refused() -> None:
    section = {"quant_method": "comfyui", "layers": {UP: {"format": "nvfp4"}}}
    stored = MemoryStorage({f"{UP}.{name}": tensor for name, tensor in nvfp4()[0].items()})

    for storage in (None, stored):
        with pytest.raises(UnsupportedFormatError, match="without their file"):
            loader_from_config(section, storage)


def test_verify_and_convert_read_the_order_of_the_marks(tmp_path: Path) -> None:
    layer, want = nvfp4()
    file = save(tmp_path, layer, format="nvfp4")

    assert verify(file).findings == ()
    assert {each.outcome for each in shard(file, tmp_path / "ranks", tp=1).layers} == {"refused"}
    assert convert(file, tmp_path / "plain", to="float32").verdict == "ok"
    with open_checkpoint(tmp_path / "plain") as weights:
        assert torch.equal(weights.get_weights(UP).dequantize(), want)


def test_files_of_comfy_kitchen_have_its_values(fixtures: Path) -> None:
    expected = load_file(fixtures / "comfy" / "nvfp4_144x240" / "expected" / "expected.safetensors")
    with open_checkpoint(fixtures / "comfy" / "nvfp4_144x240" / "model.safetensors") as weights:
        for name, want in expected.items():
            got = weights.get_weights(name.removeprefix("dequant.")).dequantize()
            assert torch.equal(got[::9], want)


def test_turned_files_of_comfy_kitchen_have_its_values_but_for_sums_in_float32(fixtures: Path) -> None:
    """comfy-kitchen adds 256 products in float32: its error is that of 256 roundings of each."""
    folder = fixtures / "comfy" / "w4a8_convrot_8x256"
    with open_checkpoint(folder / "model.safetensors") as weights:
        for name, want in load_file(folder / "expected" / "expected.safetensors").items():
            weight = weights.get_weights(name.removeprefix("dequant."))
            stored = weight.without_transforms().dequantize().double()
            size = stored.abs().reshape(len(stored), -1, 256).sum(2, keepdim=True) / 16
            bound = (258 * 2.0**-24 * size).expand(-1, -1, 256).reshape(stored.shape)
            assert bool(((weight.dequantize().double() - want.double()).abs() <= bound).all())
