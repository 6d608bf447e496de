"""Calls of the linear on ExLlama's order: memory, streams, graphs, refusals, the way to it."""

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels import cuda
from qload.kernels.cuda import dispatch, exllama
from qload.layouts import STORED_MINUS_ONE
from qload.testing import assert_same_bits, assert_within_bound
from tests.gpu.exllama_layers import BITS, LAYERS, Kind, call, kernel, layer
from tests.gpu.layers import DTYPES, inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["few", "large"])
@DTYPES
def test_a_bias_is_added_before_the_one_rounding(name: str, dtype: torch.dtype) -> None:
    weight = layer(1120, 224, 128, dtype=dtype, act_order=True, exact=True)
    x, bias = inputs(9, weight, dtype).round(), torch.arange(224, device="cuda").to(dtype) / 8

    got = kernel(weight, bias, name)(x)

    wide = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@BITS
@pytest.mark.parametrize("kind", [LAYERS[3], LAYERS[6]])
def test_many_tokens_are_within_what_rounding_costs(kind: Kind, bits: int) -> None:
    weight = layer(**kind, bits=bits)

    for name in ("", "large"):
        assert_within_bound(
            lambda x, name=name: exllama.linear(x, weight, kernel=name),
            weight,
            inputs(300, weight, torch.float16),
        )


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("M", [1, 9, 21])
def test_only_the_rows_of_a_token_are_read_and_only_y_is_written(M: int, act_order: bool) -> None:
    weight = layer(1016, 72, 128, act_order=act_order)
    x = inputs(M, weight, torch.float16)
    want = kernel(weight)(x)
    memory = torch.full((M + 2, 1016), torch.nan, device="cuda", dtype=torch.float16)
    memory[1:-1] = x
    guarded = torch.full((M + 2, 72), 7.0, device="cuda", dtype=torch.float16)

    exllama.write_few(guarded[1:-1], call(memory[1:-1], weight))

    assert_same_bits(guarded[1:-1], want)
    assert bool((guarded[0] == 7).all() & (guarded[-1] == 7).all())


def test_a_layer_without_rows_columns_or_tokens() -> None:
    weight = layer(1152, 256, 128)
    fields = weight.fields()
    rows = {"qweight": fields["qweight"][:0], "g_idx": fields["g_idx"][:0]}
    columns = {name: fields[name][:, :0].contiguous() for name in ("qweight", "qzeros", "scales")}
    bias = torch.arange(256, device="cuda").half()

    def multiply(x: Tensor, changed: dict[str, Tensor], bias: Tensor | None = None) -> Tensor:
        read = {**fields, **changed}
        stored = read["qweight"], read["qzeros"], read["scales"], read["g_idx"], None, bias
        y: Tensor = torch.ops.qload.exllama(x, *stored, 4, STORED_MINUS_ONE.name, asked="few")
        return y

    assert_same_bits(multiply(bias.new_empty(2, 0), rows, bias), bias.expand(2, 256))
    assert multiply(bias.new_empty(2, 1152), columns).shape == (2, 0)
    assert multiply(bias.new_empty(0, 1152), {}).shape == (0, 256)


def test_what_does_not_fit_is_refused() -> None:
    weight = layer(1152, 256, 128)

    with pytest.raises(ArgumentError, match="scales"):
        exllama.linear(inputs(1, weight, torch.bfloat16), weight)
    too_many = call(inputs(65, weight, torch.float16), weight)
    assert exllama.why_not_few(too_many) == "takes at most 64 tokens, got 65"


def test_the_operator_has_a_schema_and_a_shape_rule_that_hold() -> None:
    weight = layer(1120, 224, 128, act_order=True)
    x = inputs(3, weight, torch.float16)

    torch.library.opcheck(torch.ops.qload.exllama.default, exllama.arguments(x, weight))
    compiled = torch.compile(lambda x: cuda.linear(x, weight) * 2, fullgraph=True, backend="eager")
    assert_same_bits(compiled(x), cuda.linear(x, weight) * 2)


def test_a_weight_is_multiplied_natively_where_kernels_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = layer(1120, 224, 128, act_order=True)
    x = inputs(3, weight, torch.float16)
    monkeypatch.setattr(dispatch, "ROWS", {})
    assert "no kernel of 4 bits was timed" in str(cuda.why_not_linear(weight, torch.float16))

    row = {("exllama", "", 4, (8, 0)): [(0, 64, ("few", "large"))]}
    monkeypatch.setattr(dispatch, "ROWS", row)
    dispatch.ranked.cache_clear()
    try:
        assert cuda.why_not_linear(weight, torch.float16) is None
        assert_same_bits(weight.get_linear().to("cuda")(x), kernel(weight)(x))
    finally:
        dispatch.ranked.cache_clear()
