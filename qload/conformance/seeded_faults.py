"""Tests of the suites: the tests that fail for a correct kernel, packer or loader with one planted fault."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.conformance.cases import ConformanceCase, cases
from qload.conformance.expert_checks import ExpertChecks, load_experts
from qload.conformance.linear_checks import LinearChecks, load_shares
from qload.conformance.loader_checks import LOADS, LoaderChecks, name_tensors
from qload.conformance.packer_checks import PackerChecks
from qload.conformance.suites import ExpertsKernelSuite, LinearKernelSuite, LoaderSuite, PackerSuite
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault
from qload.testing.selftest.emulated_kernels import emulated_weight
from qload.testing.selftest.matrix import ORACLES, REQUIRED_CHECKS, SAMPLE_WEIGHTS
from qload.testing.selftest.runner import run_faults

RANK_0_SHARE = "share-of-rank-0"  # a fault of products that loaders have too


def _with_fault(fault: KernelFault, weight: Weight) -> Weight:
    return fault.packed(weight) or weight


def linear_kernel(fault: KernelFault, format_name: str) -> LinearKernelSuite:
    """Return the suite of a kernel in Marlin's order, or ExLlama's, with a `fault`."""

    class FaultyKernel(LinearKernelSuite):
        format = format_name

        def pack(self, weight: Any) -> Any:
            return emulated_weight(_with_fault(fault, weight))

        def gemm(self, x: Any, buffers: Any) -> Any:
            return fault.gemm(partial(_product, buffers), len(buffers))(x)

    return FaultyKernel()


def _product(w: Tensor, x: Tensor) -> Tensor:
    """X (M, K) times w (N, K) -> (M, N), summed in float32 and rounded to the type of x."""
    return (x.float() @ w.to(x.dtype).float().T).to(x.dtype)


def experts_kernel(fault: KernelFault, format_name: str) -> ExpertsKernelSuite:
    """Return the suite of a fused kernel with a `fault` in all weights, or in its first product."""

    class FaultyExperts(ExpertsKernelSuite):
        format = format_name

        def pack(self, experts: Any) -> Any:
            matrices = (experts.expert(index) for index in range(self.experts))
            pairs = ((expert.gate_up, expert.down) for expert in matrices)
            return [tuple(emulated_weight(_with_fault(fault, weight)) for weight in pair) for pair in pairs]

        def gemm(self, x: Any, ids: Any, weights: Any, buffers: Any) -> Any:
            y = torch.zeros(x.shape)
            for index, (gate_up, down) in enumerate(buffers):
                tokens, slots = (ids == index).nonzero().unbind(1)
                if not tokens.numel():
                    continue
                first = partial(_float32_product, gate_up.to(x.dtype))
                gate, up = fault.gemm(first, len(gate_up))(x[tokens].float()).chunk(2, -1)
                inner = torch.nn.functional.silu(gate) * up
                y[tokens] += weights[tokens, slots, None] * _float32_product(down.to(x.dtype), inner)
            return y.to(x.dtype)

    return FaultyExperts()


def _float32_product(w: Tensor, x: Tensor) -> Tensor:
    return x @ w.float().T


def packer(fault: KernelFault, format_name: str) -> PackerSuite:
    """Return the suite of a packer with a `fault` in its tensors."""

    class FaultyPacker(PackerSuite):
        format = format_name

        def pack(self, codes: Any, case: ConformanceCase) -> Any:
            return _with_fault(fault, load_shares(replace(case, M=1), "noise")[0]).fields()

    return FaultyPacker()


def loader(fault: KernelFault, format_name: str) -> LoaderSuite:
    """Return the suite of qload's own loader with a `fault` in every share."""

    class FaultyLoader(LoaderSuite):
        format = format_name

        def load(self, files: list[Path], rank: int, world: int) -> Any:
            loaded_rank = 0 if fault.name == RANK_0_SHARE else rank
            weights = open_checkpoint(files[0].parent, process_group=[*FakeWorld(world)][loaded_rank])
            loaded: dict[str, Tensor] = {}
            for names, load in LOADS:
                for name in names:
                    loaded |= name_tensors(_with_fault(fault, load(weights, name)), name)
            return loaded

    return FaultyLoader()


FORMATS = ("gptq", "awq", "ct_pack", "fp8", "modelopt_nvfp4")
SUITES = ("LinearKernelSuite", "ExpertsKernelSuite", "PackerSuite", "LoaderSuite")
FILE_FORMATS = ("gptq", "awq", "fp8")  # with a config that `LoaderSuite` writes


@dataclass(frozen=True)
class SuiteResult:
    """The failed tests of one suite with a fault, and all tests in the run, by name."""

    failed: tuple[str, ...]
    ran: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.failed)} of {len(self.ran)}"


@dataclass(frozen=True)
class SuitesRow:
    """The result of one fault in all suites.

    Attributes
    ----------
    fault, words
        The id and the description of the fault.
    case
        The id of the layer of kernels and packers.
    suites
        By name of each suite whose subject can have the fault.
    tolerances
        By name of each tolerance in wide use: whether a test of a faulty kernel fails, as it should.
    """

    fault: str
    words: str
    case: str
    suites: dict[str, SuiteResult]
    tolerances: dict[str, bool]

    @property
    def let_through(self) -> tuple[str, ...]:
        """The suites without a failed test."""
        return tuple(name for name, result in self.suites.items() if not result.failed)

    @property
    def end(self) -> str:
        """ "caught" by all suites, or "let through"."""
        return "let through" if self.let_through else "caught"

    def row(self) -> dict[str, Any]:
        """The columns of the report by name."""
        first = {"subject": self.case, "fault": self.fault, "words": self.words, "end": self.end}
        suites = {name: str(self.suites.get(name, "")) for name in SUITES}
        ends = {name: "caught" if failed else "let through" for name, failed in self.tolerances.items()}
        return {**first, **suites, **ends}


def try_faults(folder: Path, faults: tuple[KernelFault, ...] = KERNEL_FAULTS) -> Iterator[SuitesRow]:
    """Yield a row for each of `faults`; its layer is the first of the smoke tier that the fault changes.

    `folder`: of the files of loaders.
    """
    yield from run_faults(faults, partial(_try, folder))


def _try(folder: Path, fault: KernelFault) -> Iterator[SuitesRow]:
    case, suites = _first_case(fault, FORMATS, _layer), {}
    if case is None:
        return
    suites["LinearKernelSuite"] = try_kernel(fault, case)
    if (stacked := _first_case(fault, FORMATS, _expert_matrices)) is not None:
        suites["ExpertsKernelSuite"] = try_experts(fault, stacked)
    if fault.change is not None:
        suites["PackerSuite"] = try_packer(fault, case)
    stored = _first_case(fault, FILE_FORMATS, _layer)
    if stored is not None and (fault.change is not None or fault.name == RANK_0_SHARE):
        suites["LoaderSuite"] = try_loader(fault, stored, folder)
    yield SuitesRow(fault.name, fault.words, case.id, suites, _try_tolerances(fault))


def try_kernel(fault: KernelFault, case: ConformanceCase) -> SuiteResult:
    """Run `LinearKernelSuite` on a kernel with a `fault` for a `case`."""
    checks = LinearChecks(linear_kernel(fault, case.format), case, "cpu")
    return _run_checks(checks, "reads_back", "sums_exactly", "stays_within_the_bound")


def try_experts(fault: KernelFault, case: ConformanceCase) -> SuiteResult:
    """Run `ExpertsKernelSuite` on a fused kernel with a `fault` for a `case`."""
    checks = ExpertChecks(experts_kernel(fault, case.format), case, "cpu")
    return _run_checks(checks, "each_expert_alone", "stays_within_the_bound")


def try_packer(fault: KernelFault, case: ConformanceCase) -> SuiteResult:
    """Run `PackerSuite` on a packer with a `fault` for a `case`."""
    return _run_checks(PackerChecks(packer(fault, case.format), case), "packs_to_the_bit")


def try_loader(fault: KernelFault, case: ConformanceCase, folder: Path) -> SuiteResult:
    """Run `LoaderSuite` on a loader with a `fault` for two ranks of a `case`; files are in `folder`."""
    suite = loader(fault, case.format)
    shared = next(each for each in suite.cases() if each.traits == case.traits and each.world == 2)
    return _run_checks(LoaderChecks(suite, shared, folder), "shares_are_exact", "several_files_are_one")


def _run_checks(checks: Any, *names: str) -> SuiteResult:
    failed = []
    for name in names:
        try:
            getattr(checks, name)()
        except AssertionError:
            failed.append(name)
    return SuiteResult(tuple(failed), names)


def _try_tolerances(fault: KernelFault) -> dict[str, bool]:
    """Try the tolerances on the first sample weight that the fault changes."""
    samples = (make() for make in SAMPLE_WEIGHTS.values())
    weight = next(each for each in samples if fault.change is None or fault.packed(each) is not None)
    suite = linear_kernel(fault, weight.format)
    kernel = partial(_gemm, suite, suite.pack(weight))
    tolerances = {name: passes for name, passes in ORACLES.items() if name not in REQUIRED_CHECKS}
    return {name: not passes(kernel, weight, torch.float16) for name, passes in tolerances.items()}


def _gemm(suite: Any, buffers: Any, x: Tensor) -> Any:
    return suite.gemm(x, buffers)


def _first_case(
    fault: KernelFault, formats: tuple[str, ...], weights: Callable[[ConformanceCase], Iterable[Weight]]
) -> ConformanceCase | None:
    """The first case with weights that the fault changes; the first of all for a fault of products."""
    for format in formats:
        for case in cases(format, "smoke"):
            if fault.change is None or any(fault.packed(weight) is not None for weight in weights(case)):
                return case
    return None


def _layer(case: ConformanceCase) -> Iterable[Weight]:
    return load_shares(replace(case, M=1), "noise")


def _expert_matrices(case: ConformanceCase) -> Iterator[Weight]:
    """The matrices of experts, which may store one scale of a whole tensor as one for each output."""
    experts = load_experts(replace(case, M=1), ExpertsKernelSuite.experts, ExpertsKernelSuite.activation)
    for index in range(ExpertsKernelSuite.experts):
        yield from experts.expert(index)[:2]
