"""Layers with dialect-specific tensors: the right values, or an error with the dialect's name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.checkpoint import layers, open_checkpoint
from qload.detect import loader_from_config
from qload.detect.loaders import Recogniser
from qload.detect.signatures import METHODS_ELSEWHERE, SIGNATURES, WORDS, LayerTensors
from qload.errors import (
    CutError,
    DtypeError,
    MissingTensorError,
    ShapeError,
    TwoFormatsError,
    UnsupportedFormatError,
)
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.verify import verify
from qload.weights import Weights
from tests.detect import dialect_layers as make

pytestmark = pytest.mark.usefixtures("seen_texts")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
FP8_TENSOR = {"quant_method": "modelopt", "quant_algo": "FP8"}
FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8_SMALL_BLOCK = {"quant_method": "fp8", "weight_block_size": [32, 64]}
MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
E8M0 = torch.float8_e8m0fnu

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "tensor"}}},
}
INT8_GROUPS = {
    **INT8,
    "config_groups": {
        "g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "group", "group_size": 32}}
    },
}
INT8_OUTPUTS = {
    **INT8,
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}},
}
READ: dict[str, tuple[dict[str, Any] | None, make.Layer]] = {
    "FP8 of the tensor in GPTQ": (GPTQ, make.fp8()),
    "FP8 of the tensor, one entry": (GPTQ, make.fp8(scales=(1,))),
    "FP8 of outputs in GPTQ": (GPTQ, make.fp8(scales=(64, 1), dtype=torch.bfloat16)),
    "FP8 of outputs, one axis": (FP8_TENSOR, make.fp8(scales=(64,))),
    "FP8 of blocks in FP8 of tensors": (FP8_TENSOR, make.fp8((256, 256), (2, 2), (128, 128))),
    "FP8 of the tensor in FP8 of blocks": (FP8_BLOCK, make.fp8((256, 256), ())),
    "FP8 of outputs in FP8 of blocks": (FP8_BLOCK, make.fp8((256, 256), (256, 1))),
    "FP8 of blocks of 128 in others": (FP8_SMALL_BLOCK, make.fp8((256, 256), (2, 2), (128, 128))),
    "FP8 of blocks whose scales are `scale`": (
        FP8_BLOCK,
        make.fp8((256, 512), (2, 4), (128, 128), "scale", E8M0),
    ),
    "FP8 of ragged blocks whose scales are `scale`, float32": (
        FP8_BLOCK,
        make.fp8((200, 512), (2, 4), (128, 128), "scale"),
    ),
    "`scale` of the config's own blocks": (
        FP8_SMALL_BLOCK,
        make.fp8((128, 256), (4, 4), (32, 64), "scale"),
    ),
    "FP8 without a config": (None, make.fp8(scales=(64, 1))),
    "FP8 of Mistral in GPTQ": (GPTQ, make.fp8(name="qscale_weight", dtype=torch.bfloat16)),
    "MXFP8 beside NVFP4": (NVFP4, make.mxfp8()),
    "MXFP8 in blocks": (FP8_BLOCK, make.mxfp8(name="weight_scale_inv")),
    "MXFP8, float8 exponents": (GPTQ, make.mxfp8(float8=True)),
    "mxfp8, as it is written": (MXFP8, make.mxfp8(name="weight_scale_inv")),
    "mxfp8, the other name": (MXFP8, make.mxfp8(float8=True)),
    "MXFP4 of DeepSeek V4": (FP8_BLOCK, make.mxfp4(signed=True, float8=True)),
    "MXFP4 of Quark in GPTQ": (GPTQ, make.mxfp4(names=("weight", "weight_scale"))),
    "MXFP4 under the other name": (GPTQ, make.mxfp4(names=("weight", "weight_scale_inv"))),
    "MXFP4 of compressed-tensors in FP8": (FP8_BLOCK, make.mxfp4(names=("weight_packed", "weight_scale"))),
    "mxfp4 of ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "mxfp4"},
        make.mxfp4(names=("weight", "weight_scale")),
    ),
    "NVFP4 in FP8": (FP8_TENSOR, make.nvfp4()),
    "NVFP4 of compressed-tensors in FP8": (FP8_TENSOR, make.nvfp4(compressed_tensors=True)),
    "int-quantized of outputs, said to be of the tensor": (INT8, make.int8((64, 1))),
    "int-quantized of the tensor, said to be of outputs": (INT8_OUTPUTS, make.int8((1,))),
    "pack-quantized in FP8": (FP8_BLOCK, make.packed()),
    "pack-quantized of 8 bits in FP8": (FP8_BLOCK, make.packed(bits=8, group=128)),
}


def source(
    config: dict[str, Any] | None, layer: dict[str, Tensor], prefix: str = "up", rank: Any = None
) -> Weights:
    storage = MemoryStorage({f"{prefix}.{suffix}": tensor for suffix, tensor in layer.items()})
    loader = loader_from_config(config, storage)
    return Weights(storage, loader=loader, **({} if rank is None else {"process_group": rank}))


@pytest.mark.parametrize("case", READ)
def test_a_dialect_of_a_format_that_is_read_has_its_values_whole_and_cut(case: str) -> None:
    config, (layer, want) = READ[case]
    whole = torch.from_numpy(want.astype(np.float32))

    assert torch.equal(source(config, layer).get_weights("up").dequantize(), whole)
    cuts = 0
    for world in (2, 4):
        for rank in FakeWorld(world):
            weights = source(config, layer, rank=rank)
            for load, axis in ((weights.get_weights_col, 0), (weights.get_weights_row, 1)):
                try:
                    share = load("up").dequantize()
                except CutError:  # the cut is inside of a block
                    assert "blocks" in case
                    continue
                assert torch.equal(share, whole.chunk(world, axis)[rank.rank()])
                cuts += 1
    assert cuts >= 2


@pytest.mark.parametrize("case", [case for case in READ if case != "FP8 without a config"])
def test_a_dialect_multiplies_as_its_values(case: str) -> None:
    config, (layer, want) = READ[case]
    x = torch.randint(-4, 5, (3, want.shape[1])).double()

    y = source(config, layer).get_weights("up").get_linear(activations="unquantized")(x.float())

    sums = x.numpy() @ want.T
    bound = np.abs(x.numpy()) @ np.abs(want).T * want.shape[1] * 2.0**-24
    assert bool((np.abs(y.double().numpy() - sums) <= bound).all())


def test_a_dialect_is_noted_once_it_is_loaded() -> None:
    config, (layer, _) = READ["FP8 of outputs in GPTQ"]
    weights = source(config, layer)

    weights.get_weights("up")

    (note,) = weights.report().notes
    assert note.startswith(
        "up: the config does not name its format; read as fp8 with a scale for each output, by its tensors"
    )


def test_a_layer_that_fits_the_config_has_no_note() -> None:
    weights = source(GPTQ, make.gptq())

    weights.get_weights("up")

    assert weights.report().notes == ()


def test_inputs_are_quantized_as_the_config_says_of_other_layers_in_fp8() -> None:
    static = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}
    layer, _ = make.fp8((256, 256), (256, 1))

    with pytest.raises(MissingTensorError, match=r"up\.input_scale|weight_scale"):
        source(static, layer).get_weights("up")

    weight = source(static, {**layer, "input_scale": torch.ones(())}).get_weights("up")
    assert weight.activations is not None
    assert weight.input_scale is not None


I8, U8, I32 = torch.int8, torch.uint8, torch.int32


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


F8 = torch.float8_e4m3fn
# A layer of each row of the table, with the dialect's name in the error.
FOREIGN: list[tuple[str, dict[str, Tensor]]] = [
    ("ComfyUI's own layers", {"weight": zeros(32, 64, dtype=F8), "comfy_quant": zeros(9, dtype=U8)}),
    (
        "ComfyUI's asym_w4a8_int8",
        {
            "weight": zeros(32, 32, dtype=I8),
            "weight_s_channel": ones(32),
            "weight_s_rel": zeros(32, 4, dtype=F8),
        },
    ),
    (
        "ComfyUI's awq_w4a16",
        {"weight": zeros(32, 32, dtype=I8), "weight_scale": ones(2, 32), "weight_zeros": ones(2, 32)},
    ),
    ("ComfyUI's scaled FP8", {"weight": zeros(32, 64, dtype=F8), "scale_weight": ones(1)}),
    ("torchao's safetensors", {"_weight_qdata": zeros(32, 64, dtype=I8), "_weight_scale": ones(32, 1)}),
    ("quanto (int8, float8)", {"weight._data": zeros(32, 64, dtype=I8), "weight._scale": ones(32, 1)}),
    ("quanto (int8, float8)", {"weight._data": zeros(32, 64, dtype=F8), "weight._scale": ones(32, 1)}),
    (
        "quanto (int4, int2)",
        {
            "weight._data._data": zeros(16, 64, dtype=U8),
            "weight._scale": ones(16, 1),
            "weight._shift": ones(16, 1),
        },
    ),
    ("SINQ", {"W_q": zeros(16, 64, dtype=U8), "scale": ones(32, 1), "zero": ones(32, 1), "scale2": ones(64)}),
    ("HQQ", {"W_q": zeros(16, 64, dtype=U8), "scale": ones(32, 1), "zero": ones(32, 1)}),
    (
        "EXL3's n-gram tables",
        {"trellis": zeros(8, 160, dtype=torch.int16), "signs": zeros(8, 10, dtype=torch.int16)},
    ),
    ("QTIP", {"trellis": zeros(8, 64, dtype=torch.int16), "SU": ones(64), "SV": ones(64)}),
    ("QuIP#", {"Qidxs": zeros(8, 8, dtype=torch.int64), "SU": ones(64), "SV": ones(64)}),
    (
        "AQLM",
        {
            "codes": zeros(32, 8, 2, dtype=I8),
            "codebooks": ones(2, 256, 1, 8, dtype=torch.float16),
            "scales": ones(32, 1, 1, 1, dtype=torch.float16),
        },
    ),
    ("VPTQ", {"indices": zeros(1, 8, 8, dtype=I32), "centroids.weight": ones(1, 2048)}),
    (
        "SpQR",
        {
            "dense_weights": zeros(64, dtype=torch.int64),
            "row_offsets": zeros(33, dtype=I32),
            "col_vals": zeros(5, dtype=I32),
        },
    ),
    (
        "HIGGS",
        {
            "weight": zeros(8, 64, dtype=torch.int16),
            "scales": ones(2, 32),
            "tables": ones(16),
            "tables2": ones(16, 16, 1),
        },
    ),
    (
        "FP-Quant",
        {
            "qweight": zeros(32, 32, dtype=U8),
            "scales": zeros(32, 2, dtype=U8),
            "forward_hadamard_matrix": ones(32, 32),
        },
    ),
    (
        "FP-Quant",
        {
            "qweight": zeros(32, 32, dtype=U8),
            "scales": zeros(32, 2, dtype=U8),
            "forward_hadamard_matrix": ones(32, 32),
            "weight_global_scale": ones(1),
        },
    ),
    ("SVDQuant (Nunchaku)", {"qweight": zeros(32, 32, dtype=I8), "wscales": ones(1, 32)}),
    ("QQQ", {"B": zeros(4, 128, dtype=I32), "s_channel": ones(1, 64), "s_group": ones(0)}),
    ("BitBLAS", {"qweight": zeros(32, 32, dtype=I8), "scales": ones(32, 2), "zeros": ones(32, 2)}),
    (
        "Gemma's mobile format",
        {"weight": zeros(32, 32, dtype=U8), "weight_scale": ones(32, 1), "input_activation_scale": ones()},
    ),
    (
        "Gemma's mobile format",
        {"embedding_quantized": zeros(32, 32, dtype=U8), "embedding_scale": ones(32, 1)},
    ),
    (
        "Metal",
        {"weight": zeros(32, 8, dtype=torch.uint32), "scales": ones(32, 2), "qbiases": ones(32, 2)},
    ),
    ("MLX", {"weight": zeros(32, 8, dtype=torch.uint32), "scales": ones(32, 2), "biases": ones(32, 2)}),
    ("MLX", {"weight": zeros(3, 32, 8, dtype=torch.uint32), "scales": zeros(3, 32, 2, dtype=U8)}),
    ("BitNet", {"weight": zeros(8, 64, dtype=U8), "weight_scale": ones(1, dtype=torch.bfloat16)}),
    (
        "ModelOpt's NVFP4_SVD",
        {
            "weight_quantizer._svdquant_lora_a": ones(8, 64),
            "weight_quantizer._svdquant_lora_b": ones(32, 8),
            "weight": zeros(32, 32, dtype=U8),
        },
    ),
    (
        "ModelOpt's NVFP4 with groups of 32",
        {"weight": zeros(32, 32, dtype=U8), "weight_scale": zeros(32, 2, dtype=F8), "weight_scale_2": ones()},
    ),
    (
        "ModelOpt's W4A8_AWQ",
        {"weight": zeros(16, 64, dtype=U8), "weight_scale": ones(32, 2), "weight_scale_2": ones()},
    ),
    (
        "ModelOpt's W8A8_SQ_PER_CHANNEL",
        {"weight": zeros(32, 64, dtype=I8), "weight_scale": ones(32), "pre_quant_scale": ones(64)},
    ),
    (
        "NVFP4 with swizzled scales",
        {
            "weight": zeros(144, 120, dtype=U8),
            "weight_scale": zeros(256, 16, dtype=F8),
            "weight_scale_2": ones(),
        },
    ),
    (
        "MXFP8 with swizzled scales",
        {"weight": zeros(256, 320, dtype=F8), "weight_scale": zeros(256, 12, dtype=U8)},
    ),
    (
        "NVFP4 whose scales are bytes",
        {
            "weight": zeros(32, 32, dtype=U8),
            "weight_scale": zeros(32, 4, dtype=U8),
            "weight_scale_2": ones(),
        },
    ),
    ("Quark's MXFP6", {"weight": zeros(32, 48, dtype=U8), "weight_scale": zeros(32, 2, dtype=U8)}),
    ("Quark's int4", {"weight": zeros(64, 4, dtype=I32), "weight_scale": ones(2, 32)}),
    (
        "Quark's int8",
        {
            "weight": zeros(32, 64, dtype=I8),
            "weight_scale": ones(32),
            "weight_zero_point": zeros(32, dtype=I8),
        },
    ),
]
EACH = [pytest.param(*pair, id=f"{at} {pair[0]}") for at, pair in enumerate(FOREIGN)]
every_foreign = pytest.mark.parametrize(("name", "layer"), EACH)
every_unread = pytest.mark.parametrize(  # quanto's tensors are read where no config names another method
    ("name", "layer"), [each for each in EACH if not str(each.values[0]).startswith("quanto")]
)


def test_each_row_of_the_table_has_a_layer_here() -> None:
    tried = {(row.dialect, row.parts) for name, layer in FOREIGN for row in SIGNATURES if row.dialect == name}
    matched = [next(row for row in SIGNATURES if row.matches(tensors(layer))).parts for _, layer in FOREIGN]

    assert {(row.dialect, row.parts) for row in SIGNATURES} == tried
    assert set(matched) == {row.parts for row in SIGNATURES}


def tensors(layer: dict[str, Tensor]) -> LayerTensors:
    stored = MemoryStorage({f"up.{suffix}": tensor for suffix, tensor in layer.items()})
    return LayerTensors.of_storage(stored, "up")


@every_unread
def test_a_checkpoint_of_a_foreign_dialect_is_refused_by_name(name: str, layer: dict[str, Tensor]) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        source(None, layer)

    assert caught.value.format == name
    assert caught.value.reason.startswith("up has ")
    assert caught.value.remedy


@every_foreign
def test_a_foreign_layer_among_others_is_refused_alone(name: str, layer: dict[str, Tensor]) -> None:
    whole = name in ("torchao's safetensors", "ComfyUI's own layers")  # no file of a method has their tensors
    stored = {f"down.{suffix}": tensor for suffix, tensor in make.gptq().items()}
    stored |= {f"up.{suffix}": tensor for suffix, tensor in layer.items()}
    storage = MemoryStorage(stored)
    if whole:
        with pytest.raises(UnsupportedFormatError, match=name):
            loader_from_config(GPTQ, storage)
        return
    weights = Weights(storage, loader=loader_from_config(GPTQ, storage))

    assert weights.get_weights("down").format == "gptq"
    with pytest.raises(UnsupportedFormatError) as caught:
        weights.loader.describe(weights, "up")
    assert caught.value.format == name
    listed = {layer.prefix: layer.error for layer in layers(weights)}
    assert isinstance(listed["up"], UnsupportedFormatError)
    assert listed["down"] is None


NEAR_MISSES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "FP8 with half of its scales": (GPTQ, make.fp8(scales=(64, 1))[0] | {"weight_scale": ones(32, 1)}),
    "FP8 with a row of blocks too many": (FP8_BLOCK, make.fp8((256, 256))[0] | {"weight_scale": ones(3, 2)}),
    "int-quantized of groups, of which one is left": (
        INT8_GROUPS,
        {"weight": zeros(8, 64, dtype=I8), "weight_scale": ones(8, 1)},
    ),
    "FP8 whose grid of blocks was cut to one": (
        FP8_BLOCK,
        make.fp8((256, 256))[0] | {"weight_scale": ones(1, 1)},
    ),
    "FP8 whose bytes lost their dtype": (
        FP8_TENSOR,
        {"weight": zeros(8, 64, dtype=U8), "weight_scale": ones(1)},
    ),
    "int8 whose bytes lost their sign": (INT8, {"weight": zeros(8, 64, dtype=U8), "weight_scale": ones(1)}),
    "NVFP4 with half of its scales": (
        NVFP4,
        make.nvfp4()[0] | {"weight_scale": zeros(64, 4, dtype=F8), "weight_scale_2": ones()},
    ),
    "FP8 whose weight and scales were exchanged": (
        FP8_BLOCK,
        {"weight": ones(2, 2), "weight_scale_inv": zeros(256, 256, dtype=F8)},
    ),
    "FP8 whose scales are whole numbers": (GPTQ, make.fp8()[0] | {"weight_scale": zeros(1, dtype=I32)}),
    "FP8 under two names": (
        FP8_TENSOR,
        make.fp8(scales=(64, 1))[0] | {"weight_scale_inv": ones(64, 1)},
    ),
    "MXFP8 with groups of 64": (NVFP4, make.mxfp8()[0] | {"weight_scale": zeros(64, 2, dtype=U8)}),
    "MXFP4 with groups of 64": (FP8_BLOCK, make.mxfp4()[0] | {"scale": zeros(64, 2, dtype=U8)}),
    "MXFP4 over wide integers": (FP8_BLOCK, make.mxfp4()[0] | {"weight": zeros(64, 64, dtype=torch.int16)}),
    "NVFP4 with two second scales": (FP8_TENSOR, make.nvfp4()[0] | {"weight_scale_2": ones(2)}),
    "NVFP4 with a group too few": (FP8_TENSOR, make.nvfp4()[0] | {"weight_scale": zeros(64, 7, dtype=F8)}),
    "pack-quantized with a group too many": (FP8_BLOCK, make.packed()[0] | {"weight_scale": ones(64, 5)}),
    "BitNet with two scales": (GPTQ, {"weight": zeros(8, 64, dtype=U8), "weight_scale": ones(2)}),
    "MXFP6 of other groups": (
        GPTQ,
        {"weight": zeros(32, 48, dtype=U8), "weight_scale": zeros(32, 4, dtype=U8)},
    ),
    "quanto's int8 in SQ, short of a factor": (
        GPTQ,
        {"weight": zeros(32, 64, dtype=I8), "weight_scale": ones(32), "pre_quant_scale": ones(63)},
    ),
    "EXL3 with a vector of another length": (
        GPTQ,
        {
            "trellis": zeros(8, 16, 64, dtype=torch.int16),
            "suh": ones(112, dtype=torch.float16),
            "svh": ones(256, dtype=torch.float16),
        },
    ),
    "quanto with scales of other rows": (
        GPTQ,
        {"weight._data": zeros(32, 64, dtype=I8), "weight._scale": ones(31, 1)},
    ),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_a_near_miss_is_not_excused(case: str) -> None:
    config, layer = NEAR_MISSES[case]

    weights = source(config, layer)

    with pytest.raises((DtypeError, MissingTensorError, ShapeError, TwoFormatsError)):
        weights.loader.describe(weights, "up")
    assert Recogniser(weights.loader.formats).recognise(weights, "up") is None
    assert all(not isinstance(layer.error, UnsupportedFormatError) for layer in layers(weights))


@pytest.mark.parametrize("lost", ["scales", "qzeros", "qweight"])
def test_damage_of_a_layer_of_the_config_stays_an_error(lost: str) -> None:
    layer = make.gptq()
    layer[lost] = layer[lost][:, :-1].contiguous()
    weights = source(GPTQ, layer)

    with pytest.raises(ShapeError):
        weights.loader.describe(weights, "up")


def test_words_of_gptq_are_refused_alone_in_a_checkpoint_of_another_method() -> None:
    weights = source(FP8_BLOCK, make.gptq())

    with pytest.raises(UnsupportedFormatError) as caught:
        weights.loader.describe(weights, "up")
    assert caught.value.format == WORDS.dialect
    with pytest.raises(MissingTensorError):  # without a config, the tensors are contradictory
        source(None, make.gptq()).get_weights("up")


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (make.nvfp4()[0], "NVFP4"),
        (make.mxfp8()[0], "MXFP8"),
        (make.mxfp4(names=("weight", "weight_scale"))[0], "MXFP4"),
    ],
)
def test_without_a_config_no_order_is_guessed(layer: dict[str, Tensor], name: str) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        source(None, layer).get_weights("up")

    assert caught.value.format == name


def test_scales_that_may_divide_are_refused_unless_the_config_is_of_fp8() -> None:
    layer, want = make.fp8(scales=(64,), name="weight_scale_inv")

    with pytest.raises(UnsupportedFormatError, match="multiplies or divides"):
        source(GPTQ, layer).get_weights("up")
    weight = source(FP8_BLOCK, layer).get_weights("up")
    assert torch.equal(weight.dequantize(), torch.from_numpy(want.astype(np.float32)))


def test_scales_divide_where_the_config_says_so_of_another_shape() -> None:
    config = {"quant_method": "fp8", "weight_scale_method": "tensor", "weight_scale_semantics": "inverse"}
    layer, _ = make.fp8(scales=(64,), name="weight_scale_inv")
    stored, scales = make.codes(1, (64, 128)), layer["weight_scale_inv"].numpy()

    want = make.e4m3(stored).astype(np.float32) / scales[:, None]

    assert torch.equal(source(config, layer).get_weights("up").dequantize(), torch.from_numpy(want))


def test_a_dialect_of_a_layer_that_the_config_leaves_out_is_read() -> None:
    config = {**NVFP4, "exclude_modules": ["up"]}
    layer, want = make.fp8(scales=(64, 1))

    weight = source(config, layer).get_weights("up")

    assert torch.equal(weight.dequantize(), torch.from_numpy(want.astype(np.float32)))


def test_thousands_of_layers_of_a_dialect_are_described_in_no_time() -> None:
    layer, _ = make.mxfp4((2, 64), signed=True, float8=True)
    stored = {f"{at}.w1.{suffix}": tensor for at in range(3000) for suffix, tensor in layer.items()}
    storage = MemoryStorage(stored)
    calls = 0
    weights = Weights(storage, loader=loader_from_config(FP8_BLOCK, storage))
    missing = weights.missing

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return missing(*arguments)

    weights.missing = counted  # type: ignore[method-assign]
    for at in range(3000):
        weights.loader.describe(weights, f"{at}.w1")

    assert calls == 1  # only the first layer compares all names for the text of an error


@pytest.mark.parametrize("method", METHODS_ELSEWHERE)
def test_a_method_that_is_not_read_is_named_with_its_way_out_and_its_tensors(method: str) -> None:
    layer = {"weight": zeros(8, 8, dtype=torch.int64), "zeros": zeros(2, 2)}
    with pytest.raises(UnsupportedFormatError) as caught:
        source({"quant_method": method}, layer)

    assert caught.value.format == method
    assert caught.value.remedy == METHODS_ELSEWHERE[method]
    assert "1 tensors are stored so, as up.weight" in caught.value.reason


COMFY = {"format_version": "1.0", "layers": {"blocks.0.qkv": {"format": "nvfp4"}}}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (json.dumps(COMFY), True),
        ("{", False),
        (json.dumps({"layers": {}}), False),
        (json.dumps({"layers": "all"}), False),
        ("[" * 100_000, False),
    ],
)
def test_comfyui_declares_its_layers_in_the_header_and_no_config_has_another_method(
    text: str, refused: bool, tmp_path: Path
) -> None:
    save_file(
        {"norm.weight": torch.ones(4)}, tmp_path / "model.safetensors", {"_quantization_metadata": text}
    )
    with open_checkpoint(tmp_path) as weights:
        assert weights.get_weights("norm").shape == (4,)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    if not refused:
        with open_checkpoint(tmp_path) as weights:
            assert weights.get_weights("norm").shape == (4,)
        return
    with pytest.raises(UnsupportedFormatError, match=r"nvfp4.*[\s\S]*blocks\.0\.qkv"):
        open_checkpoint(tmp_path)


def model(folder: Path, layers: dict[str, dict[str, Tensor]], config: dict[str, Any]) -> Path:
    stored = {f"{prefix}.{suffix}": t for prefix, layer in layers.items() for suffix, t in layer.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


@pytest.mark.parametrize("case", [case for case, (config, _) in READ.items() if config])
def test_verify_accuses_no_dialect(case: str, tmp_path: Path) -> None:
    config, (layer, _) = READ[case]
    assert config is not None

    report = verify(model(tmp_path, {"layers.0.up": layer}, config))

    assert report.findings == ()
    noted = [
        note for note in report.notes if note.startswith("layers.0.up: the config does not name its format")
    ]
    assert len(noted) == (config["quant_method"] != "mxfp8" and config.get("quant_algo") != "mxfp4")


@pytest.mark.parametrize(
    "case", ["MXFP4 of DeepSeek V4", "MXFP8, float8 exponents", "mxfp8, as it is written"]
)
def test_an_exponent_that_is_nan_is_found(case: str, tmp_path: Path) -> None:
    config, (layer, _) = READ[case]
    assert config is not None
    name = next(name for name in layer if "scale" in name)
    layer = {**layer, name: layer[name].clone()}
    layer[name].view(U8)[3, 1] = 255

    report = verify(model(tmp_path, {"layers.0.up": layer}, config))

    assert "scale-value" in {finding.rule for finding in report.findings}
