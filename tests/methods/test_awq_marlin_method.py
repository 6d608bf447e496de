"""The life of one AWQ layer: created empty, loaded, repacked once, called."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from qload.errors import ArgumentError, CastError, DtypeError, MismatchError, NoKernelError, ShapeError
from qload.formats import AWQWeight
from qload.kernel_formats import repack
from qload.layouts import awq as order
from qload.methods import (
    AWQMarlinConfig,
    AWQMarlinLinearMethod,
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    UnquantizedLinearMethod,
)
from qload.testing import assert_reads_back, assert_same_bits
from qload.testing.emulators import marlin_weight
from tests.methods.engine import awq, config_of, load, ready
from tests.paths import cases

pytestmark = pytest.mark.usefixtures("seen_texts")

LAYERS = [folder for folder in cases("awq", "awq_marlin") if (folder / "model.safetensors").is_file()]


def created(weight: AWQWeight, dtype: torch.dtype = torch.float16, **extra: Any) -> Any:
    """An engine's own module: no class of ours, its parameters registered by the method."""
    (N, K), layer = weight.shape, nn.Module()
    layer.quant_method = AWQMarlinLinearMethod(config_of(weight))
    layer.quant_method.create_weights(layer, K, [N], K, N, dtype, **extra)
    return layer


@pytest.fixture
def weight() -> AWQWeight:
    return awq(128, 64, 32)


@pytest.fixture
def layer(weight: AWQWeight) -> Any:
    made = created(weight)
    load(made, weight.fields())
    return ready(made)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "packed"),
    [
        pytest.param("qweight", (128, 8), torch.int32, 1, id="qweight"),
        pytest.param("qzeros", (4, 8), torch.int32, 1, id="qzeros"),
        pytest.param("scales", (4, 64), torch.bfloat16, None, id="scales"),
    ],
)
def test_parameters_have_the_names_shapes_and_tags_that_engines_load_by(
    weight: AWQWeight, name: str, shape: tuple[int, int], dtype: torch.dtype, packed: int | None
) -> None:
    param = getattr(created(weight, torch.bfloat16, weight_loader=print, note="x"), name)

    assert (tuple(param.shape), param.dtype, param.requires_grad) == (shape, dtype, False)
    assert (param.input_dim, param.output_dim) == (0, 1)
    assert getattr(param, "packed_dim", None) == packed
    assert getattr(param, "packed_factor", None) == (8 if packed else None)
    assert (param.weight_loader, param.note) == (print, "x")


def test_afterwards_the_same_names_hold_what_the_kernel_reads(weight: AWQWeight, layer: Any) -> None:
    for name, tensor in repack(weight, "marlin").fields().items():
        assert_same_bits(getattr(layer, name).data, tensor)

    names = {name for name, _ in layer.named_parameters()}
    assert names == {"qweight", "qzeros", "scales", "g_idx", "g_idx_sort_indices"}
    assert layer.g_idx.numel() == layer.g_idx_sort_indices.numel() == 0
    assert (layer.workspace.dtype, int(layer.workspace.count_nonzero())) == (torch.int32, 0)


@pytest.mark.parametrize(("K", "N", "group", "bits"), [(160, 72, 32, 4), (96, 24, -1, 4), (64, 68, 64, 8)])
def test_a_kernel_that_shares_no_line_with_us_reads_the_buffers(
    K: int, N: int, group: int, bits: int
) -> None:
    weight = awq(K, N, group, bits)
    layer = created(weight)
    load(layer, weight.fields())

    ready(layer)

    held = {name: getattr(layer, name).data for name in ("qweight", "scales", "qzeros", "g_idx")}
    read = marlin_weight(**held, bits=bits, perm=layer.g_idx_sort_indices)
    assert_same_bits(read[:K, :N], weight.dequantize().T.contiguous())
    assert int(read[K:].count_nonzero()) == int(read[:, N:].count_nonzero()) == 0


@pytest.mark.parametrize("folder", LAYERS, ids=lambda folder: folder.name)
def test_a_layer_from_autoawq_has_the_numbers_that_autoawq_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    owner = load_file(folder / "expected" / "expected.safetensors")
    K, N = owner["expected.weight"].shape
    config["group_size"] = -1 if config["group_size"] == K else config["group_size"]  # one group
    method = AWQMarlinConfig.from_config(config)
    module = ColumnParallelLinear(K, N, bias=False, params_dtype=torch.float16, quant_config=method)

    load(module, {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()})

    assert torch.equal(ready(module)(torch.eye(K, dtype=torch.float16)), owner["expected.weight"])
    for name in ("qweight", "qzeros", "scales"):  # vLLM's bytes, where the fixture has them
        assert_same_bits(
            getattr(module, name).data, owner.get(f"repacked.marlin.{name}", getattr(module, name))
        )


@pytest.mark.gpu
def test_a_layer_made_on_a_gpu_is_loaded_prepared_and_called_there(weight: AWQWeight) -> None:
    with torch.device("cuda"):
        layer = created(weight)
    load(layer, weight.fields())

    ready(layer)

    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"cuda"}
    kernel = lambda x: layer.quant_method.apply(layer, x)  # noqa: E731
    assert_reads_back(kernel, weight.to("cuda"), torch.float16)


def test_processing_twice_repacks_once(weight: AWQWeight, layer: Any) -> None:
    before = layer.qweight

    ready(layer)

    assert layer.qweight is before
    assert_reads_back(lambda x: layer.quant_method.apply(layer, x), weight, torch.float16)


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
def test_a_parameter_that_nothing_was_loaded_into_is_named(weight: AWQWeight, name: str) -> None:
    layer = created(weight)
    load(layer, {other: tensor for other, tensor in weight.fields().items() if other != name})

    with pytest.raises(MismatchError, match=f"{name}: not loaded"):
        ready(layer)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("qweight", "2 of 10 were not, the first is 8", id="words"),
        pytest.param("scales", r"32 of 160 values are NaN, first at \(0, 64\)", id="scales"),
        pytest.param("bias", r"16 of 80 values are NaN, first at \(64,\)", id="bias"),
    ],
)
def test_a_part_that_was_not_loaded_is_noticed(name: str, text: str) -> None:
    parts = {0: awq(128, 64, 64), 1: awq(128, 16, 64)}
    options = {"params_dtype": torch.float16, "quant_config": config_of(parts[0]), "prefix": "a.gate_up"}
    module = MergedColumnParallelLinear(128, [64, 16], **options)
    for part, weight in parts.items():
        tensors = {**weight.fields(), "bias": torch.zeros(weight.shape[0])}
        load(module, {n: t for n, t in tensors.items() if (n, part) != (name, 1)}, part)

    with pytest.raises(MismatchError, match=f"a.gate_up.{name}: not loaded\n.*\n.*{text}"):
        ready(module)


def test_a_layer_is_not_called_before_it_is_ready(weight: AWQWeight) -> None:
    layer = created(weight)

    with pytest.raises(ArgumentError, match="process_weights_after_loading before the first call"):
        layer.quant_method.apply(layer, torch.ones(1, 128))


@pytest.mark.parametrize("shape", [(128,), (0, 128), (2, 3, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_leading_dimensions_and_the_dtype_pass_through(
    layer: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    y = layer.quant_method.apply(layer, torch.ones(shape, dtype=dtype), torch.zeros(64, dtype=dtype))

    assert (tuple(y.shape), y.dtype) == ((*shape[:-1], 64), dtype)


def test_an_input_need_not_be_contiguous(layer: Any) -> None:
    x = torch.arange(128.0 * 6).reshape(128, 2, 3).permute(2, 1, 0)

    got = layer.quant_method.apply(layer, x)

    assert_same_bits(got, layer.quant_method.apply(layer, x.contiguous()))


def test_a_bias_of_another_length_is_refused(layer: Any) -> None:
    with pytest.raises(ShapeError, match=r"bias: wrong shape\n  expected \(64,\) = \(N,\)"):
        layer.quant_method.apply(layer, torch.ones(1, 128), torch.ones(1))


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        pytest.param({"qweight": torch.zeros(128, 8)}, DtypeError, "int32\n.*float32", id="words as floats"),
        pytest.param({"qweight": torch.zeros(8, 128).int()}, ShapeError, r"\(128, 8\)\n", id="transposed"),
        pytest.param({"scales": torch.full((4, 64), 1e6)}, CastError, r"1e\+06 \(256 values", id="overflow"),
        pytest.param(
            {"scales": torch.ones(4, 64).int()}, DtypeError, "float16\n.*int32", id="scales as ints"
        ),
    ],
)
def test_what_does_not_fit_a_parameter_is_refused_by_its_loader(
    weight: AWQWeight, tensors: dict[str, Tensor], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        load(created(weight), tensors)


def test_inputs_that_fill_no_word_are_refused_when_the_layer_is_made() -> None:
    with pytest.raises(NoKernelError, match="K = 12"):
        created(awq(12, 8, -1))


def test_symmetric_zero_points_that_are_stored_otherwise_are_believed() -> None:
    weight = awq(64, 64, 32)
    module = ColumnParallelLinear(
        64, 64, bias=False, params_dtype=torch.float16, quant_config=config_of(weight, zero_point=False)
    )
    load(module, weight.fields())

    assert_reads_back(ready(module), weight, torch.float16)


@pytest.mark.parametrize("zero_point", [True, False])
def test_zero_points_in_the_middle_stay_where_the_config_says_that_there_are_some(
    weight: AWQWeight, zero_point: bool
) -> None:
    weight.qzeros.copy_(order.columns(4).pack(torch.full((4, 64), 8)))  # type: ignore[union-attr]
    (N, K), module = weight.shape, nn.Module()
    module.quant_method = AWQMarlinLinearMethod(AWQMarlinConfig(4, weight.config.group_size, zero_point))
    module.quant_method.create_weights(module, K, [N], K, N, torch.float16)
    load(module, weight.fields())

    assert bool(ready(module).qzeros.numel()) == zero_point
    assert_reads_back(lambda x: module.quant_method.apply(module, x), weight, torch.float16)


def test_a_plain_layer_loads_with_its_own_loader_and_notices_what_is_missing() -> None:
    layer, method = nn.Module(), UnquantizedLinearMethod()
    method.create_weights(layer, 4, [2, 1], 4, 3, torch.float32)
    with pytest.raises(MismatchError, match="weight: not loaded"):
        method.process_weights_after_loading(layer)

    load(layer, {"weight": torch.arange(12.0).reshape(3, 4)})

    method.process_weights_after_loading(layer)
    assert method.apply(layer, torch.ones(4), torch.ones(3)).tolist() == [7, 23, 39]


def test_a_config_says_how_it_is_made() -> None:
    config = AWQMarlinConfig(8, -1, False, ["lm_head"])

    assert repr(eval(repr(config))) == repr(config)
    assert (config.pack_factor, str(config.quant_type)) == (4, "uint8b128")
