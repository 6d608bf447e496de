"""Tensors on device "meta", without values: each public callable raises an error by name, or returns none.

Callables and arguments are those of `tests.meta.test_argument_types`. Further tests cover combinations of
public names: constructors of all formats, quantizers, parameters, and kernels of engines.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qload
from qload.errors import ArgumentError
from qload.kernel_formats.repack import targets
from qload.kernels.mp_linear.kernels import read_layer
from qload.methods import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from qload.quantize import BNB4Quantizer, BNBInt8Quantizer, EETQQuantizer, Fp8Quantizer, Quantizer
from qload.spec import Layer, Weight
from qload.testing.layer_factory import layer_of
from qload.testing.traits import CONTRACTS, contract
from tests.kernels.mp_layers import Case
from tests.meta.test_argument_types import INT4, public
from tests.methods.engine import awq, config_of, load

NO_VALUES = r"expected a tensor with values\n  got      a tensor on device meta"
KINDS = (Tensor, Weight, qload.Linear)
Call = Callable[..., Any]


def on_meta(value: Any) -> Any:
    return value.to("meta")


def calls() -> Iterator[Any]:
    """Yield each public callable with one of its tensors, weights or layers on device "meta"."""
    for given in public():
        function, needed = given.values
        bound = getattr(function, "__self__", None)
        if inspect.isclass(function) and issubclass(function, Weight):
            continue  # constructors have a separate test, with tensors of the right shape
        for name, value in needed.items():
            if isinstance(value, KINDS):
                held = value if not isinstance(value, nn.Module) else value.typed.get_linear()
                yield pytest.param(function, needed, name, on_meta(held), id=f"{given.id}-{name}")
        if isinstance(bound, Weight):
            yield pytest.param(
                getattr(on_meta(bound), function.__name__), needed, "", None, id=f"{given.id}-self"
            )


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, Mapping):
        for held in value.values():
            yield from tensors_of(held)
    elif isinstance(value, list | tuple):
        for held in value:
            yield from tensors_of(held)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


@pytest.mark.parametrize(("function", "needed", "name", "value"), list(calls()))
def test_a_tensor_without_values_is_refused_by_name_or_gives_none(
    function: Call, needed: dict[str, Any], name: str, value: Any
) -> None:
    refused: ArgumentError | None = None
    found: list[Tensor] = []
    try:
        found = list(tensors_of(function(**(needed | {name: value} if name else needed))))
    except ArgumentError as error:
        refused = error

    if refused is None:
        assert found
        assert all(tensor.is_meta for tensor in found)
        return
    weight = value.typed if isinstance(value, qload.Linear) else value
    names = [name or "qweight", *(weight.fields() if isinstance(weight, Weight) else ())]
    assert "meta" in refused.got
    assert any(each in refused.argument for each in names), str(refused)


def fields_on_meta() -> Iterator[Any]:
    """Yield each tensor of a weight of each format."""
    for name in CONTRACTS:
        weight = layer_of(contract(name).common(name), 128, 256).weight()
        for field in weight.fields():
            yield pytest.param(weight, field, id=f"{name}-{field}")


@pytest.mark.parametrize(("weight", "name"), list(fields_on_meta()))
def test_a_constructor_checks_values_or_shapes_of_a_tensor_on_meta(weight: Weight, name: str) -> None:
    """Check indices and 2:4 patterns by values, all other tensors by dtype and shape."""
    spec = next(spec for spec in weight.tensors(weight.config) if spec.name == name)
    tensors = weight.fields() | {name: on_meta(weight.fields()[name])}

    def construct() -> Weight:
        return type(weight)(config=weight.config, layer=weight.layer, **tensors)

    by_value = spec.index_of is not None or spec.permutation or bool(spec.nibbles)

    if not by_value:
        assert construct().fields()[name].is_meta
    else:
        with pytest.raises(ArgumentError, match=rf"{name}\n  {NO_VALUES}"):
            construct()


@pytest.mark.parametrize(("weight", "name"), list(fields_on_meta()))
def test_a_weight_with_one_tensor_on_meta_is_neither_moved_nor_repacked(weight: Weight, name: str) -> None:
    partly = weight.holding({name: on_meta(weight.fields()[name])})

    with pytest.raises(ArgumentError, match=rf"{name}\n  {NO_VALUES}"):
        partly.to("cpu")
    assert partly.to("meta").device.type == "meta"
    for layout in targets(type(weight))[:1]:
        with pytest.raises(ArgumentError, match=rf"{name}\n  {NO_VALUES}"):
            qload.repack(partly, layout)


@pytest.mark.parametrize("quantizer", [BNB4Quantizer(), BNBInt8Quantizer(), EETQQuantizer(), Fp8Quantizer()])
def test_a_quantizer_refuses_a_weight_on_meta(quantizer: Quantizer) -> None:
    with pytest.raises(ArgumentError, match=rf"up\.weight\n  {NO_VALUES}"):
        quantizer.quantize(torch.ones(64, 64, device="meta"), Layer((64,), 64, (64, 64), "up"), torch.float16)


@pytest.mark.parametrize(
    "zeros",
    [qload.Stored(), qload.StoredMinusOne(), qload.StoredMinusOnePerField(), qload.StoredMinusOneUnmasked()],
)
def test_zero_points_on_meta_are_not_written(zeros: qload.ZeroPoints) -> None:
    with pytest.raises(ArgumentError, match=rf"zeros\n  {NO_VALUES}"):
        zeros.write(torch.ones(8, 1, dtype=torch.int32, device="meta"), INT4)


ENGINE_TENSORS = {"weight": 0, "scales": 1, "zero points": 2, "g_idx": 3}


@pytest.mark.parametrize("name", ENGINE_TENSORS)
def test_a_kernel_of_engines_names_the_parameter_on_meta(name: str) -> None:
    case = Case(zeros=qload.Stored(), act_order=True)
    layer = case.layer(case.weight())
    tensors: list[Any] = [layer.qweight.data, layer.scales.data, layer.qzeros.data, layer.g_idx.data]
    assert read_layer(case.config, "up", *tensors).layer.N == case.N
    place = ENGINE_TENSORS[name]
    tensors[place] = on_meta(tensors[place])

    with pytest.raises(ArgumentError, match=rf"up: {name}\n  {NO_VALUES}"):
        read_layer(case.config, "up", *tensors)


WEIGHT = awq(128, 64, 32)
LAYERS: dict[str, Callable[[], Any]] = {
    "column": lambda: ColumnParallelLinear(
        128, 64, params_dtype=torch.float16, quant_config=config_of(WEIGHT)
    ),
    "row": lambda: RowParallelLinear(128, 64, params_dtype=torch.float16, quant_config=config_of(WEIGHT)),
    "merged": lambda: MergedColumnParallelLinear(
        128, [64, 64], params_dtype=torch.float16, quant_config=config_of(WEIGHT)
    ),
    "plain column": lambda: ColumnParallelLinear(128, 64, params_dtype=torch.float16),
    "plain row": lambda: RowParallelLinear(128, 64, params_dtype=torch.float16),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_no_parameter_is_loaded_from_a_tensor_on_meta(kind: str) -> None:
    """Test each parameter of each layer, in each order of loading."""
    layer = LAYERS[kind]()
    names = [name for name, _ in layer.named_parameters()]
    tensors = WEIGHT.fields() if "plain" not in kind else {"weight": torch.ones(64, 128).half()}
    shard = (0,) if kind == "merged" else ()
    assert {*tensors} <= {*names}

    for name, tensor in tensors.items():
        with pytest.raises(ArgumentError, match=rf"{name}\n  {NO_VALUES}"):
            load(layer, {name: on_meta(tensor)}, *shard)
        load(layer, {name: tensor}, *shard)
