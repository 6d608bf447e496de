"""Calls with one lawful argument changed at a time: the text of each refusal, or the changed result.

A change of a condition, of a bound, or of a number or name in a message changes a line.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from qload import DefaultWeightsLoader
from qload.architecture import architecture_of
from qload.errors import QloadError
from qload.experts.activation import facts_of
from qload.experts.routing import routing_of
from qload.formats import (
    FORMATS,
    BNBNF4Weight,
    BNBWeight,
    CTNVFP4Weight,
    Exl2Weight,
    Fp8Weight,
    GPTQWeight,
    Marlin24Weight,
    MXFP8Weight,
)
from qload.kernel_formats import repack
from qload.kernel_formats.repack import WRITERS, targets
from qload.layouts import Stored
from qload.methods import (
    CheckpointConfig,
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from qload.models import load_model
from qload.models.config import config_dtype, latent_config, text_config
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import layer_of
from qload.testing.random_layer import PREFIX, DrawnLayer
from qload.testing.tiny_checkpoint import TYPE_ENTRIES, make_checkpoint, tiny_config
from qload.testing.traits import CONTRACTS, contract
from qload.weights import Weights
from tests.errors.calls import FUNCTIONS
from tests.kernel_formats.offset_layers import CASES
from tests.kernel_formats.offset_layers import drawn as drawn_offsets
from tests.meta.test_argument_types import FACTS, METHODS, NEEDED, public
from tests.support.changed_values import changed_tensors, outcome, outcomes

N, K = 128, 256  # sizes of layers, unlike each other
MODELS = ("qwen2", "mixtral", "gpt_oss", "llama4_text", "deepseek_v3")  # with every kind of tensors
WORLDS = (2, 3, 8)
UNSURE = ("SafetensorsStorage", "inspect", "layers", "verify", "open_checkpoint")  # whose results have tests
METHOD_NAMES = {method.__qualname__ for method in METHODS}
CALLABLES = {
    each.id: each.values
    for each in public()
    if (each.id in NEEDED or each.id in METHOD_NAMES) and each.id not in UNSURE
}
STORED = [weight_type for weight_type in FORMATS if weight_type.format in CONTRACTS]


def drawn(weight_type: type[Weight]) -> DrawnLayer:
    return layer_of(contract(weight_type.format).common(weight_type.format), N, K)


def source(intermediate: str, layout: str) -> tuple[Weight, dict[str, Any]]:
    """Return a weight that the layout can store, and the options of its repack."""
    options = WRITERS[{each.__name__: each for each, _ in WRITERS}[intermediate], layout].options
    given = {"dtype": torch.float16, "exponent_bias": True}
    chosen = {name: value for name, value in given.items() if name in options}
    if intermediate == "KernelIntegers":
        return drawn_offsets(CASES["mlx 4 bits"]), {"layout": layout}
    weight_type = Marlin24Weight if layout == "marlin_24" else SOURCES[intermediate]
    return drawn(weight_type).weight(), {"layout": layout, **chosen}


SOURCES = {
    "Integers": GPTQWeight,
    "Exl2Weight": Exl2Weight,
    "Fp8Weight": Fp8Weight,
    "Fp4": CTNVFP4Weight,
    "Int8": BNBWeight,
    "MXFP8Weight": MXFP8Weight,
    "BNB4Weight": BNBNF4Weight,
}
REPACKED: dict[str, Callable[[], tuple[Weight, dict[str, Any]]]] = {
    f"{intermediate.__name__} as {layout}": partial(source, intermediate.__name__, layout)
    for intermediate, layout in WRITERS
}


def load(layer: DrawnLayer, tensors: dict[str, Tensor], call: str = "get_weights", world: int = 1) -> Any:
    """Return the weights of all ranks."""
    storage = MemoryStorage(tensors)
    ranks = [Weights(storage, loader=layer.loader(), process_group=rank) for rank in FakeWorld(world)]
    return [getattr(weights, call)(PREFIX) for weights in ranks]


@pytest.mark.parametrize("name", CALLABLES)
def test_a_changed_argument_of(name: str, golden: SnapshotAssertion) -> None:
    call, arguments = CALLABLES[name]
    plain = (Tensor, int, float, str, torch.dtype, tuple, list, Mapping)
    changed = {key: value for key, value in arguments.items() if isinstance(value, plain)}
    rest = {key: value for key, value in arguments.items() if key not in changed}

    assert outcomes(partial(call, **rest), changed) == golden


@pytest.mark.parametrize("weight_type", STORED, ids=lambda each: each.format)
def test_a_weight_of_a_changed_tensor(weight_type: type[Weight], golden: SnapshotAssertion) -> None:
    weight = drawn(weight_type).weight()

    assert outcomes(partial(weight_type, config=weight.config), weight.fields()) == golden


@pytest.mark.parametrize("name", REPACKED)
def test_a_repacked_weight_of_a_changed_tensor(name: str, golden: SnapshotAssertion) -> None:
    weight, options = REPACKED[name]()
    repacked = repack(weight, **options)

    assert outcomes(partial(type(repacked), config=repacked.config), repacked.fields()) == golden


@pytest.mark.parametrize("name", REPACKED)
def test_a_repack_with_a_changed_option(name: str, golden: SnapshotAssertion) -> None:
    weight, options = REPACKED[name]()
    lines = [outcomes(partial(repack, weight), options)]
    for added in ({"dtype": torch.float16}, {"exponent_bias": True}, {"zeros": Stored()}):
        lines.append(f"{added} -> {outcome(repack, {'weight': weight, **options, **added})}")

    assert "\n".join(lines) == golden


@pytest.mark.parametrize("weight_type", STORED, ids=lambda each: each.format)
def test_the_repacks_of(weight_type: type[Weight], golden: SnapshotAssertion) -> None:
    """Each corner of the format to each layout, of sizes that fill tiles and of others."""
    lines = []
    for traits in contract(weight_type.format).corners(weight_type.format):
        for sizes in ((N, K), (104, 160)):
            try:
                weight = layer_of(traits, *sizes).weight()
            except QloadError:  # no size of the format
                continue
            for layout in targets(weight_type):
                text = outcome(lambda layout: repack(weight, layout).config, {"layout": layout})  # noqa: B023
                lines.append(f"{traits.words()} {sizes} -> {layout}: {text}")

    assert "\n".join(lines) == golden


@pytest.mark.parametrize("weight_type", STORED, ids=lambda each: each.format)
def test_a_load_of_changed_tensors(weight_type: type[Weight], golden: SnapshotAssertion) -> None:
    layer = drawn(weight_type)

    assert outcomes(partial(load, layer), {"tensors": layer.named()}) == golden


@pytest.mark.parametrize("weight_type", STORED, ids=lambda each: each.format)
def test_the_shares_of(weight_type: type[Weight], golden: SnapshotAssertion) -> None:
    layer = drawn(weight_type)
    calls = [(call, world) for call in ("get_weights_col", "get_weights_row") for world in WORLDS]
    lines = [
        f"{call}, {world} ranks -> "
        + outcome(load, {"layer": layer, "tensors": layer.named(), "call": call, "world": world})
        for call, world in calls
    ]

    assert "\n".join(lines) == golden


@pytest.mark.parametrize("weight_type", STORED, ids=lambda each: each.format)
def test_the_config_of(weight_type: type[Weight], golden: SnapshotAssertion) -> None:
    config = drawn(weight_type).config
    given = {each.name: getattr(config, each.name) for each in fields(config)}  # type: ignore[arg-type]

    assert outcomes(type(config), given) == golden


EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
EXPERT_SPLITS: tuple[dict[str, Any], ...] = (
    {"split": "tensor"},
    {"split": "experts"},
    {"split": "both", "expert_ranks": 2},
)


def load_experts(layers: list[DrawnLayer], tensors: dict[str, Tensor], world: int = 1, **how: Any) -> Any:
    """Return the tensors of the experts of all ranks, and the values of the first expert."""
    storage, loader = MemoryStorage(tensors), layers[0].loader()
    ranks = [Weights(storage, loader=loader, process_group=rank) for rank in FakeWorld(world)]
    experts = [weights.get_experts(PREFIX, facts=FACTS, **how) for weights in ranks]
    stacks = [stack for each in experts for stack in (each.gate_up, each.down)]
    values = [(stack.expert(0).dequantize(), *stack.fields().values()) for stack in stacks]
    return values, [each.local for each in experts]


@pytest.mark.parametrize("name", ["gptq", "fp8", "ct_pack", "modelopt_nvfp4"])
def test_experts_of_changed_tensors(name: str, golden: SnapshotAssertion) -> None:
    make = partial(layer_of, contract(name).common(name))
    layers = [make(N, K), make(N, K), make(K, N)]
    tensors = {
        stored: tensor
        for expert in (0, 1)
        for matrix, layer in zip(EXPERT_NAMES, layers, strict=True)
        for stored, tensor in layer.named(f"{PREFIX}.{expert}.{matrix}").items()
    }
    whole = {"layers": layers, "tensors": tensors}
    lines = [
        f"{world} ranks, {how} -> {outcome(load_experts, {**whole, 'world': world, **how})}"
        for how in EXPERT_SPLITS
        for world in (1, *WORLDS)
    ]
    for stored in (each for each in tensors if f"{PREFIX}.1." in each and "gate_proj" not in each):
        for words, tensor in {"missing": None, **dict(changed_tensors(tensors[stored]))}.items():
            rest = {each: held for each, held in tensors.items() if each != stored}
            changed = rest if tensor is None else {**rest, stored: tensor}
            text = outcome(load_experts, {"layers": layers, "tensors": changed})
            lines.append(f"{stored.removeprefix(PREFIX)}: {words} -> {text}")

    assert "\n".join(lines) == golden


LAYER_KINDS: dict[str, Callable[..., LinearBase]] = {
    "column": lambda **options: ColumnParallelLinear(K, N, False, **options),
    "row": lambda **options: RowParallelLinear(K, N, False, **options),
    "merged": lambda **options: MergedColumnParallelLinear(K, (N, N), False, **options),
}


def fill_layer(kind: str, drawn: DrawnLayer, tensors: dict[str, Tensor], world: int = 1) -> Any:
    """Return the text, the weight and the outputs of a layer that weight loaders fill, on each rank."""
    found = []
    for rank in FakeWorld(world):
        config = CheckpointConfig(drawn.loader(), target=None)
        options = {"quant_config": config, "process_group": rank, "params_dtype": torch.float16}
        layer = LAYER_KINDS[kind](prefix=PREFIX, **options)
        shards = {0: tensors, 1: drawn.named()} if kind == "merged" else {None: tensors}
        for shard, held in shards.items():
            for name, tensor in held.items():
                layer.weight_loader(getattr(layer, name.removeprefix(f"{PREFIX}.")), tensor, shard)
        layer.quant_method.process_weights_after_loading(layer)
        weight = layer.typed_linear.typed
        x = torch.ones(2, layer.input_size_per_partition)
        outputs = layer.quant_method.apply(layer, x)
        found.append((layer.extra_repr(), tuple(weight.fields().values()), weight.layer, outputs))
    return found


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("column", name) for name in ("gptq", "fp8", "bnb_int8")),
        *(("row", name) for name in ("gptq", "fp8", "modelopt_nvfp4")),
        *(("merged", name) for name in ("gptq", "ct_pack", "modelopt_nvfp4")),
    ],
)
def test_a_layer_filled_with_changed_tensors(kind: str, name: str, golden: SnapshotAssertion) -> None:
    layer = layer_of(contract(name).common(name), N, K)
    whole = {"kind": kind, "drawn": layer, "tensors": layer.named()}
    lines = [f"{world} ranks -> {outcome(fill_layer, {**whole, 'world': world})}" for world in (1, *WORLDS)]
    lines.append(outcomes(partial(fill_layer, kind, layer), {"tensors": layer.named()}))

    assert "\n".join(lines) == golden


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_changed_argument_of_the_function(name: str, golden: SnapshotAssertion) -> None:
    call, arguments = FUNCTIONS[name]

    assert outcomes(call, arguments) == golden


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_changed_tensors(kind: str, golden: SnapshotAssertion, tmp_path: Path) -> None:
    tensors = make_checkpoint("plain", str(tmp_path), model=kind)
    config = json.loads((tmp_path / "config.json").read_text())
    lines = []
    for name in tensors:
        if re.search(r"[.][1-9]", name):  # later layers and experts are as the first
            continue
        changes = {"missing": None, **dict(changed_tensors(tensors[name]))}
        for words, tensor in changes.items():
            rest = {each: held for each, held in tensors.items() if each != name}
            storage = MemoryStorage(rest if tensor is None else {**rest, name: tensor})
            weights = Weights(storage, loader=DefaultWeightsLoader())
            lines.append(f"{name}: {words} -> {outcome(load_model, {'weights': weights, 'config': config})}")

    assert "\n".join(lines) == golden


CONFIG_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "text": text_config,
    "routing": routing_of,
    "facts": lambda config: facts_of(architecture_of(config)),
    "dtype": config_dtype,
    "latent": latent_config,
}


@pytest.mark.parametrize("kind", sorted(TYPE_ENTRIES))
@pytest.mark.parametrize("reader", CONFIG_READERS)
def test_a_changed_config_of(reader: str, kind: str, golden: SnapshotAssertion) -> None:
    read = CONFIG_READERS[reader]

    assert outcomes(read, {"config": tiny_config(kind)}) == golden
