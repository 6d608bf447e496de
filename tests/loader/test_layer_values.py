"""Scales that are NaN or infinite: refused by every load of every format, on all ranks alike."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload import MemoryStorage, Weights
from qload.errors import ArgumentError, NonfiniteScaleError
from qload.formats import GGUFWeight
from qload.loader import Part
from qload.loader.layer_values import is_finite
from qload.parallel import FakeWorld
from qload.spec import Role, TensorSpec, Weight, named
from qload.testing import assert_same_bits, layers
from qload.testing.random_layer import DrawnLayer
from tests.example_counts import at_most
from tests.format_cases import CONFIGS, every_format, lawful

few = at_most(4)
NANS = {  # the bits of NaN, and of an infinity where there is one
    torch.uint8: (0xFF,),
    torch.float8_e8m0fnu: (0xFF,),
    torch.float8_e4m3fn: (0x7F, 0xFF),
    torch.float8_e4m3fnuz: (0x80,),
    torch.float8_e5m2: (0x7E, 0x7C, 0xFC),
    torch.float8_e5m2fnuz: (0x80,),
}
FLOATS = (float("nan"), float("inf"), float("-inf"))


def spoiled(scales: Tensor, at: int, which: int) -> Tensor:
    """The same with a NaN or an infinity in one place."""
    made = scales.clone()
    flat = made.reshape(-1) if made.ndim else made.view(1)
    if scales.dtype in NANS:
        flat.view(torch.uint8)[at] = NANS[scales.dtype][which % len(NANS[scales.dtype])]
    else:
        flat[at] = FLOATS[which % len(FLOATS)]
    return made


def scale_specs(stored: DrawnLayer, tensors: dict[str, Tensor]) -> list[tuple[str, TensorSpec]]:
    """The stored names of the layer's scales that are floats."""
    found = []
    for spec in stored.weight_type.tensors(stored.config):
        for suffix in spec.suffixes:
            tensor = tensors.get(named("layer", suffix))
            floats = tensor is not None and (tensor.dtype.is_floating_point or spec.is_exponents)
            if spec.role is Role.SCALE and floats:
                found.append((named("layer", suffix), spec))
    return found


@every_format
@pytest.mark.parametrize("split", ["N", "K", None])
@given(data=st.data())
@few
def test_every_rank_refuses_the_whole_layer_in_the_same_words(
    weight_type: type[Weight], split: Any, data: Any
) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))
    tensors = stored.named("layer")
    found = scale_specs(stored, tensors)
    if not found:
        assert weight_type.plain or weight_type is GGUFWeight  # has its scales in its blocks
        return
    name, _ = data.draw(st.sampled_from(found))
    at = data.draw(st.integers(0, tensors[name].numel() - 1))
    wrong = spoiled(tensors[name], at, data.draw(st.integers(0, 2)))
    dim = split or "N"
    world = 2 if lawful(stored.config, dim, getattr(stored, dim), 2, stored.K) else 1
    said = set()
    for group in FakeWorld(world):
        weights = Weights(
            MemoryStorage({**tensors, name: wrong}), loader=stored.loader(), process_group=group
        )
        with pytest.raises(NonfiniteScaleError) as caught:
            weights.loader.load(weights, [Part("layer")], split)
        said.add(str(caught.value))
        assert not weights.report().used

    (text,) = said
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), wrong.shape)) if wrong.ndim else ()
    assert text.startswith(f"{name}: has scales that are not finite\n")
    assert f" at {place}; 1 of {wrong.numel()} are not finite" in text
    assert 'nonfinite="allow"' in text
    assert "qload verify" in text


@every_format
@given(data=st.data())
@few
def test_scales_that_are_allowed_are_loaded_as_they_are_stored(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))
    tensors = stored.named("layer")
    for name, spec in scale_specs(stored, tensors):
        if spec.spent:
            continue
        wrong = spoiled(tensors[name], 0, 0)
        storage = MemoryStorage({**tensors, name: wrong})
        weight = Weights(storage, loader=stored.loader(), nonfinite="allow").get_weights("layer")
        held = weight.fields()[spec.name]
        assert_same_bits(held.reshape(wrong.shape), wrong)


@every_format
@given(data=st.data())
@few
def test_finite_scales_are_never_refused(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))
    tensors = stored.named("layer")

    for name, spec in scale_specs(stored, tensors):
        assert is_finite(tensors[name], spec) == bool(
            (tensors[name].view(torch.float8_e8m0fnu) if spec.is_exponents else tensors[name])
            .float()
            .isfinite()
            .all()
        )


def gptq(**scales: float) -> tuple[dict[str, Tensor], Any]:
    from qload import loader_from_config

    words = torch.zeros(4, 64, dtype=torch.int32)
    tensors = {}
    for name, value in scales.items():
        tensors |= {
            f"{name}.qweight": words,
            f"{name}.qzeros": torch.zeros(1, 8, dtype=torch.int32),
            f"{name}.scales": torch.full((1, 64), value).half(),
        }
    return tensors, loader_from_config({"quant_method": "gptq", "bits": 4, "group_size": 32})


@pytest.mark.usefixtures("seen_texts")
def test_of_joined_layers_the_one_that_is_wrong_is_named() -> None:
    tensors, loader = gptq(gate=1.0, up=float("nan"))
    weights = Weights(MemoryStorage(tensors), loader=loader)

    with pytest.raises(NonfiniteScaleError, match=r"^up\.scales: .*\n.*\n.*nan at \(0, 0\); 64 of 64"):
        weights.get_multi_weights_col(["gate", "up"])


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("wrong", ["warn", None, 1])
def test_a_setting_that_is_none_is_refused(wrong: Any) -> None:
    tensors, loader = gptq(up=1.0)

    with pytest.raises(ArgumentError, match="nonfinite\n  expected 'error' or 'allow'"):
        Weights(MemoryStorage(tensors), loader=loader, nonfinite=wrong)


def test_a_load_of_shapes_alone_reads_no_scale() -> None:
    tensors, loader = gptq(up=float("nan"))
    weights = Weights(MemoryStorage(tensors), loader=loader, device="meta")

    assert weights.get_weights("up").shape == (64, 32)
