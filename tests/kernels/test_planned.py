"""Calls on a CPU that were planned for where the tensors of a layer lie."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.errors import DtypeError, ShapeError
from qload.kernel_formats import repack
from qload.kernels import cpu, plans
from qload.testing import assert_same_bits
from tests.kernel_formats.marlin_layers import layer

pytestmark = pytest.mark.usefixtures("seen_texts")

PANELS: Any = repack(layer(64, 32, 32, sym=False), "panels")


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-3, 4, (5, 64), generator=torch.Generator().manual_seed(1)).to(dtype)


def test_a_call_that_was_planned_reads_panels_where_they_lie() -> None:
    module, x = PANELS.get_linear(), tokens()
    before, held = module(x), [module.get_buffer(name) for name in module._call.names]

    module.get_buffer("scales").mul_(2)
    assert_same_bits(module(x), 2 * before)

    module._apply(torch.clone)
    for tensor in held:
        tensor.zero_()
    assert_same_bits(module(x), 2 * before)

    module.scales = torch.zeros_like(module.get_buffer("scales"))
    assert_same_bits(module(x), torch.zeros(5, 32))


def test_no_other_tensor_lies_where_a_call_is_planned_for() -> None:
    module, x = repack(layer(512, 512, 32), "panels").get_linear(), torch.ones(1, 512)
    want, first, halves = module(x), module.scales.data_ptr(), module.scales.clone()
    module.scales.data = torch.zeros(1)  # which lets go of the memory

    others = [halves.to(torch.bfloat16) for _ in range(64)]
    module.scales.data = next((each for each in others if each.data_ptr() == first), others[0])

    assert_same_bits(module(x), want)


def test_memory_that_is_seen_as_another_type_is_read_as_that() -> None:
    module, x = PANELS.holding({"scales": PANELS.scales.clone()}).get_linear(), tokens()
    module(x)

    module.scales.data = module.scales.data.view(torch.bfloat16)

    assert_same_bits(module(x), module.typed.get_linear()(x))


def test_a_layer_that_was_moved_keeps_no_panels_where_they_were() -> None:
    module = PANELS.holding({"qweight": PANELS.qweight.clone()}).get_linear()
    module(tokens())
    codes = weakref.ref(module.qweight.untyped_storage())

    module.to("meta")

    assert codes() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_planned_call_is_the_same_product(dtype: torch.dtype) -> None:
    bias = torch.arange(32).to(dtype)
    wide = torch.stack([tokens(dtype)] * 2, -1)
    module = PANELS.get_linear(bias)

    for x in (tokens(dtype), tokens(dtype).view(1, 5, 64), wide[..., 0], tokens(dtype)[0]):
        assert_same_bits(module(x), plans.multiply(x, module.typed, bias))
        assert_same_bits(module(x, -bias), plans.multiply(x, module.typed, -bias))


def test_what_does_not_fit_a_planned_call_is_refused_by_name() -> None:
    module = PANELS.get_linear()
    for x, error in (
        (tokens()[:, :32], ShapeError),
        (tokens().int(), DtypeError),
        (tokens()[0, 0], ShapeError),
    ):
        with pytest.raises(error, match="x"):
            module(x)
    with pytest.raises(ShapeError, match="bias"):
        module(tokens(), torch.ones(31))


def test_a_planned_call_obeys_who_turns_native_code_off(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, asked = PANELS.get_linear(), tokens(), []
    before = module(x)
    monkeypatch.setattr(cpu.PanelsPlan, "product", lambda *rest: asked.append(rest))
    with native.reference():
        assert_same_bits(module(x), before)

    assert not asked
