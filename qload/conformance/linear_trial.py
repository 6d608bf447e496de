"""The checks of `LinearKernelSuite`, on every rank's share of the layer of a case."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil, log2
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance.case import ConformanceCase
from qload.conformance.prefixed import prefixed
from qload.errors import CutError, DivideError
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.testing import checks
from qload.testing.guards import Guards, around_borders
from qload.testing.layers_of import layer_of
from qload.weights import Weights

# Where the sign of a scale says which end of the range of integers is used.
SIGNED = {"gptq": "scales", "awq": "scales", "ct_pack": "weight_scale"}
LOADS = {"col": Weights.get_weights_col, "row": Weights.get_weights_row}


@lru_cache(maxsize=256)
def shares(case: ConformanceCase, filling: str) -> tuple[Weight, ...]:
    """Every rank's share of the layer of a `case`, with a `filling`; a whole layer is the only one."""
    made = layer_of(case.traits, case.N, case.K, filling=filling)
    if filling == "noise" and case.format in SIGNED:
        made.tensors[SIGNED[case.format]].view(-1)[::3].neg_()
    if case.world == 1:
        return (made.weight(),)
    load, storage = LOADS[case.split], made.storage()
    return tuple(
        load(Weights(storage, loader=made.loader(), process_group=rank), "layer")
        for rank in FakeWorld(case.world)
    )


class LinearTrial:
    """A kernel and one case: each method is a check, which raises AssertionError or returns what to report.

    `suite`: a `LinearKernelSuite`; `case`: the layer; `device`: where it lies.
    """

    def __init__(self, suite: Any, case: ConformanceCase, device: str) -> None:
        self.suite, self.case, self.device = suite, case, torch.device(device)
        self.dtype: torch.dtype = getattr(torch, case.dtype)

    def reads_back(self) -> None:
        """One-hot inputs, each rank's share."""
        whole, world = shares(replace(self.case, M=1, rank=0, world=1, split=""), "coded")[0], self.case.world
        for rank, weight, kernel in self._kernels("coded"):
            share: dict[str, Any] = (
                {} if world == 1 else {"whole": whole.to(self.device), "rank": rank, "world": world}
            )
            with prefixed("" if world == 1 else f"rank {rank} of {world}: "):
                checks.assert_reads_back(kernel, weight, self.dtype, **share)

    def sums_exactly(self) -> None:
        """Small integers, for every number of tokens that the kernel takes."""
        if (self.suite.accumulate, self.suite.partials) != ("float32", "float32"):
            pytest.skip("the kernel adds in a narrower type than float32, whose sums are not exact")
        tokens = self._tokens()
        for rank, weight, kernel in self._kernels("coded"):
            try:
                x, want = checks.exact_sums(weight, self.dtype, max(tokens))
            except ValueError:
                pytest.skip("float32 cannot sum values of this format exactly")
            for M in tokens:
                with prefixed(f"M = {M}{self._of(rank)}: "):
                    checks.assert_are_sums(kernel, x[:M], want[:M])

    def stays_within_the_bound(self) -> dict[str, Any]:
        """Random numbers; returns the largest error in units of the bound."""
        most = 0.0
        for rank, weight, kernel in self._kernels("noise"):
            for M in self._tokens()[:: max(1, len(self._tokens()) // 3)]:
                x = self._random(M, weight)
                with prefixed(f"M = {M}{self._of(rank)}: "):
                    most = max(most, checks.assert_within_bound(kernel, weight, x, **self._adds()))
        return {"error of bound": most}

    def says_the_same_twice(self) -> None:
        """The same bits."""
        if not self.suite.deterministic:
            pytest.skip("the suite says that the kernel is not deterministic")
        for _, weight, kernel in self._kernels("noise"):
            for M in self._tokens()[:3]:
                checks.assert_same_twice(kernel, self._random(M, weight))

    def keeps_to_its_buffers(self) -> None:
        """Poison around buffers and inputs."""
        for weight in self._weights("coded"):
            for M in self._tokens()[:3]:
                guards = Guards()
                buffers = guards.around("buffers", self.suite.pack(weight))

                def kernel(x: Tensor, held: Any = buffers, guards: Guards = guards) -> Any:
                    return self.suite.gemm(guards.around("x", x), held)

                checks.assert_within_bound(kernel, weight, self._random(M, weight), **self._adds())
                guards.assert_whole()

    def rows_do_not_mix(self) -> None:
        """NaN in one row, and finite numbers in all others."""
        for _, weight, kernel in self._kernels("coded"):
            for M in [M for M in self._tokens() if M > 1][:4]:
                x = self._random(M, weight)
                x[M // 2] = float("nan")
                y = kernel(x)
                spoiled = [int(m) for m in (~y.isfinite()).any(1).nonzero().flatten() if int(m) != M // 2]
                assert not spoiled, f"M = {M}: NaN in token {M // 2} reaches token {spoiled[0]}"
                assert bool(y[M // 2].isnan().all()), f"M = {M}: NaN in token {M // 2} is lost"

    def packing_leaves_the_weight_alone(self) -> None:
        """The tensors of the weight before and after, and two packings beside each other."""
        for weight in self._weights("coded"):
            before = {name: tensor.clone() for name, tensor in weight.fields().items()}
            first, second = (list(tensors_in(self.suite.pack(weight))) for _ in range(2))
            for name, tensor in weight.fields().items():
                with prefixed(f"packing changes the weight's {name}: "):
                    checks.assert_same_bits(tensor, before[name])
            assert len(first) == len(second), "packed twice, there are other tensors"
            for one, other in zip(first, second, strict=True):
                with prefixed("packed twice, the buffers differ: "):
                    checks.assert_same_bits(other, one)

    def _weights(self, filling: str) -> tuple[Weight, ...]:
        try:
            return tuple(
                weight.to(self.device) for weight in shares(replace(self.case, M=1, rank=0), filling)
            )
        except (CutError, DivideError) as error:
            pytest.skip(f"the format has no such cut: {str(error).splitlines()[0]}")

    def _kernels(self, filling: str) -> Iterator[tuple[int, Weight, Callable[[Tensor], Any]]]:
        for rank, weight in enumerate(self._weights(filling)):
            taken, _ = self.suite.can_implement(replace(self.case, rank=rank))
            if taken:
                buffers = self.suite.pack(weight)
                yield rank, weight, partial(self._product, buffers)

    def _product(self, buffers: Any, x: Tensor) -> Any:
        y = self.suite.gemm(x, buffers)
        assert isinstance(y, Tensor), f"gemm returned {type(y).__name__}, expected a tensor (M, N)"
        return y

    def _tokens(self) -> list[int]:
        """The numbers of tokens to try, of those that the kernel takes."""
        large = self.case.K * self.case.N * self.case.world > 512 * 256
        found = around_borders(*self.suite.borders, most=33 if large and not self.suite.borders else 257)
        return [M for M in found if self.suite.can_implement(replace(self.case, M=M))[0]] or [1]

    def _adds(self) -> dict[str, Any]:
        said = {name: getattr(self.suite, name) for name in ("accumulate", "partials", "scales")}
        found = {name: value and getattr(torch, value) for name, value in said.items()}
        return {**found, "split_k": self.suite.split_k}

    def _random(self, M: int, weight: Weight) -> Tensor:
        """Normal numbers, smaller by a power of two where no sum of them fits into x's type."""
        K = weight.shape[1]
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(1000 * K + M))
        most = float((x.abs() @ weight.dequantize().float().abs().cpu().T).max())
        over = max(1.0, most / torch.finfo(self.dtype).max * 2)
        fitting: Tensor = x / 2 ** ceil(log2(over))
        return fitting.to(self.device, self.dtype)

    def _of(self, rank: int) -> str:
        return "" if self.case.world == 1 else f", rank {rank} of {self.case.world}"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors within what a packer returned."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Weight):
        yield from value.fields().values()
    elif isinstance(value, dict):
        yield from (tensor for held in value.values() for tensor in tensors_in(held))
    elif isinstance(value, list | tuple):
        yield from (tensor for held in value for tensor in tensors_in(held))
