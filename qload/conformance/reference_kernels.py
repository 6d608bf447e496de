"""A correct kernel, packer and loader for each suite, with one known fault planted in it."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qload.conformance.cases import ConformanceCase
from qload.conformance.experts import ExpertsKernelSuite
from qload.conformance.linear import LinearKernelSuite
from qload.conformance.linear_checks import load_shares
from qload.conformance.loader import LoaderSuite
from qload.conformance.loader_checks import LOADS, name_tensors
from qload.conformance.packer import PackerSuite
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.testing.kernel_faults import KernelFault
from qload.testing.selftest.emulated_kernels import emulated_weight
from qload.weights import open_checkpoint

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
