"""MXFP4 of other programs as compressed-tensors', and blocks of GGUF as integers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.conversion import convert
from qload.conversion.mxfp4 import mxfp4_tensors
from qload.errors import RepackError
from qload.formats import CTPackWeight, GGUFConfig, GGUFWeight
from qload.spec import Layer
from qload.testing import assert_same_bits

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
    blocks, codes = mxfp4_blocks(exponents)

    found = mxfp4_tensors(gguf("MXFP4", blocks))

    packed = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(1, -1)
    assert torch.equal(found[f"{UP}.weight_packed"], torch.from_numpy(packed))
    assert found[f"{UP}.weight_scale"].tolist() == [exponents]


@pytest.mark.parametrize("before", [[], [127]])
def test_an_exponent_with_two_meanings_is_refused(before: list[int]) -> None:
    group = len(before)

    with pytest.raises(RepackError, match=rf"output 0, group {group} is 255: 2\*\*127 in GGUF, and NaN"):
        mxfp4_tensors(gguf("MXFP4", mxfp4_blocks([*before, 255])[0]))


def checkpoint(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir()
    save_file({f"{UP}.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_words_of_mlx_and_names_of_modelopt_have_the_same_bytes(tmp_path: Path) -> None:
    packed = torch.from_numpy(RANDOM.integers(0, 256, (4, 32)).astype(np.uint8))
    exponents = torch.from_numpy(RANDOM.integers(100, 150, (4, 2)).astype(np.uint8))
    modelopt = {"quant_method": "modelopt", "quant_algo": "mxfp4"}
    sources = (
        checkpoint(
            tmp_path / "mlx",
            {"weight": packed.view(torch.uint32), "scales": exponents},
            quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"},
        ),
        checkpoint(
            tmp_path / "modelopt", {"weight": packed, "weight_scale": exponents}, quantization_config=modelopt
        ),
    )
    for source in sources:
        target = tmp_path / f"{source.name} ct"
        done = convert(source, target, to="mxfp4")

        assert (done.verdict, {layer.outcome for layer in done.layers}) == ("ok", {"bits"})
        stored = load_file(target / "model.safetensors")
        assert_same_bits(stored[f"{UP}.weight_packed"], packed)
        assert_same_bits(stored[f"{UP}.weight_scale"], exponents)
        with open_checkpoint(source) as before, open_checkpoint(target) as after:
            assert_same_bits(after.get_weights(UP).dequantize(), before.get_weights(UP).dequantize())


def test_other_formats_are_not_quantized_to_mxfp4(fixtures: Path, tmp_path: Path) -> None:
    refused = convert(fixtures / "mlx" / "nvfp4", tmp_path / "out", to="mxfp4")

    assert {layer.outcome for layer in refused.layers} == {"refused"}
    assert "is not MXFP4, and convert does not quantize" in refused.layers[0].detail


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
