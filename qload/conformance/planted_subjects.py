"""A sound subject of each suite with one known fault in it."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qload.conformance.case import ConformanceCase
from qload.conformance.checkpoint import COLUMN, ROW
from qload.conformance.experts import ExpertsKernelSuite
from qload.conformance.linear import LinearKernelSuite
from qload.conformance.linear_trial import shares
from qload.conformance.loader import LoaderSuite
from qload.conformance.packer import PackerSuite
from qload.parallel import FakeWorld
from qload.spec import Weight, named
from qload.testing.kernel_faults import KernelFault
from qload.testing.selftest.emulated import as_lanes_read
from qload.weights import Weights, open_checkpoint

SHARES = "share-of-rank-0"  # a fault of products, which loaders have too


def _wrong(fault: KernelFault, weight: Weight) -> Weight:
    return fault.packed(weight) or weight


def kernel(fault: KernelFault, format_name: str) -> LinearKernelSuite:
    """A kernel in Marlin's order, or ExLlama's, with a fault in its weight or its product."""

    class PlantedKernel(LinearKernelSuite):
        format = format_name

        def pack(self, weight: Any) -> Any:
            return as_lanes_read(_wrong(fault, weight))

        def gemm(self, x: Any, buffers: Any) -> Any:
            return fault.gemm(partial(_product, buffers), len(buffers))(x)

    return PlantedKernel()


def _product(w: Tensor, x: Tensor) -> Tensor:
    """X (M, K) times w (N, K) -> (M, N), summed in float32 and rounded to x's type."""
    return (x.float() @ w.to(x.dtype).float().T).to(x.dtype)


def experts(fault: KernelFault, format_name: str) -> ExpertsKernelSuite:
    """A fused kernel with a fault in all that it packs, or in its first product."""

    class PlantedExperts(ExpertsKernelSuite):
        format = format_name

        def pack(self, experts: Any) -> Any:
            each = [experts.expert(place) for place in range(self.experts)]
            pairs = ((one.gate_up, one.down) for one in each)
            return [tuple(as_lanes_read(_wrong(fault, weight)) for weight in pair) for pair in pairs]

        def gemm(self, x: Any, ids: Any, weights: Any, buffers: Any) -> Any:
            y = torch.zeros(x.shape)
            for place, (gate_up, down) in enumerate(buffers):
                tokens, slots = (ids == place).nonzero().unbind(1)
                if not tokens.numel():
                    continue
                wide = partial(_wide, gate_up.to(x.dtype))
                gate, up = fault.gemm(wide, len(gate_up))(x[tokens].float()).chunk(2, -1)
                inner = torch.nn.functional.silu(gate) * up
                y[tokens] += weights[tokens, slots, None] * _wide(down.to(x.dtype), inner)
            return y.to(x.dtype)

    return PlantedExperts()


def _wide(w: Tensor, x: Tensor) -> Tensor:
    return x @ w.float().T


def packer(fault: KernelFault, format_name: str) -> PackerSuite:
    """A packer that writes what it should but for the fault."""

    class PlantedPacker(PackerSuite):
        format = format_name

        def pack(self, codes: Any, case: ConformanceCase) -> Any:
            return _wrong(fault, shares(replace(case, M=1), "noise")[0]).fields()

    return PlantedPacker()


def loader(fault: KernelFault, format_name: str) -> LoaderSuite:
    """qload's own loader, with a fault in every share."""

    class PlantedLoader(LoaderSuite):
        format = format_name

        def load(self, files: list[Path], rank: int, world: int) -> Any:
            whose = 0 if fault.name == SHARES else rank
            weights = open_checkpoint(files[0].parent, process_group=[*FakeWorld(world)][whose])
            found: dict[str, Tensor] = {}
            for names, load in ((COLUMN, Weights.get_weights_col), (ROW, Weights.get_weights_row)):
                for name in names:
                    share = _wrong(fault, load(weights, name))
                    suffixes = {spec.name: spec.suffix for spec in type(share).tensors(share.config)}
                    found |= {named(name, suffixes[field]): t for field, t in share.fields().items()}
            return found

    return PlantedLoader()
