"""MXFP4 and NVFP4 of each program from one another, and blocks of GGUF as integers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.conversion import convert
from qload.conversion.float4 import convert_float4
from qload.errors import RepackError
from qload.formats import CTMXFP4Weight, CTPackWeight, GGUFConfig, GGUFWeight
from qload.spec import Layer
from qload.testing import assert_same_bits, make_checkpoint

pytestmark = pytest.mark.usefixtures("seen_texts")

UP = "model.layers.0.mlp.up_proj"
RANDOM = np.random.default_rng(0)


def gguf(kind: str, blocks: np.ndarray) -> GGUFWeight:
    stored = torch.from_numpy(blocks)
    N, K = blocks.shape[0], blocks.shape[1] * 32
    return GGUFWeight(config=GGUFConfig(kind), blocks=stored, layer=Layer((N,), K, (N, K), UP))


def mxfp4_blocks(exponents: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of an output, and codes (groups, 32): a block has inputs 0 to 15 in its low halves."""
    codes = RANDOM.integers(0, 16, (len(exponents), 32)).astype(np.uint8)
    halves = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([np.array(exponents, np.uint8)[:, None], halves], 1)[None], codes


@pytest.mark.parametrize("exponents", [[126], [0, 1, 127, 254]])
def test_a_block_of_gguf_is_put_into_neighbouring_codes(exponents: list[int]) -> None:
    """Code 8 of GGUF is 0, and -0 elsewhere."""
    blocks, codes = mxfp4_blocks(exponents)
    weight = gguf("MXFP4", blocks)

    found = convert_float4(weight, "mxfp4")

    codes[codes == 8] = 0
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(1, -1)
    assert isinstance(found, CTMXFP4Weight)
    assert torch.equal(found.weight_packed, torch.from_numpy(packed))
    assert found.weight_scale.tolist() == [exponents]
    assert_same_bits(found.dequantize(), weight.dequantize())


@pytest.mark.parametrize("before", [[], [127]])
def test_an_exponent_with_two_meanings_is_refused(before: list[int]) -> None:
    group = len(before)

    with pytest.raises(RepackError, match=rf"2\*\*127 in GGUF, and NaN.* output 0 and group {group}, is 255"):
        convert_float4(gguf("MXFP4", mxfp4_blocks([*before, 255])[0]), "mxfp4")


def checkpoint(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir()
    save_file({f"{UP}.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drawn(rows: int, columns: int, low: int, high: int) -> Tensor:
    return torch.from_numpy(RANDOM.integers(low, high, (rows, columns)).astype(np.uint8))


def mxfp4_checkpoint(folder: Path, exponents: Tensor) -> Path:
    """Write a layer under the names of ModelOpt."""
    packed = drawn(exponents.shape[0], 16 * exponents.shape[1], 0, 256)
    config = {"quant_method": "modelopt", "quant_algo": "mxfp4"}
    return checkpoint(folder, {"weight": packed, "weight_scale": exponents}, quantization_config=config)


def nvfp4_checkpoint(folder: Path, second: float, scales: Tensor | None = None) -> Path:
    """Write a layer of ModelOpt with scales that are powers of two, unless others are given."""
    scales = drawn(4, 4, 1, 13) << 3 if scales is None else scales
    packed = drawn(scales.shape[0], 8 * scales.shape[1], 0, 256)
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    tensors = {
        "weight": packed,
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor([second]),
    }
    return checkpoint(folder, tensors, quantization_config=config)


def assert_converted(source: Path, target: Path, to: str) -> None:
    """Convert, and compare the values of both folders."""
    done = convert(source, target, to=to)

    assert (done.verdict, {layer.outcome for layer in done.layers}) == ("ok", {"bits"})
    with open_checkpoint(source) as before, open_checkpoint(target) as after:
        assert_same_bits(after.get_weights(UP).dequantize(), before.get_weights(UP).dequantize())


def reason_against(source: Path, target: Path, to: str) -> str:
    refused = convert(source, target, to=to)

    assert {layer.outcome for layer in refused.layers} == {"refused"}
    assert not target.exists()
    return refused.layers[0].detail


@pytest.mark.parametrize(
    ("to", "names"),
    [
        ("mxfp4", ("weight_packed", "weight_scale")),
        ("mxfp4_mlx", ("weight", "scales")),
        ("mxfp4_quark", ("weight", "weight_scale")),
        ("mxfp4_deepseek", ("weight", "scale")),
    ],
)
def test_mxfp4_has_the_same_bytes_in_every_program(to: str, names: tuple[str, str], tmp_path: Path) -> None:
    source = mxfp4_checkpoint(tmp_path / "in", drawn(4, 2, 100, 150))

    assert_converted(source, tmp_path / to, to)
    assert_converted(tmp_path / to, tmp_path / "back", "mxfp4")

    config = json.loads((tmp_path / to / "config.json").read_text())
    assert config.keys() - {"expert_dtype"} == {
        "quantization" if to == "mxfp4_mlx" else "quantization_config"
    }
    stored, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / to))
    last = load_file(tmp_path / "back" / "model.safetensors")
    for name, theirs, ours in zip(
        ("weight", "weight_scale"), names, ("weight_packed", "weight_scale"), strict=True
    ):
        assert_same_bits(new[f"{UP}.{theirs}"].view(torch.uint8), stored[f"{UP}.{name}"])
        assert_same_bits(last[f"{UP}.{ours}"], stored[f"{UP}.{name}"])


@pytest.mark.parametrize("to", ["nvfp4", "nvfp4_mlx", "nvfp4_modelopt"])
@pytest.mark.parametrize("is_mx", [False, True], ids=["nvfp4", "mxfp4"])
def test_nvfp4_and_mxfp4_become_nvfp4_of_every_program(to: str, is_mx: bool, tmp_path: Path) -> None:
    exponents = torch.tensor([[127, 118], [135, 120]], dtype=torch.uint8)
    source = mxfp4_checkpoint(tmp_path / "in", exponents) if is_mx else nvfp4_checkpoint(tmp_path / "in", 2.0)

    assert_converted(source, tmp_path / to, to)
    assert_converted(tmp_path / to, tmp_path / "back", "nvfp4_modelopt")


def test_deepseek_has_its_own_dtypes_and_config(tmp_path: Path) -> None:
    source = mxfp4_checkpoint(tmp_path / "in", drawn(4, 2, 100, 150))

    done = convert(source, tmp_path / "v4", to="mxfp4_deepseek")
    convert(tmp_path / "v4", tmp_path / "back", to="mxfp4")

    stored = load_file(tmp_path / "v4" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        f"{UP}.weight": torch.int8,
        f"{UP}.scale": torch.float8_e8m0fnu,
    }
    config = json.loads((tmp_path / "v4" / "config.json").read_text())
    assert (config["expert_dtype"], config["quantization_config"]["scale_fmt"]) == ("fp4", "ue8m0")
    assert "expert_dtype" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert any("quantize the inputs" in note for note in done.notes)


def test_a_second_scale_that_cannot_divide_is_refused(tmp_path: Path) -> None:
    source = nvfp4_checkpoint(tmp_path / "in", 0.011, torch.arange(0x38, 0x40, dtype=torch.uint8)[None])
    second, wanted = torch.tensor(0.011), torch.arange(8, 16) / 8

    reason = reason_against(source, tmp_path / "ct", "nvfp4")

    near = (1 / second).view(torch.int32) + torch.tensor([-1, 0, 1])
    assert not bool((wanted / near.view(torch.float32)[:, None] == wanted * second).all(1).any())
    assert "no second scale of nvfp4 gives the products of output 0 and group" in reason


def test_a_scale_that_mlx_does_not_have_is_refused_by_place(tmp_path: Path) -> None:
    scales = torch.tensor([[0x38, 0x38, 0x38, 0x39]], dtype=torch.uint8)  # 1 and 1.125

    reason = reason_against(nvfp4_checkpoint(tmp_path / "in", 1.5, scales), tmp_path / "mlx", "nvfp4_mlx")

    assert "output 0 and group 3 times the second scale is 1.6875, and no float8_e4m3fn" in reason


@pytest.mark.parametrize(
    ("exponents", "reason"),
    [([[127, 109]], r"1 of 2 scales of .* 2\*\*17 times smaller"), ([[127, 255]], "are NaN: .* and group 1")],
)
def test_exponents_that_nvfp4_does_not_have_are_refused(
    exponents: list[list[int]], reason: str, tmp_path: Path
) -> None:
    stored = torch.tensor(exponents, dtype=torch.uint8)
    weight = CTMXFP4Weight(
        config=CTMXFP4Weight.example, weight_packed=drawn(1, 32, 0, 256), weight_scale=stored
    )

    with pytest.raises(RepackError, match=reason):
        convert_float4(weight, "nvfp4")


@pytest.mark.parametrize("second", [2.0, 1.5])
def test_second_scales_of_ggml_multiply_products(second: float) -> None:
    """A product with 2 is exact, and one with 1.5 too as all of these have few bits."""
    blocks = np.concatenate(
        [np.full((1, 1, 4), 0x38, np.uint8), RANDOM.integers(0, 256, (1, 1, 32)).astype(np.uint8)], -1
    )
    weight = GGUFWeight(
        config=GGUFConfig("NVFP4"),
        blocks=torch.from_numpy(blocks),
        scale=torch.tensor([second]),
        layer=Layer((1,), 64, (1, 64), UP),
    )

    for to in ("nvfp4", "nvfp4_modelopt", "nvfp4_mlx"):
        if (to, second) != ("nvfp4", 1.5):  # 1 / 1.5 is not exact
            assert_same_bits(convert_float4(weight, to).dequantize(), weight.dequantize())


def test_mxfp4_becomes_fp8_where_every_value_fits(tmp_path: Path) -> None:
    source = mxfp4_checkpoint(tmp_path / "in", drawn(4, 8, 120, 127))

    assert_converted(source, tmp_path / "fp8", "fp8")

    with open_checkpoint(tmp_path / "fp8") as weights:
        assert weights.get_weights(UP).format == "fp8"


def test_the_first_block_that_fp8_does_not_have_is_named(tmp_path: Path) -> None:
    exponents = torch.full((2, 8), 127, dtype=torch.uint8)
    exponents[1, 5] = 90
    source = mxfp4_checkpoint(tmp_path / "in", exponents)

    assert "the first block without one is at output 0 and input 128" in reason_against(
        source, tmp_path / "fp8", "fp8"
    )


def test_other_formats_are_not_quantized_to_mxfp4(fixtures: Path, tmp_path: Path) -> None:
    refused = convert(fixtures / "mlx" / "w2_g32_fp16", tmp_path / "out", to="mxfp4")

    assert {layer.outcome for layer in refused.layers} == {"refused"}
    assert "is neither MXFP4 nor NVFP4, and convert does not quantize" in refused.layers[0].detail


def test_scales_of_16_inputs_are_none_of_mxfp4(tmp_path: Path) -> None:
    reason = reason_against(nvfp4_checkpoint(tmp_path / "in", 1.0), tmp_path / "out", "mxfp4_mlx")

    assert "scales are of 16 inputs and no powers of two" in reason


def test_awq_becomes_quark_and_comes_back(tmp_path: Path) -> None:
    awq, quark, back = (tmp_path / name for name in ("awq", "quark", "back"))
    make_checkpoint("awq", awq)

    for source, target, to in ((awq, quark, "quark"), (quark, back, "awq")):
        done = convert(source, target, to=to)
        assert (done.verdict, set(done.counts)) == ("ok", {"bits"})

    one, other = (load_file(folder / "model.safetensors") for folder in (awq, back))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert_same_bits(other[name], tensor)


@pytest.mark.parametrize(("kind", "bits", "zero"), [("Q4_0", 4, 8), ("Q8_0", 8, 128)])
def test_blocks_of_integers_are_integers_with_their_scales(kind: str, bits: int, zero: int) -> None:
    codes = RANDOM.integers(0, 2**bits, (2, 3, 32)).astype(np.uint8)
    scales = np.array([[0.5, -1, 2**-14], [3, 0.25, 65504]], np.float16)
    stored = codes[..., :16] | codes[..., 16:] << 4 if bits == 4 else codes ^ 0x80
    weight = gguf(kind, np.concatenate([scales[..., None].view(np.uint8), stored], -1))

    packed = CTPackWeight.from_integers(weight.to_integers())

    assert torch.equal(packed.weight_scale, torch.from_numpy(scales))
    want = (codes.astype(np.float32) - zero) * scales[..., None]
    assert torch.equal(packed.dequantize(), torch.from_numpy(want.reshape(2, 96)))
    assert torch.equal(packed.dequantize(), weight.dequantize())


@pytest.mark.parametrize(("kind", "size"), [("Q4_1", 20), ("Q5_0", 22)])
def test_other_blocks_are_no_integers(kind: str, size: int) -> None:
    with pytest.raises(RepackError, match=f"{kind} is not one of Q4_0 and Q8_0"):
        gguf(kind, np.zeros((1, 1, size), np.uint8)).to_integers()


def test_a_model_of_q8_0_becomes_compressed_tensors(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / "gguf" / "qwen2_q8_0"

    done = convert(source, tmp_path / "ct", to="compressed-tensors")

    assert done.verdict == "ok"
    assert {(layer.source, layer.format) for layer in done.layers if layer.source == "gguf"} == {
        ("gguf", "ct_pack")
    }
    name = "model.layers.0.mlp.down_proj"
    with open_checkpoint(source) as before, open_checkpoint(tmp_path / "ct") as after:
        assert_same_bits(after.get_weights(name).dequantize(), before.get_weights(name).dequantize())
