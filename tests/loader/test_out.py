"""Layers that are read to a place of the caller's: the same weight, in that memory if it lies so."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload import MemoryStorage, Weights
from qload.detect import loader_from_config
from qload.errors import ArgumentError
from qload.loader import Part
from qload.parallel import FakeWorld
from qload.spec import Role, Weight
from qload.testing import assert_same_bits, layers
from tests.example_counts import at_most
from tests.format_cases import CONFIGS, every_format, lawful

few = at_most(8)


@every_format
@pytest.mark.parametrize("split", ["N", "K", None])
@given(data=st.data())
@few
def test_a_load_to_a_place_is_the_same_load(weight_type: type[Weight], split: Any, data: Any) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))
    dim = split or "N"
    world = 2 if lawful(stored.config, dim, getattr(stored, dim), 2, stored.K) else 1
    for group in FakeWorld(world):
        weights, again = (
            Weights(stored.storage(), loader=stored.loader(), process_group=group) for _ in range(2)
        )
        want = stored.loader().load(weights, [Part("layer")], split)
        places = {field: torch.empty_like(tensor) for field, tensor in want.fields().items()}

        made = stored.loader().load(again, [Part("layer")], split, out=places)

        assert (type(made), made.config, made.layer) == (type(want), want.config, want.layer)
        for spec in (spec for spec in weight_type.tensors(made.config) if spec.name in places):
            assert_same_bits(made.fields()[spec.name], want.fields()[spec.name])
            straight = any(s.spent for s in weight_type.tensors(made.config)) or spec.fact or spec.view
            flat = any(axis.flat for axis in spec.places)
            if not straight and not flat:
                assert made.fields()[spec.name] is places[spec.name]
        assert weights.storage.bytes_read == again.storage.bytes_read  # type: ignore[attr-defined]
        assert again.report().used == weights.report().used


@every_format
@given(data=st.data())
@few
def test_parts_are_joined_at_their_place(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type], N=384, fillings=("count",)))
    weights = Weights(MemoryStorage(stored.named("a") | stored.named("b")), loader=stored.loader())
    parts = [Part("a"), Part("b")]
    want = stored.loader().load(weights, parts, None)
    places = {field: torch.empty_like(tensor) for field, tensor in want.fields().items()}

    made = stored.loader().load(weights, parts, None, out=places)

    for field, tensor in want.fields().items():
        assert_same_bits(made.fields()[field], tensor)


def test_scalars_are_joined_at_their_place() -> None:
    stored = {
        f"{name}.{field}": tensor
        for name, scale in (("a", 0.5), ("b", 0.25))
        for field, tensor in (
            ("weight", torch.ones(16, 16).to(torch.float8_e4m3fn)),
            ("weight_scale", torch.tensor(scale)),
        )
    }
    loader = loader_from_config({"quant_method": "fp8"})
    places = {"weight_scale": torch.zeros(2)}

    made = loader.load(
        Weights(MemoryStorage(stored), loader=loader), [Part("a"), Part("b")], None, out=places
    )

    assert made.fields()["weight_scale"].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("role", [Role.FLOAT, Role.SCALE])
def test_a_place_gets_what_a_read_hands_out(dtype: torch.dtype | None, role: Role) -> None:
    storage = MemoryStorage({"a.weight": torch.randn(4, 6)})
    weights = Weights(storage, loader=layer_loader(), dtype=dtype)
    index = (slice(1, 3),)
    want = weights.read("a.weight", index, role=role)
    for out in (torch.zeros_like(want), torch.zeros(6, 2, dtype=want.dtype).T):
        weights.read_into("a.weight", index, out, role=role)

        assert_same_bits(out.contiguous(), want)
    assert not weights.report().used


@pytest.mark.usefixtures("seen_texts")
def test_a_place_of_another_kind_is_refused() -> None:
    weights = Weights(MemoryStorage({"a.weight": torch.randn(4, 6)}), loader=layer_loader())
    for out in (torch.zeros(4, 6).half(), torch.zeros(6, 4), torch.zeros(6, 4).T[:3]):
        with pytest.raises(ArgumentError, match="out"):
            weights.read_into("a.weight", (), out, role=Role.FLOAT)


def layer_loader() -> Any:
    from qload import DefaultWeightsLoader

    return DefaultWeightsLoader()
