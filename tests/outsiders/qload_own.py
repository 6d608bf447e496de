"""Suites of qload's own linears, experts, loader and packers, beside those of other projects."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qload
from qload.conformance import ExpertsKernelSuite, LinearKernelSuite, LoaderSuite
from qload.conformance.loader_checks import LOADS, name_tensors
from qload.parallel import FakeWorld


class OwnLinear(LinearKernelSuite):
    """`Weight.get_linear` with the default kernel order."""

    subject = "get_linear"
    package = "qload-weights"

    def pack(self, weight: Any) -> Any:
        return weight

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        with torch.no_grad():
            y: Tensor = buffers.get_linear(activations="unquantized")(x)
        return y


class TestGPTQ(OwnLinear):
    format = "gptq"


class TestAWQ(OwnLinear):
    format = "awq"


class TestFP8(OwnLinear):
    format = "fp8"


class TestNF4(OwnLinear):
    format = "bnb_nf4"


class TestNVFP4(OwnLinear):
    format = "modelopt_nvfp4"


class TestMXFP4(OwnLinear):
    format = "ct_mxfp4"


class TestGGUF(OwnLinear):
    format = "gguf"


class TestMLX(OwnLinear):
    format = "mlx"


class TestExperts(ExpertsKernelSuite):
    format = "gptq"
    subject = "ExpertsWeight.get_linear"
    package = "qload-weights"

    def pack(self, experts: Any) -> Any:
        return experts

    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        y: Tensor = buffers.get_linear()(x, ids, weights)
        return y


class TestLoader(LoaderSuite):
    format = "gptq"
    subject = "open_checkpoint"
    package = "qload-weights"

    def load(self, files: list[Path], rank: int, world: int) -> Any:
        tensors: dict[str, Tensor] = {}
        with qload.open_checkpoint(files[0].parent, process_group=list(FakeWorld(world))[rank]) as weights:
            for names, load in LOADS:
                for name in names:
                    tensors |= name_tensors(load(weights, name), name)
        return tensors
