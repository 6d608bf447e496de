"""Loaders around other loaders: the outer loader has each public attribute of the inner one.

`WRAPPERS` has each class of `qload` with a loader as constructor argument; a missing class fails a test.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import qload
from qload import (
    Fp8Quantizer,
    GPTQMarlinWeightsLoader,
    ModuleLoader,
    QuantizingLoader,
    RepackingLoader,
    UnquantizedWeight,
    Weights,
    WeightsLoader,
    loader_from_config,
    open_checkpoint,
)
from qload.detect import for_target
from qload.formats import UnquantizedConfig
from qload.loader import ConfiguredFormat, FormatLoader, LoadPlan, Part, Split
from qload.repacking.loaders import FastestLoader
from qload.storage import MemoryStorage
from tests.annotations import parameters

WEIGHT = UnquantizedWeight(weight=torch.arange(8.0).reshape(2, 4))
WEIGHTS = Weights(MemoryStorage({"up.weight": WEIGHT.weight}), loader=qload.DefaultWeightsLoader())
LAYER = replace(WEIGHTS.loader.describe(WEIGHTS, "up"), notes=("described by the inner loader",))
SETTLED = replace(LAYER, notes=("settled by the inner loader",))
PARTS = [Part("up")]
CPU = torch.device("cpu")


class Recorded(FormatLoader):
    """Loader with recorded calls and a distinct result for each method."""

    def __init__(self) -> None:
        super().__init__(ConfiguredFormat(UnquantizedWeight, UnquantizedConfig(unused=("odd",))))
        self.config_tensors = ("gptq_bits", "gptq_groupsize")
        self.asked: list[tuple[Any, ...]] = []

    def load(self, weights: Any, parts: Sequence[Part], split: Split | None, **more: Any) -> Any:
        self.asked.append(("load", weights, *parts, split))
        return WEIGHT

    def plan(self, weights: Any, parts: Sequence[Part], split: Split | None) -> LoadPlan:
        self.asked.append(("plan", weights, *parts, split))
        return LoadPlan(lambda source: WEIGHT)

    def shape(self, weights: Any, prefix: str) -> tuple[int, int]:
        self.asked.append(("shape", weights, prefix))
        return 20, 40

    def describe(self, weights: Any, prefix: str) -> Any:
        self.asked.append(("describe", weights, prefix))
        return LAYER

    def settle(self, weights: Any, layer: Any) -> Any:
        self.asked.append(("settle", weights, layer.prefix))
        return SETTLED

    def names_alike(self, first: str, other: str) -> bool:
        self.asked.append(("names_alike", first, other))
        return True

    def left_out(self, prefix: str) -> str:
        self.asked.append(("left_out", prefix))
        return f"the inner loader leaves out {prefix}"


Wrap = Callable[[Any], Any]
WRAPPERS: dict[type, dict[str, Wrap]] = {
    RepackingLoader: {"repacking": lambda inner: RepackingLoader(inner, "exllama")},
    GPTQMarlinWeightsLoader: {"marlin": lambda inner: for_target(inner, "marlin")},
    FastestLoader: {
        "fastest": lambda inner: for_target(inner, "auto"),
        "of a chip": lambda inner: FastestLoader(inner).for_chip(90),
    },
    QuantizingLoader: {"quantizing": lambda inner: QuantizingLoader(inner, Fp8Quantizer())},
    ModuleLoader: {
        "default": lambda inner: ModuleLoader(
            [(lambda name: name == "no", FormatLoader(LAYER.format))], inner
        ),
        "choice": lambda inner: ModuleLoader(
            [(lambda name: name == "up", inner)], FormatLoader(LAYER.format)
        ),
    },
}
ALL = [pytest.param(wrap, id=name) for wraps in WRAPPERS.values() for name, wrap in wraps.items()]
ALL.append(pytest.param(lambda inner: for_target(QuantizingLoader(inner, Fp8Quantizer()), "auto"), id="two"))

# Attribute -> call on a wrapper, and result of the inner loader.
PASSED: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "config_tensors": (lambda loader: loader.config_tensors, ("gptq_bits", "gptq_groupsize")),
    "shape": (lambda loader: loader.shape(WEIGHTS, "up"), (20, 40)),
    "describe": (lambda loader: loader.describe(WEIGHTS, "up"), LAYER),
    "left_out": (lambda loader: loader.left_out("up"), "the inner loader leaves out up"),
    "settle": (lambda loader: loader.settle(WEIGHTS, LAYER), SETTLED),
    "names_alike": (lambda loader: loader.names_alike("up", "down"), True),
    "steps": (lambda loader: loader.steps(), None),  # the inner loader loads in one step
}
# ModuleLoader is a FormatLoader: the description by its inner loader determines all other results.
OWN: dict[str, dict[str, Any]] = {
    "default": {"shape": (2, 4), "settle": LAYER},
    "choice": {"shape": (2, 4), "settle": LAYER, "names_alike": False},  # `down` has another loader
    "quantizing": {"names_alike": False},  # experts are quantized one after another
    "two": {"names_alike": False},
}
ARGUMENTS = {
    "shape": ("shape", WEIGHTS, "up"),
    "describe": ("describe", WEIGHTS, "up"),
    "left_out": ("left_out", "up"),
    "settle": ("settle", WEIGHTS, "up"),
    "names_alike": ("names_alike", "up", "down"),
}
LOADS = {
    "load": lambda loader, split: loader.load(WEIGHTS, PARTS, split),
    "plan": lambda loader, split: loader.plan(WEIGHTS, PARTS, split).finish(WEIGHTS),
}
TESTED_BELOW = {*LOADS, "formats", "made", "own_loads"}
FIVE_LOADS = {
    "get_weights", "get_weights_col", "get_weights_row", "get_multi_weights_col", "get_weights_col_packed",
}  # fmt: skip


@pytest.mark.parametrize("name", PASSED)
@pytest.mark.parametrize("wrap", ALL)
def test_a_wrapper_answers_as_its_inner_loader(wrap: Wrap, name: str, request: pytest.FixtureRequest) -> None:
    inner, (ask, answer) = Recorded(), PASSED[name]
    outer = wrap(inner)
    kind = request.node.callspec.id.split("-")[0]
    own = OWN.get(kind, {})

    assert ask(outer) == own.get(name, answer)
    if name in ARGUMENTS and name not in own:
        assert inner.asked == [ARGUMENTS[name]]


@pytest.mark.parametrize("split", [None, "N", "K"])
@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize(
    "wrap", [param for param in ALL if param.id not in ("default", "choice", "quantizing", "two")]
)
def test_a_plain_layer_is_loaded_by_the_inner_loader_with_the_same_arguments(
    wrap: Wrap, name: str, split: Split | None
) -> None:
    inner = Recorded()

    assert LOADS[name](wrap(inner), split) is WEIGHT
    assert inner.asked == [("plan", WEIGHTS, *PARTS, split)]


@pytest.mark.parametrize("wrap", ALL)
def test_a_wrapper_has_the_formats_of_its_inner_loader(wrap: Wrap) -> None:
    inner = Recorded()

    assert set(inner.formats) <= set(wrap(inner).formats)


@pytest.mark.parametrize("wrap", [param for param in ALL if param.id in ("fastest", "of a chip")])
def test_a_layer_that_is_not_repacked_is_said_to_stay(wrap: Wrap) -> None:
    assert wrap(Recorded()).made(LAYER, CPU) is None


@pytest.mark.parametrize("layout", ["gptq", "awq", "exllama", "marlin", "strips", "panels"])
def test_a_twin_with_another_config_keeps_all_other_attributes(layout: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    inner: Any = loader_from_config({**config, "modules_to_not_convert": ["head"]})
    inner.config_tensors = ("gptq_bits",)
    outer = RepackingLoader(inner, layout, strict=False)

    twin: Any = outer.with_config(bits=8)
    before: Any = outer.formats[0].config

    changed: Any = twin.formats[0].config
    assert changed.bits == 8
    assert before.bits == 4
    assert (twin.layout, twin.strict, twin.config_tensors) == (layout, False, ("gptq_bits",))
    assert twin.left_out("head") == "modules_to_not_convert has 'head'"


@pytest.mark.parametrize("target", [None, "auto", "marlin", "exllama", "strips", "panels"])
@pytest.mark.parametrize("bits", [4, 8])
def test_tensors_of_settings_are_exempt_behind_each_target(bits: int, target: Any, tmp_path: Path) -> None:
    K, N = 128, 64
    tensors = {
        "up.qweight": torch.zeros(K * bits // 32, N, dtype=torch.int32),
        "up.qzeros": torch.full(
            (1, N * bits // 32), 0x77777777 if bits == 4 else 0x7F7F7F7F, dtype=torch.int32
        ),
        "up.scales": torch.ones(1, N).half(),
        "up.g_idx": torch.zeros(K, dtype=torch.int32),
        "gptq_bits": torch.tensor(bits),
        "gptq_groupsize": torch.tensor(-1),
    }
    save_file(tensors, tmp_path / "model.safetensors")

    with open_checkpoint(tmp_path, target=target) as weights:
        assert weights.report().exempted == dict.fromkeys(
            ("gptq_bits", "gptq_groupsize"), "read as configuration"
        )
        weights.get_weights("up")
        assert weights.report().complete


def loader_classes() -> Iterator[type[WeightsLoader]]:
    """Return all classes of loaders in `qload` except engines, because they need other programs."""
    for module in pkgutil.walk_packages(qload.__path__, "qload."):
        if not module.name.startswith(
            ("qload.engines", "qload.__main__", "qload.testing", "qload.conformance")
        ):
            importlib.import_module(module.name)
    kinds = [WeightsLoader]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("qload."):
            yield kind


def test_each_class_around_a_loader_is_in_the_table() -> None:
    around = {
        kind
        for kind in loader_classes()
        if not inspect.isabstract(kind)
        and any("Loader" in str(each.annotation) for each in parameters(kind).values())
    }

    assert around == WRAPPERS.keys()


def test_each_public_attribute_of_a_loader_is_in_the_table() -> None:
    shown = {name for name in dir(WeightsLoader) if not name.startswith("_")}

    assert shown == PASSED.keys() | TESTED_BELOW | FIVE_LOADS
