"""Reasons of kernels to refuse a weight or a call: each text is a golden, beside lawful neighbours."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from qload.errors import NoKernelError
from qload.kernel_formats import repack
from qload.kernel_formats.fp4_marlin import VLLM_0_11, find_unsupported, read_checkpoint
from qload.kernel_formats.repack import find_unsupported_panels
from qload.kernels import KERNELS, MPLinearKernel, ScalarType, cpu, scalar_types
from qload.kernels.cuda import byte_strips, dispatch, exllama, hopper_gemm, launch, w8a8
from qload.kernels.cuda.dispatch import choose
from qload.layouts import Stored, StoredMinusOne
from qload.layouts.swizzle import find_padding
from qload.native.modules import NativeModule
from tests.kernel_formats.bnb4_layers import bnb4
from tests.kernel_formats.fp4_layers import mxfp4
from tests.kernels.cuda_layers import AMPERE, HOPPER, byte_layer, layer
from tests.kernels.mp_layers import Case
from tests.kernels.test_rounded_inputs import SCHEMES

linear = import_module("qload.kernels.cuda.linear")  # whose name a function of the package has, too
OLD = (7, 5)
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
K, N = 256, 64
BYTES = byte_layer(K, N, "channel")
MARLIN, STRIPS = layer(K, N, 64, 4, HALF), layer(K, N, 64, 4, HALF, "strips", zeros=True)
EXLLAMA = layer(K, N, 64, 4, HALF, "exllama", zeros=True)
ONE = torch.tensor([0.5])
STATIC = SCHEMES["fp8 static"]
E5M2 = 0x708


class Doubled(StoredMinusOne):
    """A convention of another program."""

    name = "doubled"


def call(**changes: Any) -> Any:
    words = torch.zeros(64, dtype=torch.int32)
    lawful = {"is_k_full": True, "is_wide": False, "weights": words, "scales": words, "zeros": None}
    return SimpleNamespace(**{"why_not_hopper": lambda: None, **lawful, **changes})


def declared(weight: Any, name: str, **changes: Any) -> str | None:
    return linear.why_not_declared(weight, replace(SCHEMES[name], **changes))


def codes(code: int, name: str, inputs: int = K, **changes: Any) -> str | None:
    return w8a8.why_not_scheme(code, replace(SCHEMES[name], **changes), inputs)


INPUTS: dict[str, Callable[[], str | None]] = {
    "rounded for bytes": lambda: declared(BYTES, "fp8 token"),
    "rounded for gptq": lambda: declared(Case(group=64).weight(), "fp8 token"),
    "rounded for marlin": lambda: declared(MARLIN, "fp8 token"),
    "rounded in groups of 24": lambda: declared(BYTES, "fp8 group", group_size=24),
    "rounded, 100 of them": lambda: declared(byte_layer(100, N, "channel"), "fp8 token"),
    "stored scale": lambda: declared(replace(BYTES, input_scale=ONE), "fp8 static"),
    "stored scale in bfloat16": lambda: declared(replace(BYTES, input_scale=ONE.bfloat16()), "fp8 static"),
    "no stored scale": lambda: declared(BYTES, "fp8 static"),
    "two stored scales": lambda: declared(replace(BYTES, input_scale=ONE.repeat(2)), "fp8 static"),
    "stored scale in float64": lambda: declared(replace(BYTES, input_scale=ONE.double()), "fp8 static"),
    "codes of e4m3": lambda: codes(w8a8.E4M3, "fp8 token"),
    "codes of e4m3 by a stored scale": lambda: codes(w8a8.E4M3, "fp8 static"),
    "codes of int8": lambda: codes(w8a8.INT8, "int8 token"),
    "codes without a scheme": lambda: w8a8.why_not_scheme(w8a8.E4M3, None, K),
    "codes of int8 for e4m3": lambda: codes(w8a8.E4M3, "int8 token"),
    "codes of e4m3 for e5m2": lambda: codes(E5M2, "fp8 token"),
    "codes of four bits": lambda: codes(w8a8.E4M3, "fp8 token", bits=4),
    "codes with a zero point": lambda: codes(w8a8.INT8, "int8 asymmetric"),
    "codes with a stored zero point": lambda: codes(w8a8.E4M3, "fp8 static", zero_point="input_zero_point"),
    "codes in groups": lambda: codes(w8a8.E4M3, "fp8 group"),
    "codes of int8 by a stored scale": lambda: codes(w8a8.INT8, "int8 static"),
    "codes of as many inputs as int32 holds": lambda: codes(w8a8.INT8, "int8 token", w8a8.MAX_INPUTS),
    "codes of one input more": lambda: codes(w8a8.INT8, "int8 token", w8a8.MAX_INPUTS + 1),
}
CHIPS: dict[str, Callable[[], str | None]] = {
    "strips": lambda: dispatch.why_not_on(STRIPS, HALF, AMPERE),
    "strips on an old chip": lambda: dispatch.why_not_on(STRIPS, HALF, OLD),
    "strips for float32": lambda: dispatch.why_not_on(STRIPS, FLOAT, HOPPER),
    "strips for bfloat16 with scales of float16": lambda: dispatch.why_not_on(STRIPS, BF16, HOPPER),
    "strips on a CPU": lambda: dispatch.why_not_device(torch.device("cpu")),
    "bytes": lambda: byte_strips.why_not_on(BYTES, BF16, AMPERE),
    "bytes on an old chip": lambda: byte_strips.why_not_on(BYTES, BF16, OLD),
    "bytes for float32": lambda: byte_strips.why_not_on(BYTES, FLOAT, HOPPER),
    "exllama": lambda: exllama.why_not_on(EXLLAMA, HALF, HOPPER),
    "exllama on an old chip": lambda: exllama.why_not_on(EXLLAMA, HALF, OLD),
    "exllama with another convention": lambda: exllama.why_not_on(
        replace(EXLLAMA, config=replace(EXLLAMA.config, zeros=Doubled())), HALF, HOPPER
    ),
    "another type": lambda: linear.missing_kernel(type(bnb4(torch.zeros(64, 64).long(), torch.ones(64)))),
    "Hopper's instructions": lambda: launch.why_not_chip(HOPPER),
    "Hopper's instructions on Ampere": lambda: launch.why_not_chip(AMPERE),
    "a call": lambda: launch.why_not(call()),
    "a call without rows of its groups": lambda: launch.why_not(call(is_k_full=False)),
    "a call that looks groups up": lambda: launch.why_not(call(is_k_full=False), looks_up=True),
    "a call that starts between two loads": lambda: launch.why_not(
        call(scales=torch.zeros(65, dtype=torch.int32)[1:])
    ),
    "a call of wide scales": lambda: hopper_gemm.why_not(call(is_wide=True)),
    "a call without wide scales": lambda: hopper_gemm.why_not(call()),
    "a call on another chip": lambda: hopper_gemm.why_not(call(why_not_hopper=lambda: "no Hopper")),
}
ORDERS: dict[str, Callable[[], str | None]] = {
    "panels": lambda: find_unsupported_panels(Case().weight()),
    "panels of panels": lambda: find_unsupported_panels(repack(Case().weight(), "panels")),
    "panels of nf4": lambda: find_unsupported_panels(bnb4(torch.zeros(64, 64).long(), torch.ones(64))),
    "powers of two in bfloat16": lambda: mxfp4_for(BF16),
    "powers of two in float16": lambda: mxfp4_for(HALF),
    "swizzled scales": lambda: find_padding(torch.zeros(32, 16, dtype=torch.uint8), 100, 3),
    "swizzled scales with padding": lambda: find_padding(torch.ones(32, 16, dtype=torch.uint8), 100, 3),
}


def mxfp4_for(dtype: torch.dtype) -> str | None:
    return find_unsupported(
        read_checkpoint(mxfp4(torch.full((64, 4), 127), torch.zeros(64, 128).long())), dtype, VLLM_0_11
    )


@pytest.mark.parametrize("table", [INPUTS, CHIPS, ORDERS], ids=["inputs", "chips", "orders"])
def test_reasons(table: dict[str, Callable[[], str | None]], golden: SnapshotAssertion) -> None:
    assert "\n".join(f"{name}: {why()}" for name, why in table.items()) == golden


CONFIG = Case().config
CONFIGS: dict[str, Any] = {
    "lawful": CONFIG,
    "no outputs": replace(CONFIG, partition_weight_shape=(256, 0)),
    "more inputs than the layer": replace(CONFIG, full_weight_shape=(128, 64)),
    "more outputs than the layer": replace(CONFIG, full_weight_shape=(256, 32)),
    "signed codes": replace(CONFIG, weight_type=scalar_types.int4),
    "floats": replace(CONFIG, weight_type=scalar_types.float8_e4m3fn),
    "a bias of 16": replace(CONFIG, weight_type=ScalarType(0, 4, False, 16)),
    "a bias of -1": replace(CONFIG, weight_type=ScalarType(0, 4, False, -1)),
    "float64": replace(CONFIG, act_type=torch.float64),
    "results of another dtype": replace(CONFIG, out_type=torch.bfloat16),
    "results of the same dtype": replace(CONFIG, out_type=torch.float16),
    "a bias and zero points": replace(CONFIG, zero_points=True, zeros=Stored()),
    "neither": replace(CONFIG, weight_type=scalar_types.uint4),
    "zero points without a convention": replace(
        CONFIG, weight_type=scalar_types.uint4, zero_points=True, has_g_idx=True
    ),
    "groups of 0": replace(CONFIG, group_size=0),
    "groups of -2": replace(CONFIG, group_size=-2),
    "one group": replace(CONFIG, group_size=-1),
    "groups of 48": replace(CONFIG, group_size=48),
    "a cut inside groups": replace(CONFIG, full_weight_shape=(512, 64), group_size=96),
    "a share of act order": replace(CONFIG, full_weight_shape=(512, 64), has_g_idx=True),
    "AWQ's order of 2 bits": replace(Case(bits=2).config, order="awq"),
    "3 bits": Case(bits=3).config,
    "rows inside a word": replace(
        CONFIG, partition_weight_shape=(252, 64), full_weight_shape=(252, 64), group_size=-1
    ),
    "outputs inside a word": replace(CONFIG, partition_weight_shape=(256, 60), full_weight_shape=(256, 60)),
    "zeros by name": replace(CONFIG, zeros="stored"),
    "a group size as text": replace(CONFIG, group_size="32"),
}


@pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.name)
def test_reasons_of_mixed_precision_kernels(kind: type[MPLinearKernel], golden: SnapshotAssertion) -> None:
    lines = (f"{name}: {kind.can_implement(config)[1]}" for name, config in CONFIGS.items())

    assert "\n".join(lines) == golden


@pytest.fixture
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load", lambda name: NativeModule(SimpleNamespace()))  # type: ignore[arg-type]
    monkeypatch.setattr(cpu, "has_routines", lambda *tensors: True)


@pytest.mark.usefixtures("cpu_kernels")
def test_reasons_of_the_cpu_module(monkeypatch: pytest.MonkeyPatch, golden: SnapshotAssertion) -> None:
    panels = repack(Case().weight(), "panels")
    empty = bnb4(torch.zeros(64, 64).long(), torch.ones(64)).holding({})
    lines = [
        f"panels: {cpu.why_not(panels, BF16)}",
        f"panels for float64: {cpu.why_not(panels, torch.float64)}",
        f"rows of nf4: {cpu.why_not(empty, FLOAT)}",
        f"marlin: {cpu.why_not(MARLIN, FLOAT)}",
    ]
    monkeypatch.setattr(cpu, "load", lambda name: NativeModule(None, f"{name} was not built"))
    lines.append(f"without the module: {cpu.why_not(panels, BF16)}")

    assert "\n".join(lines) == golden


def test_a_name_of_the_table_without_a_kernel_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ranked", lambda *arguments: ["gone", "other"])
    refused: Any = SimpleNamespace(name="other", why_not=lambda call: "reads nothing")
    call: Any = SimpleNamespace(tokens=3, bits=4, bytes=64, kind="")

    with pytest.raises(NoKernelError) as caught:
        choose([refused], call, layout="strips", capability=HOPPER)

    assert caught.value.reasons == {
        "gone": "is not one of this layout's kernels", "other": "reads nothing"
    }  # fmt: skip
