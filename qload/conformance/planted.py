"""Test the suites: each known fault planted in a sound subject of each suite, and which tests notice."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance.case import ConformanceCase
from qload.conformance.cases import cases
from qload.conformance.experts import ExpertsKernelSuite
from qload.conformance.experts_trial import ExpertsTrial, experts_of
from qload.conformance.linear_trial import LinearTrial, shares
from qload.conformance.loader_trial import LoaderTrial
from qload.conformance.packer_trial import PackerTrial
from qload.conformance.planted_subjects import SHARES, experts, kernel, loader, packer
from qload.spec import Weight
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault
from qload.testing.selftest.oracles import ORACLES, OWN
from qload.testing.selftest.subjects import SUBJECTS

FORMATS = ("gptq", "awq", "ct_pack", "fp8", "modelopt_nvfp4")
NAMES = ("LinearKernelSuite", "ExpertsKernelSuite", "PackerSuite", "LoaderSuite")
IN_FILES = ("gptq", "awq", "fp8")  # formats that `LoaderSuite` writes


@dataclass(frozen=True)
class Noticed:
    """What the tests of one suite made of a fault.

    Attributes
    ----------
    by, of
        Those that failed, and those that ran: by their names.
    """

    by: tuple[str, ...]
    of: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.by)} of {len(self.of)}"


@dataclass(frozen=True)
class PlantedRow:
    """A fault, and what each suite made of it.

    Attributes
    ----------
    fault, words
        Which one.
    case
        The id of the layer that kernels and packers are shown.
    suites
        By the name of each suite in which a subject can have the fault.
    tolerances
        By the name of each tolerance in wide use: whether a test of a kernel with it fails, as it should.
    """

    fault: str
    words: str
    case: str
    suites: dict[str, Noticed]
    tolerances: dict[str, bool]

    @property
    def let_through(self) -> tuple[str, ...]:
        """The suites whose every test passes in spite of the fault."""
        return tuple(name for name, noticed in self.suites.items() if not noticed.by)


def planted_in_suites(folder: Path, faults: tuple[KernelFault, ...] = KERNEL_FAULTS) -> Iterator[PlantedRow]:
    """A row for each of some `faults`; the layer is the first of the smoke tier that the fault changes.

    `folder`: for the files that a loader reads.
    """
    for fault in faults:
        case, suites = _case_of(fault, FORMATS, _layer), {}
        if case is None:
            continue
        suites["LinearKernelSuite"] = of_a_kernel(fault, case)
        if (stacked := _case_of(fault, FORMATS, _matrices)) is not None:
            suites["ExpertsKernelSuite"] = of_experts(fault, stacked)
        if fault.change is not None:
            suites["PackerSuite"] = of_a_packer(fault, case)
        stored = _case_of(fault, IN_FILES, _layer)
        if stored is not None and (fault.change is not None or fault.name == SHARES):
            suites["LoaderSuite"] = of_a_loader(fault, stored, folder)
        yield PlantedRow(fault.name, fault.words, case.id, suites, _by_tolerances(fault))


def of_a_kernel(fault: KernelFault, case: ConformanceCase) -> Noticed:
    """Of `LinearKernelSuite`: a kernel that reads a real one's order, with a `fault`, shown a `case`."""
    trial = LinearTrial(kernel(fault, case.format), case, "cpu")
    return _noticed(trial, "reads_back", "sums_exactly", "stays_within_the_bound")


def of_experts(fault: KernelFault, case: ConformanceCase) -> Noticed:
    """Of `ExpertsKernelSuite`: a fused kernel with a `fault`, shown a `case`."""
    trial = ExpertsTrial(experts(fault, case.format), case, "cpu")
    return _noticed(trial, "each_expert_alone", "stays_within_the_bound")


def of_a_packer(fault: KernelFault, case: ConformanceCase) -> Noticed:
    """Of `PackerSuite`: a packer with a `fault` in what it writes, shown a `case`."""
    return _noticed(PackerTrial(packer(fault, case.format), case), "packs_to_the_bit")


def of_a_loader(fault: KernelFault, case: ConformanceCase, folder: Path) -> Noticed:
    """Of `LoaderSuite`: a loader with a `fault` in every share, shown a `case`; files lie in `folder`."""
    suite = loader(fault, case.format)
    shared = next(each for each in suite.cases() if each.traits == case.traits and each.world == 2)
    return _noticed(LoaderTrial(suite, shared, folder), "shares_are_exact", "several_files_are_one")


def _noticed(trial: Any, *checks: str) -> Noticed:
    failed, ran = [], []
    for check in checks:
        try:
            getattr(trial, check)()
        except AssertionError:
            failed.append(check)
        except pytest.skip.Exception:  # of sums that float32 cannot hold
            continue
        ran.append(check)
    return Noticed(tuple(failed), tuple(ran))


def _by_tolerances(fault: KernelFault) -> dict[str, bool]:
    """Of the first weight that the fault changes, of those whose numbers are as small as a model's."""
    made = (each() for each in SUBJECTS.values())
    weight = next(each for each in made if fault.change is None or fault.packed(each) is not None)
    subject = kernel(fault, weight.format)
    product = partial(_gemm, subject, subject.pack(weight))
    others = {name: passes for name, passes in ORACLES.items() if name not in OWN}
    return {name: not passes(product, weight, torch.float16) for name, passes in others.items()}


def _gemm(subject: Any, buffers: Any, x: Tensor) -> Any:
    return subject.gemm(x, buffers)


def _case_of(
    fault: KernelFault, formats: tuple[str, ...], held: Callable[[ConformanceCase], Iterable[Weight]]
) -> ConformanceCase | None:
    """The first layer of these formats whose weights the fault changes; for a fault of products, of all."""
    for format in formats:
        for case in cases(format, "smoke"):
            if fault.change is None or any(fault.packed(weight) is not None for weight in held(case)):
                return case
    return None


def _layer(case: ConformanceCase) -> Iterable[Weight]:
    return shares(replace(case, M=1), "noise")


def _matrices(case: ConformanceCase) -> Iterator[Weight]:
    """Those of experts, which may hold one scale of a whole tensor as one for each output."""
    held = experts_of(replace(case, M=1), ExpertsKernelSuite.experts, ExpertsKernelSuite.activation)
    for place in range(ExpertsKernelSuite.experts):
        yield from held.expert(place)[:2]
