"""The dtype that an engine asks for reaches every plain number of every layer, whatever its method."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from qload import open_checkpoint
from qload.kernel_formats import GPTQMarlinWeight
from qload.methods import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    get_quantization_config,
)
from qload.methods.layers import ParallelExperts
from qload.methods.typed_linear import TypedLinearMethod
from tests.methods.engine import awq, config_of
from tests.paths import FIXTURES

KINDS: dict[str, tuple[type[LinearBase], tuple[Any, ...]]] = {
    "replicated": (ReplicatedLinear, (128, 64)),
    "column": (ColumnParallelLinear, (128, 64)),
    "row": (RowParallelLinear, (128, 64)),
    "merged": (MergedColumnParallelLinear, (128, [64, 128])),
    "qkv": (QKVParallelLinear, (128, 32, 4, 2)),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}
    },
}
# Of each method the parameters that hold plain numbers, beside the bias.
METHODS: dict[str, tuple[Any, set[str]]] = {
    "none": (lambda: None, {"weight"}),
    "awq_marlin": (lambda: config_of(awq(128, 64, 32)), {"scales"}),
    "gptq": (lambda: get_quantization_config("gptq").from_config(GPTQ), {"scales"}),
    "compressed-tensors": (
        lambda: get_quantization_config("compressed-tensors").from_config(CT),
        {"weight_scale", "weight"},
    ),
    "fp8": (lambda: get_quantization_config("fp8").from_config(FP8), set()),
}
DTYPES = [torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def plain_of(layer: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in layer.named_parameters(recurse=False)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
@every_dtype
def test_parameters_are_made_in_the_dtype_that_is_asked_for(
    kind: str, method: str, dtype: torch.dtype
) -> None:
    make, sizes = KINDS[kind]
    config, plain = METHODS[method]

    layer = make(*sizes, bias=True, params_dtype=dtype, quant_config=config(), prefix="a")

    found = plain_of(layer)
    assert layer.params_dtype == dtype
    assert {found[name] for name in ({"bias"} | plain) & found.keys()} == {dtype}
    assert plain & found.keys() or not plain


@pytest.mark.parametrize("kind", KINDS)
def test_without_one_it_is_torchs_default(kind: str) -> None:
    make, sizes = KINDS[kind]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = make(*sizes, bias=True)
    finally:
        torch.set_default_dtype(before)

    assert plain_of(layer) == {"weight": torch.bfloat16, "bias": torch.bfloat16}


GPTQ_LAYER = FIXTURES / "gptq" / "b4_g64_sym_noact_v1"


def typed(dtype: torch.dtype) -> Any:
    """A layer of GPTQ that an engine makes, fills and repacks in Marlin's order."""
    with open_checkpoint(GPTQ_LAYER) as weights:
        prefix, *_ = {name.rpartition(".")[0] for name in weights.storage.keys()}  # noqa: SIM118, it is no dict
        N, K = weights.loader.shape(weights, prefix)
        method = TypedLinearMethod(weights.loader.formats, prefix, target="marlin")
        config = SimpleNamespace(get_quant_method=lambda *_: method)
        layer = ColumnParallelLinear(K, N, bias=False, params_dtype=dtype, quant_config=config, prefix=prefix)
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            layer.quant_method.load(layer, suffix, weights.storage.read(f"{prefix}.{suffix}"))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_kernels_scales_are_in_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    layer = typed(dtype)

    weight = layer.typed_linear.typed
    assert isinstance(weight, GPTQMarlinWeight)
    assert weight.scales.dtype == dtype
    assert layer(torch.ones(2, weight.layer.K, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loaded_layer_has_the_dtype_of_the_load(dtype: torch.dtype) -> None:
    with open_checkpoint(GPTQ_LAYER, dtype=dtype, target="marlin") as weights:
        prefix, *_ = {name.rpartition(".")[0] for name in weights.storage.keys()}  # noqa: SIM118, it is no dict
        layer = ReplicatedLinear.load(weights, prefix)

    assert layer.params_dtype == dtype
    assert layer.typed_linear.typed.scales.dtype == dtype


def test_experts_that_are_loaded_have_the_dtype_of_the_load() -> None:
    folder = FIXTURES / "models" / "gptq_mixtral"
    for dtype in (torch.float16, torch.bfloat16):
        with open_checkpoint(folder, dtype=dtype, target="marlin") as weights:
            experts = ParallelExperts.load(weights, "model.layers.0.mlp.experts").experts

        found = {tensor.dtype for name, tensor in experts.state_dict().items() if "scales" in name}
        assert found == {dtype}
