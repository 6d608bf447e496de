"""The kernels of the CPU module under the public suites: panels, and codes in rows, as they are stored."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.conformance import ConformanceCase, ExpertsKernelSuite, LinearKernelSuite
from qload.conformance.expert_checks import load_experts
from qload.conformance.linear_checks import load_shares
from qload.conformance.suites import CaseRun
from qload.errors import CutError, DivideError
from qload.kernel_formats import repack
from qload.kernel_formats.repack import find_unsupported_panels
from qload.kernels import cpu, experts_function
from qload.kernels.cpu import ROW_TYPES, rows_of
from qload.spec import Weight
from tests.native.memory import isas

pytestmark = pytest.mark.slow  # many cases, for the session that has the module

DTYPES = ("bfloat16", "float16", "float32")
PANELS = ("gptq", "awq", "ct_pack", "marlin")
ROWS = tuple(weight_type.format for weight_type in ROW_TYPES)


@pytest.fixture(autouse=True, params=isas())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a case by each instruction set."""
    with native.using(request.param):
        yield


def weights_of(case: ConformanceCase) -> tuple[Weight, ...]:
    """The shares of all ranks; none if the format has no such cut, which the suite skips with the reason."""
    try:
        return load_shares(replace(case, M=1, rank=0), "coded")
    except (CutError, DivideError):
        return ()


@lru_cache(maxsize=512)
def why_no_panels(case: ConformanceCase) -> str:
    """The reason why panels refuse a share of the layer, or ""."""
    reasons = map(find_unsupported_panels, weights_of(case))
    return next((reason for reason in reasons if reason is not None), "")


@lru_cache(maxsize=512)
def why_no_rows(case: ConformanceCase) -> str:
    """The reason why the module cannot read the layer as it is stored, or ""."""
    no_rows = any(rows_of(weight) is None for weight in weights_of(case))
    return "codes or groups are not in rows of outputs" if no_rows else ""


class CPULinear(LinearKernelSuite):
    """Products of the CPU module, which sums in float32 for any number of tokens."""

    dtypes = DTYPES

    def gemm(self, x: Tensor, buffers: Any) -> Tensor | None:
        return cpu.multiply(x, buffers)

    def test_sums_exactly(self, trial: CaseRun) -> None:
        """As in the suite, for values that are exact in the type of x; others the module may round or not."""
        dtype = getattr(torch, trial.case.dtype)
        for weight in weights_of(trial.case):
            if not torch.equal(weight.dequantize().to(dtype).float(), weight.dequantize()):
                pytest.skip(f"the values of the weight are not exact in {trial.case.dtype}")
        super().test_sums_exactly(trial)


class Panels(CPULinear):
    """Integers in panels."""

    def pack(self, weight: Weight) -> Weight:
        return repack(weight, "panels")

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        reason = why_no_panels(replace(case, M=1, rank=0))
        return not reason, reason


class Rows(CPULinear):
    """Codes in rows of outputs, as they are stored."""

    def pack(self, weight: Weight) -> Weight:
        return weight

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        reason = why_no_rows(replace(case, M=1, rank=0))
        return not reason, reason


class CPUExperts(ExpertsKernelSuite):
    """The experts module of qload, all of whose products are those of the CPU module."""

    dtypes = DTYPES

    @classmethod
    def cases(cls, tier: str = "smoke") -> tuple[ConformanceCase, ...]:
        """The cases of small layers in every tier but the largest."""
        return super().cases(tier if tier == "exhaustive" else "smoke")

    @pytest.fixture(autouse=True)
    def _no_product_of_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: Any) -> Tensor:
            raise AssertionError("a matrix of an expert was left to torch")

        monkeypatch.setattr(experts_function, "product", refuse)

    def pack(self, experts: Any) -> Any:
        return experts

    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Any:
        return buffers.get_linear(activations="unquantized")(x, ids, weights)


class PanelsOfExperts(CPUExperts):
    """Experts in panels."""

    def pack(self, experts: Any) -> Any:
        return experts.repack("panels")

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        reason = next((reason for each in matrices(case) if (reason := find_unsupported_panels(each))), "")
        return not reason, reason


class RowsOfExperts(CPUExperts):
    """Experts as they are stored."""

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        no_rows = any(rows_of(each) is None for each in matrices(case))
        return not no_rows, "codes or groups are not in rows of outputs" if no_rows else ""


def matrices(case: ConformanceCase) -> Iterator[Weight]:
    """Gate and up, and down, of the first expert."""
    experts = load_experts(replace(case, M=1), CPUExperts.experts, CPUExperts.activation)
    yield from experts.expert(0)[:2]


def suite(base: type, format: str) -> type:
    """The suite of one format, under a name that pytest collects."""
    name = f"Test{base.__name__}_{format}"
    return type(name, (base,), {"format": format, "__doc__": base.__doc__})


SUITES = [suite(Panels, format) for format in PANELS] + [suite(Rows, format) for format in ROWS]
SUITES += [suite(PanelsOfExperts, format) for format in PANELS if format != "marlin"]
SUITES += [suite(RowsOfExperts, format) for format in ROWS]
globals().update({each.__name__: each for each in SUITES})
