"""Experts that are not alike, not there or not counted: refused by name, on all ranks, before a read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import FakeWorld, FormatLoader, WeightsLoader, architecture_of
from qload.errors import (
    DtypeError,
    MismatchError,
    MissingTensorError,
    QloadError,
    ShapeError,
    TwoFormatsError,
    UnsupportedFormatError,
)
from qload.experts.expert_description import check_alike
from qload.formats import Fp8Config, Fp8Weight, GPTQConfig, GPTQWeight, UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat
from tests.experts.expert_layers import FACTS, NAMES, PREFIX, StoredExperts, plain, stored_plain

pytestmark = pytest.mark.usefixtures("seen_texts")

COUNT = 4
BOTH = FormatLoader(
    ConfiguredFormat(Fp8Weight, Fp8Config()), ConfiguredFormat(UnquantizedWeight, UnquantizedConfig())
)
GPTQ = FormatLoader(ConfiguredFormat(GPTQWeight, GPTQConfig(4, 32)))
Change = Callable[[dict[str, Tensor]], None]


def refusal(tensors: dict[str, Tensor], loader: WeightsLoader, **settings: Any) -> QloadError:
    """What each of two ranks that share experts out says, and each of two that cut them: the same words."""
    said = {}
    for split in ("tensor", "experts"):
        for group in FakeWorld(2):
            weights = StoredExperts([], tensors, loader).weights(group, **settings)
            with pytest.raises(QloadError) as caught:
                weights.get_experts(PREFIX, facts=FACTS, split=split)  # type: ignore[arg-type]
            said[str(caught.value)] = caught.value
            assert all("g_idx" in name for name in weights.storage.reads)  # type: ignore[attr-defined]
            assert not weights.report().used
    assert len(said) == 1
    return next(iter(said.values()))


def fp8(count: int = COUNT) -> dict[str, Tensor]:
    tensors = plain(count, make=lambda tensor: tensor.float().to(torch.float8_e4m3fn))
    return tensors | {f"{name}_scale": torch.ones(1) for name in tensors}


def gptq(count: int = COUNT) -> dict[str, Tensor]:
    tensors = {}
    for expert in range(count):
        for name in NAMES:
            layer = f"{PREFIX}.{expert}.{name}"
            tensors[f"{layer}.qweight"] = torch.zeros(8, 64, dtype=torch.int32)
            tensors[f"{layer}.qzeros"] = torch.zeros(2, 8, dtype=torch.int32)
            tensors[f"{layer}.scales"] = torch.ones(2, 64).half()
            tensors[f"{layer}.g_idx"] = (torch.arange(64) // 32).int()
    return tensors


def replaced(end: str, value: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{PREFIX}.2.{end}": value})


def without(*ends: str) -> Change:
    return lambda tensors: [tensors.pop(f"{PREFIX}.2.{end}") for end in ends] and None


@pytest.mark.parametrize(
    ("make", "change", "layer", "what"),
    [
        (fp8, replaced("up_proj.weight_scale", torch.ones(12, 1)), "2.up_proj", "config"),
        (
            fp8,
            replaced("down_proj.weight_scale", torch.ones(1, 1)),
            "2.down_proj",
            "the axes of weight_scale",
        ),
        (fp8, replaced("down_proj.weight_scale", torch.ones(1).half()), "2.down_proj", "the dtype"),
        (fp8, replaced("down_proj.input_scale", torch.ones(1)), "2.down_proj", "tensors"),
        (gptq, replaced("down_proj.scales", torch.ones(2, 64)), "2.down_proj", "the dtype of scales"),
        (gptq, replaced("down_proj.g_idx", (torch.arange(64) % 2).int()), "2.down_proj", "config"),
    ],
)
def test_an_expert_of_another_kind_is_named(
    make: Callable[[], dict[str, Tensor]], change: Change, layer: str, what: str
) -> None:
    tensors = make()
    change(tensors)

    error = refusal(tensors, GPTQ if make is gptq else BOTH)

    assert isinstance(error, MismatchError)
    assert error.tensor == f"{PREFIX}.{layer}"
    assert what in error.what


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda first: {"sizes": {**first.sizes, "N": 128}}, "(N, K)"),
        (lambda first: {"specs": first.specs[:-1]}, "tensors"),
        (lambda first: {"format": ConfiguredFormat(GPTQWeight, GPTQConfig(4, 64))}, "config"),
        (lambda first: {"format": ConfiguredFormat(Fp8Weight, first.format.config)}, "format"),
    ],
)
def test_one_property_that_differs_is_enough(change: Callable[[Any], dict[str, Any]], what: str) -> None:
    weights = StoredExperts([], gptq(1), GPTQ).weights()
    first = weights.loader.describe(weights, f"{PREFIX}.0.up_proj")
    check_alike(first, replace(first, prefix="other"))

    with pytest.raises(MismatchError) as caught:
        check_alike(first, replace(first, prefix="other", **change(first)))

    assert str(caught.value).startswith(f"other: experts of one layer differ in {what}\n")


def test_an_expert_in_another_format_is_named() -> None:
    tensors = fp8()
    for name in NAMES:
        del tensors[f"{PREFIX}.3.{name}.weight_scale"]
        tensors[f"{PREFIX}.3.{name}.weight"] = tensors[f"{PREFIX}.3.{name}.weight"].half()

    error = refusal(tensors, BOTH)

    assert isinstance(error, MismatchError)
    assert error.tensor == f"{PREFIX}.3.gate_proj"
    assert (error.what, error.got) == ("experts of one layer differ in format", "unquantized")


def test_an_expert_of_another_shape_is_named() -> None:
    tensors = plain(COUNT, 12, 8)
    tensors |= {
        name: tensor for name, tensor in plain(COUNT, 16, 8).items() if name.startswith(f"{PREFIX}.1.")
    }

    error = refusal(tensors, BOTH)

    assert isinstance(error, MismatchError)
    assert (error.tensor, error.what) == (f"{PREFIX}.1.gate_proj", "experts of one layer differ in (N, K)")
    assert error.expected == f"(12, 8) as in {PREFIX}.0.gate_proj"


@pytest.mark.parametrize(
    ("name", "shape"), [("up_proj", (10, 8)), ("down_proj", (8, 10)), ("down_proj", (10, 12))]
)
def test_matrices_that_do_not_fit_each_other_are_named(name: str, shape: tuple[int, int]) -> None:
    tensors = plain(1)
    tensors[f"{PREFIX}.0.{name}.weight"] = torch.ones(shape).half()

    with pytest.raises(MismatchError, match=name):
        StoredExperts([], tensors, BOTH).load()


def test_a_vector_is_no_matrix_of_an_expert() -> None:
    tensors = {name: torch.ones(8) for name in plain(1)}

    with pytest.raises(ShapeError, match="a matrix of an expert"):
        StoredExperts([], tensors, BOTH).load()


@pytest.mark.parametrize(
    ("lost", "tensor"),
    [
        (["up_proj.weight"], "2.up_proj.weight"),
        (["down_proj.weight_scale"], "2.down_proj.weight_scale"),
        ([f"{name}.{kind}" for name in NAMES for kind in ("weight", "weight_scale")], "2.gate_proj.weight"),
    ],
)
def test_a_missing_expert_or_tensor_is_named(lost: list[str], tensor: str) -> None:
    tensors = fp8()
    without(*lost)(tensors)

    error = refusal(tensors, FormatLoader(ConfiguredFormat(Fp8Weight, Fp8Config())))

    assert isinstance(error, MissingTensorError)
    assert error.tensor == f"{PREFIX}.{tensor}"


@pytest.mark.parametrize(
    ("change", "error", "tensor"),
    [
        (without("down_proj.bias"), MismatchError, "2.down_proj"),
        (without("gate_proj.bias", "up_proj.bias"), MismatchError, "2.gate_proj"),
        (without("up_proj.bias"), MismatchError, "2.up_proj"),
        (without("gate_proj.bias"), MismatchError, "2.gate_proj"),
        (replaced("up_proj.bias", torch.ones(16).half()), MismatchError, "2.up_proj"),
        (replaced("up_proj.bias", torch.ones(15)), ShapeError, "2.up_proj.bias"),
        (replaced("down_proj.bias", torch.ones(8).int()), DtypeError, "2.down_proj.bias"),
    ],
)
def test_a_bias_that_is_not_as_its_siblings_is_named(
    change: Change, error: type[QloadError], tensor: str
) -> None:
    tensors = stored_plain(COUNT, biased=True).tensors
    change(tensors)

    found: Any = refusal(tensors, BOTH)

    assert type(found) is error
    assert found.tensor == f"{PREFIX}.{tensor}"


def test_a_bias_that_no_sibling_has_is_named() -> None:
    tensors = plain(COUNT) | {f"{PREFIX}.3.down_proj.bias": torch.ones(8)}

    found = refusal(tensors, BOTH)

    assert isinstance(found, MismatchError)
    assert (found.tensor, found.got) == (f"{PREFIX}.3.down_proj", "a bias")


def test_experts_in_two_spellings_are_refused() -> None:
    renamed = {name.replace("gate_proj", "w1"): tensor for name, tensor in plain(COUNT).items()}

    error = refusal(plain(COUNT) | renamed, BOTH)

    assert isinstance(error, TwoFormatsError)
    assert f"{PREFIX}.0.w1" in str(error)


def test_no_experts_at_all_say_what_was_looked_for() -> None:
    error = refusal({f"{PREFIX}.gate_up": torch.ones(4)}, BOTH)

    assert isinstance(error, MissingTensorError)
    assert f"stored   {PREFIX}.gate_up" in str(error)
    assert "w1|w3|w2, gate_proj|up_proj|down_proj" in str(error)


def test_experts_in_one_tensor_that_nothing_tells_apart_are_refused_by_its_name() -> None:
    error = refusal({f"{PREFIX}.gate_up_proj": torch.ones(2, 4, 4)}, BOTH)

    assert isinstance(error, UnsupportedFormatError)
    assert f"outputs and inputs in {PREFIX}.gate_up_proj of shape [2, 4, 4]" in str(error)


QWEN = {"model_type": "qwen3_moe", "hidden_size": 8, "moe_intermediate_size": 12}


@pytest.mark.parametrize("counted", [3, 0])
def test_an_expert_that_the_config_does_not_count_is_named(counted: int) -> None:
    settings = {"architecture": architecture_of({**QWEN, "num_experts": counted})}

    error = refusal(plain(COUNT), BOTH, **settings)

    assert isinstance(error, MismatchError)
    assert (error.tensor, error.expected) == (f"{PREFIX}.3", f"{counted} experts")


@pytest.mark.parametrize("counted", [5, 10**18])
def test_experts_that_the_config_counts_and_that_are_not_there_are_missing(counted: int) -> None:
    settings = {"architecture": architecture_of({**QWEN, "num_experts": counted})}

    error = refusal(plain(COUNT), BOTH, **settings)

    assert isinstance(error, MissingTensorError)
    assert error.tensor == f"{PREFIX}.4.gate_proj.weight"


@pytest.mark.parametrize("number", ["999999999999999999", "9" * 400])
def test_a_hostile_number_is_no_count(number: str) -> None:
    tensors = plain(2) | {f"{PREFIX}.{number}.gate_proj.weight": torch.ones(1)}

    if len(number) > 18:  # it is no number of an expert
        assert StoredExperts([], tensors, BOTH).load().shape[0] == 2
    else:
        error = refusal(tensors, BOTH)
        assert isinstance(error, MissingTensorError)
        assert error.tensor == f"{PREFIX}.2.gate_proj.weight"
