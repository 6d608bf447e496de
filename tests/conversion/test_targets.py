"""Upper limits of values, without a look at the codes."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from qload import AWQConfig, AWQWeight
from qload.conversion.targets import stays_below
from qload.formats import UnquantizedConfig, UnquantizedWeight
from qload.spec import Codes, TensorSpec, Weight

pytestmark = pytest.mark.usefixtures("seen_texts")

LOOKUP = torch.tensor([0.0, -6.0, torch.nan, 4.0])


@dataclass(frozen=True, eq=False)
class ToldCodes(Weight):
    """Weight of the given codes."""

    format = "told"
    told: Any = None

    @classmethod
    def tensors(cls, config: object) -> tuple[TensorSpec, ...]:
        return ()

    def codes(self) -> Codes:
        return self.told


def told(**said: Any) -> Weight:
    one = Codes(
        **{"bits": 2, "codes": torch.zeros(2, 4, dtype=torch.uint8), "scales": torch.ones(2, 1)}
        | {"zeros": None, "k_group": None, **said}
    )
    weight = object.__new__(ToldCodes)
    object.__setattr__(weight, "told", one)
    object.__setattr__(weight, "layer", AWQ.layer)
    return weight


AWQ = AWQWeight(
    config=AWQConfig(32),
    qweight=torch.zeros(32, 8, dtype=torch.int32),
    qzeros=torch.zeros(1, 8, dtype=torch.int32),
    scales=torch.full((1, 64), 4.0).half(),
)


@pytest.mark.parametrize(
    ("said", "farthest"),
    [
        pytest.param({}, 3, id="the largest code of two bits"),
        pytest.param({"zeros": torch.tensor([[1], [2]])}, 2, id="less the least zero point"),
        pytest.param({"zeros": torch.tensor([[3], [3]])}, 3, id="zero less the largest"),
        pytest.param({"scales": torch.tensor([[1.0], [-5.0]])}, 15, id="scales of either sign"),
        pytest.param({"factor": 0.5}, 1.5, id="times the factor"),
        pytest.param({"lookup": LOOKUP}, 6, id="what codes stand for, NaN aside"),
        pytest.param({"scales": torch.tensor([[4.0], [0.25]]), "divide": True}, 12, id="by the least scale"),
    ],
)
def test_no_value_is_farther_than_scales_and_zero_points_allow(said, farthest):
    weight = told(**said)

    assert stays_below(weight, math.nextafter(farthest, math.inf))
    assert not stays_below(weight, farthest)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({"scales": torch.tensor([[torch.nan], [1.0]])}, id="a scale is NaN"),
        pytest.param({"scales": torch.tensor([[torch.inf], [1.0]])}, id="a scale is infinite"),
        pytest.param({"scales": torch.tensor([[0.0], [1.0]]), "divide": True}, id="a divisor is zero"),
        pytest.param({"lookup": torch.tensor([1.0, torch.inf])}, id="a code is infinite"),
        pytest.param({"scales": torch.ones(0, 1)}, id="no scales"),
    ],
)
def test_what_has_no_bound_is_not_below_one(said):
    assert not stays_below(told(**said), 1e300)


def test_codes_alone_do_not_count():
    """All codes of the layer are 0, and so are its values: the limit ignores them."""
    assert not AWQ.dequantize().count_nonzero()
    assert not stays_below(AWQ, 60.0)
    assert stays_below(AWQ, 60.1)
    assert not stays_below(replace(AWQ, scales=AWQ.scales * torch.inf), 1e300)


def test_plain_values_have_no_codes():
    assert not stays_below(UnquantizedWeight(config=UnquantizedConfig(), weight=torch.zeros(2, 2)), 1.0)
