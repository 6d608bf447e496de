"""The checks of `LinearKernelSuite`, on every rank's share of the layer of a case."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil, log2
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance.cases import ConformanceCase
from qload.errors import CutError, DivideError
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.testing import checks
from qload.testing.checks import Guards, around_borders
from qload.testing.layer_factory import layer_of
from qload.weights import Weights

# Formats with scales of either sign; the sign tells which end of the range of integers is used.
SIGNED_SCALES = {"gptq": "scales", "awq": "scales", "ct_pack": "weight_scale"}
LOADS = {"col": Weights.get_weights_col, "row": Weights.get_weights_row}
LARGE_LAYER = 512 * 256  # elements; larger layers are tried with up to 33 tokens


@lru_cache(maxsize=256)
def load_shares(case: ConformanceCase, filling: str) -> tuple[Weight, ...]:
    """Return every rank's share of the layer of a `case` with a `filling`, or the whole layer alone."""
    layer = layer_of(case.traits, case.N, case.K, filling=filling)
    if filling == "noise" and case.format in SIGNED_SCALES:
        layer.tensors[SIGNED_SCALES[case.format]].view(-1)[::3].neg_()
    if case.world == 1:
        return (layer.weight(),)
    load, storage = LOADS[case.split], layer.storage()
    return tuple(
        load(Weights(storage, loader=layer.loader(), process_group=rank), "layer")
        for rank in FakeWorld(case.world)
    )


class LinearChecks:
    """The checks of a kernel for one case; each raises AssertionError, or returns entries of the report.

    `suite`: a `LinearKernelSuite`; `case`: the layer; `device`: of its tensors.
    """

    def __init__(self, suite: Any, case: ConformanceCase, device: str) -> None:
        self.suite, self.case, self.device = suite, case, torch.device(device)
        self.dtype: torch.dtype = getattr(torch, case.dtype)

    def reads_back(self) -> None:
        """One-hot inputs return the weight of each rank."""
        world = self.case.world
        (whole,) = load_shares(replace(self.case, M=1, rank=0, world=1, split=""), "coded")
        for rank, weight, kernel in self._kernels("coded"):
            share: dict[str, Any] = (
                {} if world == 1 else {"whole": whole.to(self.device), "rank": rank, "world": world}
            )
            with checks.error_prefix("" if world == 1 else f"rank {rank} of {world}: "):
                checks.assert_reads_back(kernel, weight, self.dtype, **share)

    def sums_exactly(self) -> None:
        """Small integers sum exactly, for every supported number of tokens."""
        if (self.suite.accumulate, self.suite.partials) != ("float32", "float32"):
            pytest.skip("the kernel adds in a narrower type than float32, whose sums are not exact")
        tokens = self._tokens()
        for rank, weight, kernel in self._kernels("coded"):
            try:
                x, want = checks.exact_sums(weight, self.dtype, max(tokens))
            except ValueError:
                pytest.skip("float32 cannot sum values of this format exactly")
            for M in tokens:
                with checks.error_prefix(f"M = {M}{self._rank_words(rank)}: "):
                    checks.assert_are_sums(kernel, x[:M], want[:M], weight)

    def stays_within_the_bound(self) -> dict[str, Any]:
        """Random numbers are within the bound; return the largest error in units of it."""
        largest = 0.0
        for rank, weight, kernel in self._kernels("noise"):
            for M in self._tokens()[:: max(1, len(self._tokens()) // 3)]:
                x = self._random(M, weight)
                with checks.error_prefix(f"M = {M}{self._rank_words(rank)}: "):
                    error = checks.assert_within_bound(kernel, weight, x, **self._summation())
                largest = max(largest, error)
        return {"error of bound": largest}

    def says_the_same_twice(self) -> None:
        """Two calls give the same bits."""
        if not self.suite.deterministic:
            pytest.skip("the suite says that the kernel is not deterministic")
        for _, weight, kernel in self._kernels("noise"):
            for M in self._tokens()[:3]:
                checks.assert_same_twice(kernel, self._random(M, weight))

    def keeps_to_its_buffers(self) -> None:
        """Poison around buffers and inputs is neither read nor written."""
        for weight in self._weights("coded"):
            for M in self._tokens()[:3]:
                guards = Guards()
                buffers = guards.around("buffers", self.suite.pack(weight))

                def kernel(x: Tensor, buffers: Any = buffers, guards: Guards = guards) -> Any:
                    return self.suite.gemm(guards.around("x", x), buffers)

                checks.assert_within_bound(kernel, weight, self._random(M, weight), **self._summation())
                guards.assert_whole()

    def rows_do_not_mix(self) -> None:
        """A row of NaN leaves all others finite."""
        for _, weight, kernel in self._kernels("coded"):
            for M in [M for M in self._tokens() if M > 1][:4]:
                x = self._random(M, weight)
                x[M // 2] = float("nan")
                assert_nan_in_one_row(kernel(x), M // 2)

    def packing_leaves_the_weight_alone(self) -> None:
        """The weight is the same before and after packing, and two packings are equal."""
        for weight in self._weights("coded"):
            before = {name: tensor.clone() for name, tensor in weight.fields().items()}
            first, second = (list(tensors_in(self.suite.pack(weight))) for _ in range(2))
            for name, tensor in weight.fields().items():
                with checks.error_prefix(f"packing changes the weight's {name}: "):
                    checks.assert_same_bits(tensor, before[name])
            assert len(first) == len(second), "packed twice, there are other tensors"
            for one, other in zip(first, second, strict=True):
                with checks.error_prefix("packed twice, the buffers differ: "):
                    checks.assert_same_bits(other, one)

    def _weights(self, filling: str) -> tuple[Weight, ...]:
        try:
            return tuple(
                weight.to(self.device) for weight in load_shares(replace(self.case, M=1, rank=0), filling)
            )
        except (CutError, DivideError) as error:
            pytest.skip(f"the format has no such cut: {str(error).splitlines()[0]}")

    def _kernels(self, filling: str) -> Iterator[tuple[int, Weight, Callable[[Tensor], Any]]]:
        """Each supported rank, its share, and the kernel with its buffers."""
        for rank, weight in enumerate(self._weights(filling)):
            supported, _ = self.suite.can_implement(replace(self.case, rank=rank))
            if supported:
                yield rank, weight, partial(self._product, self.suite.pack(weight))

    def _product(self, buffers: Any, x: Tensor) -> Any:
        y = self.suite.gemm(x, buffers)
        assert isinstance(y, Tensor), f"gemm returned {type(y).__name__}, expected a tensor (M, N)"
        return y

    def _tokens(self) -> list[int]:
        """The supported numbers of tokens to try."""
        large = self.case.K * self.case.N * self.case.world > LARGE_LAYER
        tokens = around_borders(*self.suite.borders, most=33 if large and not self.suite.borders else 257)
        return [M for M in tokens if self.suite.can_implement(replace(self.case, M=M))[0]] or [1]

    def _summation(self) -> dict[str, Any]:
        """The arguments of `derived_bound`."""
        names = {name: getattr(self.suite, name) for name in ("accumulate", "partials", "scales")}
        dtypes = {name: value and getattr(torch, value) for name, value in names.items()}
        return {**dtypes, "split_k": self.suite.split_k}

    def _random(self, M: int, weight: Weight) -> Tensor:
        """Normal numbers, scaled down by a power of two if a sum of them exceeds the range of x's type."""
        K = weight.shape[1]
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(1000 * K + M))
        largest = float((x.abs() @ weight.dequantize().float().abs().cpu().T).max())
        excess = max(1.0, largest / torch.finfo(self.dtype).max * 2)
        scaled: Tensor = x / 2 ** ceil(log2(excess))
        return scaled.to(self.device, self.dtype)

    def _rank_words(self, rank: int) -> str:
        return "" if self.case.world == 1 else f", rank {rank} of {self.case.world}"


def assert_nan_in_one_row(y: Tensor, row: int) -> None:
    """Assert that `row` of y (M, N) is NaN and all others are finite."""
    M = y.shape[0]
    affected = [int(m) for m in (~y.isfinite()).any(1).nonzero().flatten() if int(m) != row]
    assert not affected, f"M = {M}: NaN in token {row} reaches token {affected[0]}"
    assert bool(y[row].isnan().all()), f"M = {M}: NaN in token {row} is lost"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors within a returned `value`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Weight):
        yield from value.fields().values()
    elif isinstance(value, dict):
        yield from (tensor for each in value.values() for tensor in tensors_in(each))
    elif isinstance(value, list | tuple):
        yield from (tensor for each in value for tensor in tensors_in(each))
