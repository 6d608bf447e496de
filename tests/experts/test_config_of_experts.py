"""Config entries and values of single experts: each expert counts, not the first alone."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from qload import loader_from_config
from qload.errors import ExcludedModuleError, MismatchError
from qload.formats import GPTQConfig
from qload.spec import Config
from tests.experts.expert_layers import NAMES, PREFIX, StoredExperts
from tests.experts.test_refusals import gptq

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
MIDDLE = 0x77777777  # zero points of 8, stored minus one


def experts(change: dict[str, Tensor], **section: Any) -> StoredExperts:
    """Four experts of random codes and middle zero points, with a change; their loader knows the config."""
    generator = torch.Generator().manual_seed(1)
    tensors = gptq()
    for name, tensor in tensors.items():
        if name.endswith("qweight"):
            tensor.random_(-(2**31), 2**31, generator=generator)
        if name.endswith("qzeros"):
            tensor.fill_(MIDDLE)
    loader = loader_from_config({**GPTQ, **section})
    return StoredExperts([], tensors | {f"{PREFIX}.{end}": tensor for end, tensor in change.items()}, loader)


@pytest.mark.parametrize("expert", [1, 3])
def test_an_expert_with_zero_points_off_the_middle_is_named(expert: int) -> None:
    wrong = torch.full((2, 8), -0x77777778, dtype=torch.int32)
    stored = experts({f"{expert}.down_proj.qzeros": wrong}, sym=True)

    with pytest.raises(MismatchError, match="zero points are one off") as caught:
        stored.load()

    assert caught.value.tensor == f"{PREFIX}.{expert}.down_proj.qzeros"


def test_experts_of_a_config_without_a_rule_for_stacks_are_settled_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GPTQConfig, "decides_alike", Config.decides_alike)
    wrong = torch.full((2, 8), -0x77777778, dtype=torch.int32)

    with pytest.raises(MismatchError, match="zero points are one off"):
        experts({"2.up_proj.qzeros": wrong}, sym=True).load()


def test_experts_with_middle_zero_points_are_settled_by_the_first() -> None:
    with mock.patch.object(GPTQConfig, "settled", autospec=True, side_effect=GPTQConfig.settled) as settled:
        experts({}, sym=True).load()

    assert settled.call_count == len(NAMES)


@pytest.mark.parametrize("sym", [True, False])
def test_zero_points_of_an_expert_are_read_as_in_its_layer_alone(sym: bool) -> None:
    """Fields of ones have several readings: the third expert's decides, and changes no other expert."""
    wrapped = torch.full((2, 8), MIDDLE, dtype=torch.int32)
    wrapped[0, 0] = 0x7777777F
    stored = experts({f"2.{name}.qzeros": wrapped for name in NAMES}, sym=sym)

    loaded = stored.load()

    for expert in range(4):
        gate, up, down = stored.meant(expert)
        gate_up, own = loaded.dequantize(expert)
        assert torch.equal(gate_up, torch.cat([gate, up]))
        assert torch.equal(own, down)


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_that_the_config_leaves_out_is_named(name: str) -> None:
    stored = experts({}, modules_to_not_convert=[f"experts.2.{name}"])

    with pytest.raises(ExcludedModuleError) as caught:
        stored.load()

    assert caught.value.tensor == f"{PREFIX}.2.{name}"
