"""Experts of every format: stacked they mean what each of their matrices means alone."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.architecture import Architecture, architecture_of
from qload.detect import DefaultWeightsLoader, loader_from_config
from qload.errors import ArgumentError
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.example_counts import at_most
from tests.experts.expert_layers import (
    FACTS,
    NAMES,
    PREFIX,
    StoredExperts,
    every_matrix,
    experts,
    stored_plain,
)
from tests.experts.test_refusals import gptq

few = at_most(8)
GPTQ = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}


@every_matrix
@given(data=st.data())
@few
def test_every_expert_means_what_its_matrices_mean_alone(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(experts(weight_type))

    made = stored.load()

    assert made.shape == (stored.count, stored.drawn[0][0].K, stored.inner)
    assert made.gate_up.shape == (stored.count, 2 * stored.inner, stored.drawn[0][0].K)
    for expert in range(stored.count):
        gate, up, down = stored.meant(expert)
        gate_up, last = made.dequantize(expert)
        assert_same_bits(gate_up, torch.cat([gate, up]))
        assert_same_bits(last, down)


@every_matrix
@given(data=st.data())
@few
def test_an_expert_is_the_layer_that_a_load_of_two_parts_gives(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(experts(weight_type))
    weights = stored.weights()

    made = stored.load()

    for expert in range(stored.count):
        prefix = f"{PREFIX}.{expert}"
        pairs = (
            (made.expert(expert).gate_up, [f"{prefix}.gate_proj", f"{prefix}.up_proj"]),
            (made.expert(expert).down, [f"{prefix}.down_proj"]),
        )
        for got, names in pairs:
            want = weights.get_multi_weights_col(names)
            assert (type(got), got.config, got.layer) == (type(want), want.config, want.layer)
            assert got.fields().keys() == want.fields().keys()
            for field, tensor in want.fields().items():
                assert_same_bits(got.fields()[field], tensor)


@every_matrix
@given(data=st.data())
@few
def test_the_ledger_has_every_tensor_once(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(experts(weight_type))
    weights = stored.weights()

    weights.get_experts(PREFIX, facts=FACTS)

    report = weights.report()
    assert report.complete
    assert set(report.used) == set(stored.tensors)


@every_matrix
@given(data=st.data())
@few
def test_no_byte_is_read_twice(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(experts(weight_type))
    weights = stored.weights()

    weights.get_experts(PREFIX, facts=FACTS)

    reads = weights.storage.reads  # type: ignore[attr-defined]
    assert [name for name, times in reads.items() if times > 1] == []


def test_no_byte_of_experts_with_a_config_is_read_twice() -> None:
    """All zero points decide their convention; those of the first expert are read for its description too."""
    tensors = gptq()
    for name, tensor in tensors.items():
        if name.endswith(("qweight", "qzeros")):  # all codes are at their zero point of 8
            tensor.fill_(-0x77777778 if name.endswith("qweight") else 0x77777777)
    stored = StoredExperts([], tensors, loader_from_config({"quant_method": "gptq", **GPTQ}))
    weights = stored.weights()

    weights.get_experts(PREFIX, facts=FACTS)

    reads = weights.storage.reads  # type: ignore[attr-defined]
    twice = [name for name, times in reads.items() if times > 1]
    assert twice == [f"{PREFIX}.0.{name}.qzeros" for name in NAMES]


def test_an_expert_is_a_view_and_there_are_no_others() -> None:
    made = stored_plain(3).load()

    made.expert(2).down.fields()["weight"][0, 0] = 77

    assert made.down.fields()["weight"][2, 0, 0] == 77
    for index in (-1, 3):
        with pytest.raises(ArgumentError, match="0 to 2"):
            made.expert(index)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_every_expert_has_its_own_biases(dtype: torch.dtype | None) -> None:
    stored = stored_plain(3, biased=True)
    weights = stored.weights(dtype=dtype)

    made = weights.get_experts(PREFIX, facts=FACTS)

    biases = {name: stored.tensors[f"{name}.bias"] for one in made.down.names for name in siblings(one)}
    for expert, down in enumerate(made.down.names):
        gate, up, _ = siblings(down)
        assert made.gate_up_bias is not None
        assert made.down_bias is not None
        assert_same_bits(made.gate_up_bias[expert], torch.cat([biases[gate], biases[up]]))
        assert_same_bits(made.down_bias[expert], biases[down])
    assert weights.report().complete


def siblings(down: str) -> tuple[str, ...]:
    return tuple(down.replace("down_proj", name) for name in NAMES)


def test_floats_are_cast_to_the_dtype_that_is_asked_for() -> None:
    stored = stored_plain(2)

    made = stored.weights(dtype=torch.bfloat16).get_experts(PREFIX, facts=FACTS)

    for expert in range(2):
        alone = stored.tensors[f"{PREFIX}.{expert}.down_proj.weight"]
        assert_same_bits(made.down.fields()["weight"][expert], alone.bfloat16())


def test_experts_are_looked_up_by_names_that_tensors_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    architecture = architecture_of({"model_type": "mixtral", "num_local_experts": 1})
    assert architecture is not None
    found = Architecture.find

    def find(self: Architecture, name: str) -> Any:
        asked.append(name)
        return found(self, name)

    monkeypatch.setattr(Architecture, "find", find)
    stored = {f"x.experts.0.{name}.weight": torch.ones(4, 4) for name in NAMES}
    weights = Weights(MemoryStorage(stored), loader=DefaultWeightsLoader(), architecture=architecture)

    weights.get_experts("x.experts", facts=FACTS)

    assert f"x.experts.0.{NAMES[0]}" in asked
    assert not [name for name in asked if name.startswith("None")]
