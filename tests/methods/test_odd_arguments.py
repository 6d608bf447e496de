"""Arguments of a wrong type, and values that a parameter would lose: named, never passed on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qload.errors import ArgumentError, CastError, ConfigError, DtypeError, ShapeError, UnknownMethodError
from qload.methods import (
    AWQMarlinConfig,
    AWQMarlinLinearMethod,
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    get_quantization_config,
    list_quantization_methods,
    marlin_24_make_workspace,
    marlin_permute_bias,
    marlin_permute_scales,
    marlin_zero_points,
    pack_cols,
    register_quantization,
    replace_parameter,
)
from qload.testing import assert_reads_back
from tests.methods.engine import awq, config_of, load, ready

WEIGHT = awq(128, 64, 32)


def made(kind: type[Any] = ColumnParallelLinear, dtype: torch.dtype = torch.float16) -> Any:
    return kind(128, 64, bias=True, params_dtype=dtype, quant_config=config_of(WEIGHT), prefix="a")


@pytest.mark.parametrize("name", [None, ["a"], 5])
def test_a_name_that_is_none_is_unknown(name: Any) -> None:
    with pytest.raises(
        UnknownMethodError, match="no such quantization method\n  known    aqlm, auto-round, awq"
    ):
        get_quantization_config(name)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("name", "config"), [(5, AWQMarlinConfig), ("", AWQMarlinConfig), ("x", int), ("x", 5)]
)
def test_only_a_config_is_registered_and_under_a_name(name: Any, config: Any) -> None:
    before = list_quantization_methods()

    with pytest.raises(ArgumentError, match=r"a quantization method's name|a class of QuantizationConfig"):
        register_quantization(name)(config)

    assert list_quantization_methods() == before


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("config", [None, 5, "x", []], ids=repr)
def test_a_config_is_an_object(config: Any) -> None:
    with pytest.raises(ConfigError, match="quantization_config\n  expected an object"):
        AWQMarlinConfig.from_config(config)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param((4.0, 128, True), "weight_bits\n  expected 4 or 8\n  got      4.0", id="bits"),
        pytest.param((True, 128, True), "weight_bits", id="a truth as bits"),
        pytest.param((4, 128.0, True), "group_size\n  expected a whole number", id="group size"),
        pytest.param((4, None, True), "group_size\n  expected a whole number", id="no group size"),
        pytest.param((4, 128, "no"), "zero_point\n  expected true or false", id="zero points"),
        pytest.param((4, 128, True, 5), "modules_to_not_convert\n  expected a list", id="a number"),
        pytest.param((4, 128, True, [None]), "modules_to_not_convert\n  expected a list", id="no name"),
        pytest.param((4, 128, True, "lm_head"), "modules_to_not_convert\n  expected a list", id="a name"),
        pytest.param((4, 128, True, [""]), "modules_to_not_convert\n  expected a list", id="an empty name"),
    ],
)
def test_a_config_is_made_of_what_it_says(arguments: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        AWQMarlinConfig(*arguments)


@pytest.mark.usefixtures("seen_texts")
def test_a_layers_name_is_a_text() -> None:
    with pytest.raises(ArgumentError, match="prefix\n  expected a layer's name\n  got      None"):
        AWQMarlinConfig(4, 128, True).get_quant_method(nn.Linear(8, 8), None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("loaded", "got"),
    [
        pytest.param(None, "NoneType", id="nothing"),
        pytest.param(np.zeros((4, 64), np.float16), "ndarray", id="an array"),
        pytest.param(torch.zeros(4, 64, device="meta"), "a tensor on device meta", id="a tensor on meta"),
    ],
)
def test_only_a_tensor_with_values_is_loaded(kind: type[Any], loaded: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=rf"a\.scales\n  expected a tensor.*\n  got      {got}"):
        load(made(kind), {"scales": loaded})


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("shard", [True, False, 1.0, "1"])
def test_a_shard_is_named_by_its_number(shard: Any) -> None:
    module = MergedColumnParallelLinear(
        128, [64, 64], params_dtype=torch.float16, quant_config=config_of(WEIGHT)
    )

    with pytest.raises(ArgumentError, match="shard_id\n  expected None or one of 0, 1"):
        load(module, WEIGHT.fields(), shard)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("sizes", [[], [0, 64], [-8, 72]], ids=str)
def test_parts_have_a_size(sizes: list[int]) -> None:
    with pytest.raises(ArgumentError, match="output_partition_sizes\n  expected sizes of at least 1"):
        AWQMarlinLinearMethod(config_of(WEIGHT)).create_weights(
            nn.Module(), 128, sizes, 128, 64, torch.float16
        )


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("value", "way"),
    [
        pytest.param(1e-9, "underflows\n  got      1e-09", id="to 0"),
        pytest.param(1.2345e-7, "underflows\n  got      1.2345e-07", id="to fewer bits"),
        pytest.param(-1e-9, "underflows\n  got      -1e-09", id="below 0"),
        pytest.param(7e4, "overflows\n  got      70000", id="to infinity"),
    ],
)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear], ids=lambda kind: kind.__name__)
def test_a_scale_that_a_cast_would_lose_is_named(kind: type[Any], value: float, way: str) -> None:
    scales = torch.ones(4, 64)
    scales[2, 3] = scales[1, 1] = value

    with pytest.raises(
        CastError,
        match=rf"a\.scales: a cast from float32 to float16 {way} \(2 values in all\)\n  remedy   a params",
    ):
        load(made(kind), {"scales": scales})


def test_a_scale_that_a_cast_only_rounds_is_loaded_rounded() -> None:
    scales = torch.full((4, 64), 0.1)
    module = made()

    load(module, {**WEIGHT.fields(), "scales": scales})

    assert torch.equal(module.scales, scales.half())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float64], ids=str)
def test_scales_of_any_float_dtype_are_loaded(dtype: torch.dtype) -> None:
    module = made()
    load(module, {**WEIGHT.fields(), "scales": WEIGHT.scales.to(dtype), "bias": torch.zeros(64)})

    assert_reads_back(ready(module), WEIGHT, torch.float16)


@pytest.mark.usefixtures("seen_texts")
def test_a_small_number_of_a_plain_weight_may_become_0() -> None:
    """It is lost alone, and not with all the weights of a group."""
    module = ColumnParallelLinear(2, 1, bias=False, params_dtype=torch.float16, prefix="a")

    load(module, {"weight": torch.tensor([[1e-9, 1.0]])})

    assert module.weight.tolist() == [[0, 1]]
    with pytest.raises(
        CastError, match=r"a\.weight: a cast from float32 to float16 overflows\n  got      70000"
    ):
        load(module, {"weight": torch.tensor([[7e4, torch.inf]])})


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        pytest.param(
            lambda m: m(torch.ones(1, 4).half()), DtypeError, "weight: x: .*\n.*float32", id="dtype"
        ),
        pytest.param(lambda m: m(torch.ones(1, 3)), ShapeError, r"weight: x: .*\n.*\(\.\.\., 4\)", id="K"),
        pytest.param(
            lambda m: m.quant_method.apply(m, torch.ones(1, 4), torch.ones(1)),
            ShapeError,
            r"bias: .*\n.*\(3,\)",
            id="bias",
        ),
    ],
)
def test_a_plain_layer_says_what_it_multiplies(
    call: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    module = ColumnParallelLinear(4, 3, params_dtype=torch.float32)
    load(module, {"weight": torch.ones(3, 4), "bias": torch.zeros(3)})
    assert type(module.quant_method) is UnquantizedLinearMethod

    with pytest.raises(error, match=text):
        call(module)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        pytest.param("weight", None, "weight\n  expected a tensor\n  got      NoneType", id="nothing"),
        pytest.param(
            "forward", torch.zeros(1), "param_name\n  expected a parameter of Linear", id="a method"
        ),
    ],
)
def test_a_parameter_is_replaced_by_a_tensor_and_nothing_else_is(name: str, data: Any, text: str) -> None:
    layer = nn.Linear(2, 2)

    with pytest.raises(ArgumentError, match=text):
        replace_parameter(layer, name, data)

    assert layer(torch.zeros(2)).shape == (2,)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "pack", [lambda q: pack_cols(q, 4, 1, 64), lambda q: marlin_zero_points(q, 1, 64, 4)]
)
def test_codes_are_integers(pack: Callable[[Any], Any], dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match="wrong dtype\n  expected an integer dtype"):
        pack(torch.ones(1, 64).to(dtype))


@pytest.mark.usefixtures("seen_texts")
def test_a_bias_is_permuted_as_the_scales_of_one_group() -> None:
    bias = torch.arange(128).half()

    permuted = marlin_permute_bias(bias)

    runs = [2 * i + 8 * pair + one for i in range(4) for pair in range(4) for one in range(2)]
    assert permuted.tolist() == [32 * block + column for block in range(4) for column in runs]
    assert marlin_permute_scales(bias[None], 64, 128, -1).tolist() == [permuted.tolist()]
    with pytest.raises(ShapeError, match=r"b: wrong shape\n  expected \(N,\)"):
        marlin_permute_bias(bias[None])


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("N", [0, -128, 128.0, None])
def test_a_sparse_layer_has_columns(N: Any) -> None:
    with pytest.raises(ArgumentError, match="size_n\n  expected at least 1"):
        marlin_24_make_workspace(N, "cpu")
