"""The error that a trial reports is the largest of all elements, tokens, ranks and experts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance.expert_checks import ExpertChecks
from qload.conformance.linear_checks import LinearChecks
from qload.kernels.bounds import Bounded
from qload.testing import assert_within_bound, checks, derived_bound
from tests.conformance.subjects import Sound
from tests.conformance.test_linear import GPTQ
from tests.conformance.test_suites import Experts
from tests.testing.test_checks import weight_of

# Where the largest of all errors comes: first, in the middle, and last.
ORDERS = [(0.875, 0.25, 0.125, 0.5), (0.25, 0.875, 0.125, 0.5), (0.25, 0.5, 0.125, 0.875)]


def off_by(want: Bounded, errors: tuple[float, ...]) -> Tensor:
    """Exact values in float64, but for some elements, which are off by such parts of the bound."""
    y = want.value.clone()
    budget = want.rounded_to(torch.float64).error
    for at, error in enumerate(errors):
        sign = -1 if at % 2 else 1
        y.view(-1)[7 * at + 3] += sign * error * budget.view(-1)[7 * at + 3]
    return y


@pytest.mark.parametrize("errors", ORDERS)
def test_of_a_product_the_largest_error_is_returned(errors: tuple[float, ...]) -> None:
    weight = weight_of()
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).half()
    want = derived_bound(x, weight)

    found = assert_within_bound(lambda _: off_by(want, errors), weight, x)

    assert found == pytest.approx(0.875)


@pytest.mark.parametrize("errors", ORDERS)
@pytest.mark.parametrize("case", ["gptq.v1.w4.g128.k256n128", "gptq.v1.w4.g128.k512n256.tp2col"])
def test_of_a_linear_kernel_the_largest_error_is_reported(
    case: str, errors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter(errors * 100)
    calls: list[float] = []

    def within(*_: Any, **__: Any) -> float:
        calls.append(next(given))
        return calls[-1]

    monkeypatch.setattr(checks, "assert_within_bound", within)

    said = LinearChecks(Sound(), GPTQ[case], "cpu").stays_within_the_bound()

    assert len(calls) >= 3
    assert said == {"error of bound": sorted(calls)[-1]}


def experts_trial() -> ExpertChecks:
    return ExpertChecks(Experts(), Experts.cases("smoke")[0], "cpu")


@pytest.mark.parametrize("errors", ORDERS)
@pytest.mark.parametrize("check", ["each_expert_alone", "stays_within_the_bound"])
def test_of_a_kernel_of_experts_the_largest_error_is_reported(
    check: str, errors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, calls = iter(errors * 100), list[float]()
    monkeypatch.setattr(ExpertChecks, "_check_bound", lambda *_: calls.append(next(given)) or calls[-1])

    said = getattr(experts_trial(), check)()

    assert len(calls) >= 4
    assert said == {"error of bound": sorted(calls)[-1]}


@pytest.mark.parametrize("errors", ORDERS)
def test_of_one_call_of_experts_the_largest_error_counts(errors: tuple[float, ...]) -> None:
    """A kernel that is exact but for known errors of the second expert."""

    class Off(Experts):
        calls = 0

        def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
            self.calls += 1
            want = trial._exact(x, ids, weights)
            return off_by(want, errors if self.calls == 2 else ())

    trial = ExpertChecks(Off(), Experts.cases("smoke")[0], "cpu")

    assert trial.each_expert_alone()["error of bound"] == pytest.approx(0.875)
