"""Refusals of rare calls: every text is a golden, and lawful neighbours are accepted."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from qload import (
    DefaultWeightsLoader,
    ExpertFacts,
    MemoryStorage,
    Weights,
    loader_from_config,
    native,
    verify,
)
from qload.conformance.loader_checks import quantization_config
from qload.devices.tensors import check_writable
from qload.errors import ArgumentError, QloadError, StorageError
from qload.experts import GatedActivation
from qload.kernel_formats import GPTQMarlinWeight
from qload.kernels import MPLinearLayerConfig, choose_mp_linear_kernel, scalar_types
from qload.kernels.cuda import byte_strips, exllama, module
from qload.kernels.experts import _experts as experts_layer
from qload.kernels.mp_linear.kernels import read_layer
from qload.layouts import Stored, strips
from qload.loader.heads import Heads
from qload.methods import QKVParallelLinear
from qload.methods.base import QuantizationConfig, get_quantization_config, register_quantization
from qload.methods.parameter_buffer import LayerShare
from qload.models import Step, text_config
from qload.models.attention import LatentAttention
from qload.native.modules import NativeModule
from qload.parallel import Rank, joined_world
from qload.spec import ActivationScheme
from qload.storage import GGUFStorage, SafetensorsStorage
from qload.testing import Traits
from qload.verify import Prompt
from tests.kernels.cuda_layers import byte_layer
from tests.kernels.cuda_layers import layer as kernel_layer
from tests.models import drawn

pytestmark = pytest.mark.usefixtures("seen_texts")

LLAMA = drawn.config("llama")
LEGACY = {"gptq_bits": torch.tensor([4]), "gptq_groupsize": torch.tensor([64])}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2)


def requested_isa(name: str) -> str:
    with native.using(isa=name):
        return native.isa()


def strided(*strides: int) -> torch.Tensor:
    return torch.zeros(16).as_strided((3, 2), strides)


def exllama_call(groups: int, N: int) -> Any:
    words, zeros = torch.zeros(4, N, dtype=torch.int32), torch.zeros(groups, N * 4 // 32, dtype=torch.int32)
    index, scales = torch.zeros(32, dtype=torch.int32), torch.zeros(groups, N).half()
    x = torch.ones(1, 32).half()
    return exllama.checked(
        exllama.ExllamaCall(x, words, zeros, scales, index, None, None, 4, "stored minus one", 0)
    )


def share(K: int, parts: tuple[int, ...], whole: tuple[int, int], ranks: int = 1) -> LayerShare:
    owner: Any = SimpleNamespace(process_group=Rank(0, ranks)) if ranks else SimpleNamespace()
    return LayerShare.from_layer(owner, (K, parts), whole, "m.qkv_proj")


def heads(prefixes: Any, queries: int, keys: int) -> Any:
    weights = Weights(MemoryStorage({"a.weight": torch.ones(24, 8)}), loader=DefaultWeightsLoader())
    return QKVParallelLinear.load(weights, prefixes, Heads(queries, keys), head_size=2, interleaved=True)


def marlin_of_groups(groups: int) -> Any:
    weight = kernel_layer(256, 64, 64, 4, torch.float16, act_order=True)
    scales = weight.scales[:1].repeat(groups, 1)
    return GPTQMarlinWeight(**{**weight.fields(), "scales": scales}, config=weight.config)


def packed_layer(name: str, order: Any, axis: int) -> Any:
    """Read a layer of an engine whose tensor `name` is packed along an axis."""
    shape, tensors = (32, 64), {
        "weight": torch.zeros(32, 8, dtype=torch.int32),
        "scales": torch.ones(1, 64).half(),
        "zeros": torch.zeros(1, 8, dtype=torch.int32),
    }  # fmt: skip
    config = MPLinearLayerConfig(
        shape, shape, scalar_types.uint4, torch.float16, 32, zero_points=True, zeros=Stored(), order=order
    )
    for each, tensor in tensors.items():
        parameter: Any = nn.Parameter(tensor, requires_grad=False)
        parameter.input_dim, parameter.output_dim, parameter.packed_dim = 0, 1, axis if each == name else 1
        tensors[each] = parameter
    return read_layer(config, "a", *tensors.values(), None)


def latent(config: dict[str, Any]) -> Any:
    weights = Weights(MemoryStorage(drawn.tensors(config)), loader=DefaultWeightsLoader())
    rope: Any = None
    return LatentAttention(weights, "model.layers.0.self_attn", text_config(config), rope)


def step(**changes: torch.Tensor) -> Step:
    tensors = {"positions": torch.zeros(2), "slots": torch.zeros(2), "pages": torch.zeros(1, 1)}
    return Step(**{name: tensor.long() for name, tensor in tensors.items()} | changes)


REFUSED: dict[str, Callable[[], Any]] = {
    "no tensor to write to": lambda: check_writable([0.0]),
    "a sparse tensor to write to": lambda: check_writable(torch.eye(2).to_sparse()),
    "a tensor with gradients to write to": lambda: check_writable(torch.zeros(2, requires_grad=True)),
    "a tensor of inference mode to write to": lambda: check_writable(inference_tensor()),
    "elements in one place": lambda: check_writable(strided(1, 1)),
    "rows that begin within others": lambda: check_writable(strided(1, 2)),
    "scales of eight numbers": lambda: strips.group_scales(8),
    "strips of three bits": lambda: strips.rows(3),
    "an unknown instruction set": lambda: requested_isa("sse9"),
    "no thread": lambda: native.using(threads=0).__enter__(),
    "experts of another process": lambda: experts_layer(
        torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), [], "experts 0"
    ),
    "an exllama layer without groups": lambda: exllama_call(0, 32),
    "a part of a word of zero points": lambda: exllama_call(1, 4),
    "scaled codes without scales of columns": lambda: byte_strips.check(
        replace(
            byte_strips.ByteStripsCall(
                *byte_strips.arguments(torch.ones(1, 128).half(), byte_layer(128, 64, "nvfp4"))
            ),
            column_scales=None,
        )
    ),
    "words of AWQ along K": lambda: packed_layer("weight", "awq", 0),
    "zero points along K": lambda: packed_layer("zeros", "gptq", 0),
    "a capability as text": lambda: choose_mp_linear_kernel(
        MPLinearLayerConfig((32, 64), (32, 64), scalar_types.uint4b8, torch.float16, 32, False),
        "90",  # type: ignore[arg-type]
    ),
    "interleaved heads of several layers": lambda: heads(["a", "b", "c"], 4, 4),
    "queries that do not divide by keys": lambda: heads("a", 6, 4),
    "no outputs": lambda: share(8, (), (8, 8)),
    "outputs of nothing": lambda: share(8, (4, 0), (8, 8)),
    "more outputs than the layer": lambda: share(8, (4, 5), (8, 8)),
    "more inputs than the layer": lambda: share(9, (8,), (8, 8)),
    "shares that no number of ranks has": lambda: share(8, (5,), (8, 8), ranks=0),
    "a stored part of another width": lambda: share(8, (4, 2, 2), (16, 8), 2).separate_parts([(9, 8)] * 3),
    "a stored part of other inputs": lambda: share(8, (4, 2, 2), (16, 8), 2).separate_parts([(8, 7)] * 3),
    "stored parts of another sum": lambda: share(8, (4, 2, 2), (16, 8), 2).joined_parts((17, 8)),
    "a layer without parameters": lambda: (
        get_quantization_config("fp8")
        .from_config({"quant_method": "fp8"})
        .get_quant_method(nn.Linear(8, 8), "a")
        .process_weights_after_loading(nn.Linear(8, 8))
    ),  # type: ignore[union-attr]
    "the name of another method": lambda: register_quantization("awq_marlin")(QuantizationConfig),
    "no name of a method": lambda: register_quantization(""),
    "a method of another class": lambda: register_quantization("mine")(nn.Module),  # type: ignore[type-var]
    "more groups than k_full has": lambda: marlin_of_groups(5),
    "latent attention of llama": lambda: latent(LLAMA),
    "facts of experts for llama": lambda: text_config(LLAMA, ExpertFacts(GatedActivation("silu"))),
    "an unknown activation": lambda: text_config({**LLAMA, "hidden_act": "relu"}),
    "slots of int32": lambda: step(slots=torch.zeros(2, dtype=torch.int32)),
    "pages on another device": lambda: step(pages=torch.zeros(1, 1, dtype=torch.int64, device="meta")),
    "slots of two dimensions": lambda: step(slots=torch.zeros(2, 1, dtype=torch.int64)),
    "tokens that do not divide": lambda: step(pages=torch.zeros(3, 1, dtype=torch.int64)),
    "groups of no inputs": lambda: ActivationScheme("int", 8, True, "group", 0),
    "groups without a size": lambda: ActivationScheme("int", 8, True, "group"),
    "rules beside gptq_bits": lambda: loader_from_config(
        {**GPTQ, "dynamic": {"+:.*up_proj": {"bits": 8}}}, MemoryStorage(LEGACY)
    ),
    "another method beside gptq_bits": lambda: loader_from_config(
        {"quant_method": "fp8"}, MemoryStorage(LEGACY)
    ),
    "gptq_bits without a group size": lambda: loader_from_config(
        None, MemoryStorage({"gptq_bits": LEGACY["gptq_bits"]})
    ),
    "five of gptq_bits": lambda: loader_from_config(
        None, MemoryStorage({**LEGACY, "gptq_bits": torch.tensor([5])})
    ),
    "groups of none in gptq_groupsize": lambda: loader_from_config(
        None, MemoryStorage({**LEGACY, "gptq_groupsize": torch.tensor([0])})
    ),
    "a path as storage": lambda: loader_from_config(None, "model"),  # type: ignore[arg-type]
    "logits of two ranks": lambda: verify("nowhere", logits=Prompt((1,)), process_group=Rank(0, 2)),
    "no time to wait": lambda: joined_world(timeout_s=0.0).__enter__(),
    "time without an end": lambda: joined_world(timeout_s=float("inf")).__enter__(),
}
LAWFUL: dict[str, Callable[[], Any]] = {
    "rows behind each other": lambda: check_writable(strided(2, 1)),
    "rows that begin where others end": lambda: check_writable(strided(1, 3)),
    "an exllama layer of one group": lambda: exllama_call(1, 32),
    "heads of one layer": lambda: heads("a", 4, 4),
    "the whole layer": lambda: share(8, (4, 4), (8, 8)),
    "shares of two ranks": lambda: share(8, (4,), (8, 8), ranks=0),
    "stored parts of two ranks": lambda: share(8, (4, 2, 2), (16, 8), 2).joined_parts((16, 8)),
    "as many groups as k_full has": lambda: marlin_of_groups(4),
    "a step": step,
    "zero points along N": lambda: packed_layer("zeros", "gptq", 1),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_call_is_refused(call: str) -> None:
    with pytest.raises(QloadError):
        REFUSED[call]()


@pytest.mark.parametrize("call", LAWFUL)
def test_its_neighbour_is_accepted(call: str) -> None:
    LAWFUL[call]()


def test_a_format_without_files_is_refused() -> None:
    with pytest.raises(ArgumentError, match="for files"):
        quantization_config(Traits("marble"))


def test_an_instruction_set_of_another_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(isas=lambda: ["avx2", "scalar"])
    monkeypatch.setattr("qload.native.modules.load", lambda name: NativeModule(module))

    assert native.isa() == "avx2"
    with native.using(isa="avx512"), pytest.raises(ArgumentError, match="an instruction set of this CPU"):
        native.isa()


def test_a_missing_cuda_module_is_a_refusal_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load", lambda name: NativeModule(None, f"{name} was not built"))

    assert module.why_not() == "the native CUDA module is missing: cuda was not built"
    with pytest.raises(ArgumentError, match="cuda was not built"):
        module.native()


@pytest.mark.parametrize("storage", [SafetensorsStorage, GGUFStorage])
def test_a_machine_of_the_other_byte_order_reads_no_file(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")

    with pytest.raises(StorageError, match="little-endian"):
        storage(tmp_path / "model")
