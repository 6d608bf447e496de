"""Path of each linear layer on Hopper, by format, inputs, dtype and tokens: none falls back unnoticed.

The choice of a path is a function of layer, dtype, tokens and capability, so that no device is needed.
"""

from pathlib import Path

import pytest
import torch

from qload import explain
from qload.formats import FORMATS
from qload.kernels.plans import DEQUANTIZED, QUANTIZED
from qload.plan import ExplainedLayer
from tests.paths import FOLDERS, cases

TOKENS = (1, 16, 17, 24, 25, 64, 256, 2048)
DTYPES = (torch.float16, torch.bfloat16)
FOLDERS_OF_CASES = cases(*FOLDERS)
STRIPS = {"strips", "fp8_strips", "mxfp8_strips", "int8_strips", "fp4_strips", "table_strips"}
SLOW_PATHS = (DEQUANTIZED, QUANTIZED, "large")  # the weight is dequantized at every call

# Layers that no kernel multiplies, by fixture, with the reason.
BITNET = "no kernel reads the words of BitNet"
BLOCKS = "blocks of absmax reach into the next output"
CODEBOOKS = "no kernel reads codebooks"
DIVIDES = "scales divide"
FLOAT_ZEROS = "groups lie across outputs, or products with scales do not determine float zero points"
INPUTS = "the inputs are no whole groups of 128, or no multiple of 8"
SPARSE = "no kernel reads 2:4 sparse weights"
TRELLIS = "no kernel reads the trellises of EXL3"
STREAMS = "no kernel reads EXL2 but ExLlama's, which dequantizes"
WIDTH = "strips have codes of 2 to 6 and 8 bits"
SLOW = {
    "activations/w4a8_int8_tensor_static_asym": "strips of integers have no scale of the activations",
    "aqlm/1x9_g4x2": CODEBOOKS,
    "aqlm/2x4_g8": CODEBOOKS,
    "bitnet/autobitlinear": BITNET,
    "bitnet/bitlinear": BITNET,
    "bnb/fp4_nested_ragged_60x100": BLOCKS,
    "bnb/nf4_odd_33x65": BLOCKS,
    "compressed_tensors/float_block128_6x160": INPUTS,
    "compressed_tensors/marlin_24_w4_g128": SPARSE,
    "compressed_tensors/marlin_24_w8_channel": SPARSE,
    "compressed_tensors/marlin_24_w8_g128_K256_edge": SPARSE,
    "compressed_tensors/pack_w4_tensor": "one scale for the tensor is no scale of an output",
    "compressed_tensors/pack_w4_tensor_asym": "one scale for the tensor is no scale of an output",
    "compressed_tensors/pack_w7_g128_dense": WIDTH,
    "exl2/b4_3_g64_384x32": STREAMS,
    "exl2/b6_g128_256x32": STREAMS,
    "exl2/b8_4_mixedgroups_512x32": STREAMS,
    "exl3/mcg_b1_128x128": TRELLIS,
    "experts/model_fp8_block_llama4": "experts of numbers stay as they are stored",
    "fp8/block_132x32": INPUTS,
    "fp8/block_ragged_6x320": INPUTS,
    "fp8/block_ue8m0_144x16": INPUTS,
    "fp8/inverse_block_66x130": DIVIDES,
    "fp8/inverse_tensor_e4m3fn_16x64": DIVIDES,
    "fp8/inverse_tensor_e5m2_16x64": DIVIDES,
    "gptq_marlin_24/b4_g128_256x128_edge": SPARSE,
    "gptq_marlin_24/b4_g128_512x64": SPARSE,
    "gptq_marlin_24/b8_gm1_256x128": SPARSE,
    "hqq/b1_axis0_row": FLOAT_ZEROS,
    "hqq/b2_g16_axis0": FLOAT_ZEROS,
    "hqq/b2_g96_straddled": FLOAT_ZEROS,
    "hqq/b4_g64_float": FLOAT_ZEROS,
    "hqq/b8_row": FLOAT_ZEROS,
    "modelopt/nvfp4_svd_16x128": "no kernel adds a low-rank term",
    "modelopt/w4a16_awq_g128_24x256": "W4A16_AWQ is not repacked",
    "modelopt/w8a8_sq_16x256": "W8A8_SQ_PER_CHANNEL is not repacked",
    "mxfp4/experts_e2_n8_k64": "a stack of experts is no layer",
    "quark/mxfp6_e2m3": WIDTH,
    "quark/mxfp6_e3m2": WIDTH,
}
WIDE = ("hqq/b3_g32_padded", "hqq/b4_g64", "torchao/int4_g32")  # float32 scales: dequantized for many tokens
UNSEEN = {"comfy_awq", "comfy_w4a8", "gguf"}  # files without a config.json


def layers(folder: Path, dtype: torch.dtype) -> list[ExplainedLayer]:
    """Explained layers of a fixture on Hopper, but for those with an error."""
    return [
        each for each in explain(folder, arch="sm90", dtype=dtype, tokens=TOKENS).layers if not each.error
    ]


def name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


@pytest.mark.parametrize("folder", FOLDERS_OF_CASES, ids=name)
def test_a_layer_has_a_kernel_for_all_tokens_or_is_named(folder: Path) -> None:
    for dtype in DTYPES:
        slow = False
        for layer in layers(folder, dtype):
            paths = [choice.kernel for choice in layer.choices]
            fallbacks = [path in SLOW_PATHS and layer.kernel_format != "exllama" for path in paths]
            if name(folder) in WIDE:
                assert fallbacks == [path == "large" for path in paths], (layer.prefix, paths)
                assert (paths[0].rpartition(".")[2], fallbacks[:6]) == ("decode", [False] * 6), paths
                continue
            assert all(fallbacks) or not any(fallbacks), (layer.prefix, paths)
            slow |= any(fallbacks)
            if layer.kernel_format in STRIPS and not any(fallbacks):
                assert paths[0].endswith("decode"), (layer.prefix, paths)
                assert all(path.endswith(("many", "w8a8")) for path in paths[6:]), (layer.prefix, paths)
        assert slow == (name(folder) in SLOW), (name(folder), dtype)


def test_every_named_layer_is_a_fixture() -> None:
    assert {name(folder) for folder in FOLDERS_OF_CASES} >= set(SLOW) | set(WIDE)


def test_every_format_has_a_layer_here() -> None:
    explained = (explain(folder, arch="sm90", tokens=(1,)) for folder in FOLDERS_OF_CASES)
    seen = {layer.format for each in explained for layer in each.layers}

    assert {weight_type.format for weight_type in FORMATS} - UNSEEN == seen - {None}
