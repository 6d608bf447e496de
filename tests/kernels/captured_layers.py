"""A fixture of each format and of each way that inputs are quantized, in every order that holds it."""

from collections.abc import Iterator
from pathlib import Path

import torch

from qload.checkpoint import open_checkpoint
from qload.errors import RepackError
from qload.kernel_formats import repack
from qload.kernel_formats.repack import options, targets
from qload.spec import Weight
from tests.support.owners import prefix_of

LAYERS = (  # of each format, and of each way that inputs are quantized
    "activations/fbgemm_fp8_token_dynamic",
    "activations/fp8_block_group_dynamic",
    "activations/fp8_tensor_dynamic",
    "activations/fp8_tensor_static",
    "activations/modelopt_mxfp8_dynamic",
    "activations/modelopt_nvfp4_local_dynamic",
    "activations/mxfp4_dynamic",
    "activations/mxfp4_weight_mxfp8_dynamic",
    "activations/nvfp4_local_dynamic",
    "activations/w4a4_int4_token_dynamic_sym",
    "activations/w4a8_int8_tensor_static_asym",
    "activations/w4a8_int8_token_dynamic_sym",
    "activations/w8a8_int8_group_dynamic_asym",
    "activations/w8a8_int8_group_dynamic_sym",
    "activations/w8a8_int8_tensor_dynamic_asym",
    "activations/w8a8_int8_tensor_dynamic_sym",
    "activations/w8a8_int8_tensor_static_asym",
    "activations/w8a8_int8_tensor_static_sym",
    "activations/w8a8_int8_token_dynamic_asym",
    "activations/w8a8_int8_token_dynamic_sym",
    "aqlm/2x4_g8",
    "auto_round/auto_awq_w4_g32_asym",
    "auto_round/auto_gptq_w3_g32_sym",
    "bitnet/bitlinear",
    "bnb/fp4_nested_ragged_60x100",
    "bnb/int8_16x128",
    "bnb/nf4_nested_bf16_storage_128x256",
    "comfy/w4a8_convrot_8x256",
    "compressed_tensors/marlin_24_w4_g128",
    "compressed_tensors/mxfp4",
    "compressed_tensors/naive_fp8_channel",
    "compressed_tensors/nvfp4",
    "compressed_tensors/pack_w3_g128_by_words",
    "compressed_tensors/pack_w4_tensor",
    "eetq/128x64",
    "exl2/b4_3_g64_384x32",
    "exl3/mcg_b1_128x128",
    "gguf/qwen2_q8_0/model.gguf",
    "hqq/b4_g64",
    "marlin/g128_256x128",
    "mlx/nvfp4",
    "mlx/w2_g32_fp16",
    "modelopt/nvfp4_svd_16x128",
    "modelopt/w4a16_awq_g128_24x256",
    "modelopt/w4a16_nvfp4_8x96",
    "modelopt/w8a8_sq_16x256",
    "quanto/qint2",
    "quark/int4_group",
    "quark/mxfp6_e2m3",
    "torchao/int4_g32",
    "torchao/intx_w3_g64",
)


def loaded(folder: Path) -> Weight:
    with open_checkpoint(folder) as weights:
        return weights.get_weights(prefix_of(min(weights.storage.keys())))


def orders(weight: Weight) -> Iterator[Weight]:
    """The layer as it is stored, and in each order that holds it."""
    yield weight
    for layout in targets(type(weight), weight.config):
        taken = options(type(weight), layout, weight.config)
        given = {"dtype": torch.bfloat16} if "dtype" in taken else {}
        given |= {"exponent_bias": True} if "exponent_bias" in taken else {}  # type: ignore[dict-item]
        try:
            yield repack(weight, layout, **given)  # type: ignore[arg-type]
        except RepackError:
            continue
