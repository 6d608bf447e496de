"""`WriterSuite`: a sound quantizer passes, and the fault of a wrong one is named."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance import ConformanceCase, WriterSuite
from qload.conformance.writer_checks import WriterChecks
from qload.testing import checks


class Rounding(WriterSuite):
    """Rounds to the nearest of 16 codes; zero points lie within 1 to 15."""

    format = "gptq"
    step = 1

    def write(self, weight: Tensor, case: ConformanceCase) -> Any:
        groups = weight.float().reshape(case.N, -1, case.group_size)
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 14).half()
        zeros = (-low / scales.float()).round().clamp(1, 15)
        codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
        meant = ((codes - zeros[..., None]) * scales.float()[..., None]).reshape(weight.shape)
        tensors = {
            "qweight": self.words(codes.reshape(weight.shape).T.int(), 0),
            "qzeros": self.words(zeros.T.int() - self.step, 1),
            "scales": scales.T.contiguous(),
        }
        return tensors, meant

    def words(self, codes: Tensor, axis: int) -> Tensor:
        columns = codes.transpose(axis, -1).reshape(-1, 8)
        packed = (columns.long() << torch.arange(0, 32, 4)).sum(-1)
        shape = [*codes.transpose(axis, -1).shape[:-1], -1]
        return packed.to(torch.uint32).view(torch.int32).reshape(shape).transpose(axis, -1).contiguous()


class LaterZeros(Rounding):
    step = 0


class ChangesItsArgument(Rounding):
    def write(self, weight: Tensor, case: ConformanceCase) -> Any:
        made = super().write(weight, case)
        weight.mul_(2)
        return made


class OtherType(Rounding):
    def write(self, weight: Tensor, case: ConformanceCase) -> Any:
        tensors, meant = super().write(weight, case)
        return tensors | {"scales": tensors["scales"].float()}, meant


class Nameless(Rounding):
    def write(self, weight: Tensor, case: ConformanceCase) -> Any:
        tensors, meant = super().write(weight, case)
        return tensors | {"zeros": tensors.pop("qzeros")}, meant


CASE = next(case for case in Rounding.cases("smoke") if case.id == "gptq.v1.w4.g128.asym.k256n128")


def test_a_sound_quantizer_passes() -> None:
    WriterChecks(Rounding(), CASE).writes_what_it_means()
    WriterChecks(Rounding(), CASE).the_weight_is_left_alone()


def test_zero_points_of_the_other_convention_are_named() -> None:
    with pytest.raises(checks.WrongProduct) as caught:
        WriterChecks(LaterZeros(), CASE).writes_what_it_means()

    assert caught.value.diagnosis.fault == "zero-points-one-lower"
    assert "the tensors mean" in str(caught.value)


def test_a_changed_argument_is_noticed() -> None:
    with pytest.raises(AssertionError, match="quantizing changes the weight"):
        WriterChecks(ChangesItsArgument(), CASE).the_weight_is_left_alone()


@pytest.mark.parametrize(
    ("suite", "words"), [(OtherType, "scales: torch.float32"), (Nameless, "zeros is no tensor of gptq")]
)
def test_a_wrong_tensor_is_named(suite: type[Rounding], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        WriterChecks(suite(), CASE).writes_what_it_means()
