"""The checks of `ExpertsKernelSuite`: a kernel against the exact sum and its bound."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor

from qload.conformance.cases import ConformanceCase
from qload.conformance.linear_checks import assert_nan_in_one_row
from qload.diagnosis.diagnosis import MIN_SHARE
from qload.experts import ExpertFacts, ExpertsWeight, GatedActivation
from qload.kernels import bounds
from qload.kernels.bounds import Bounded, excess
from qload.storage import MemoryStorage
from qload.testing.checks import Guards, error_prefix
from qload.testing.layer_factory import layer_of
from qload.weights import Weights

PREFIX = "experts"
TOKENS = (1, 2, 8, 17, 33)
DRAWS = 4  # random inputs that a known mistake has to explain

Inputs = tuple[Tensor, Tensor, Tensor]  # x, ids, weights
InputSampler = Callable[[int], Inputs]  # by the number of a draw


@lru_cache(maxsize=32)
def load_experts(case: ConformanceCase, count: int, activation: str) -> ExpertsWeight:
    """Return `count` experts of a `case`, each with other numbers."""
    sizes = {"gate_proj": (case.N, case.K), "up_proj": (case.N, case.K), "down_proj": (case.K, case.N)}
    layers = {
        f"{PREFIX}.{expert}.{name}": layer_of(case.traits, *size, filling="noise", seed=3 * expert + at)
        for expert in range(count)
        for at, (name, size) in enumerate(sizes.items())
    }
    for name, layer in layers.items():
        if name.endswith("up_proj"):  # a fused gate and up share their groups
            gate = layers[name.replace("up_proj", "gate_proj")].tensors
            layer.tensors.update({key: gate[key] for key in ("g_idx", "weight_g_idx") if key in gate})
    tensors = {key: tensor for name, layer in layers.items() for key, tensor in layer.named(name).items()}
    weights = Weights(MemoryStorage(tensors), loader=next(iter(layers.values())).loader())
    kind: Any = activation
    return weights.get_experts(PREFIX, facts=ExpertFacts(GatedActivation(kind)))


class ExpertChecks:
    """The checks of a kernel for one case: `suite`, an `ExpertsKernelSuite`; `case`; `device` of tensors."""

    def __init__(self, suite: Any, case: ConformanceCase, device: str) -> None:
        self.suite, self.case, self.device = suite, case, torch.device(device)
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        experts = load_experts(replace(case, M=1), suite.experts, suite.activation)
        self.experts = experts if self.device.type == "cpu" else experts.to(device)

    def each_expert_alone(self) -> dict[str, Any]:
        """Three tokens of each expert are within the bound."""
        buffers, largest = self.suite.pack(self.experts), 0.0
        for expert in range(self.suite.experts):
            ids = torch.full((3, 1), expert, device=self.device)
            ones = torch.ones(3, 1, device=self.device)
            with error_prefix(f"expert {expert}: "):
                largest = max(largest, self._check_bound(partial(self._inputs_of, ids, ones), buffers))
        return {"error of bound": largest}

    def stays_within_the_bound(self) -> dict[str, Any]:
        """Tokens of random experts are within the bound, for several numbers of tokens."""
        buffers, largest = self.suite.pack(self.experts), 0.0
        for M in self._tokens():
            with error_prefix(f"M = {M}: "):
                largest = max(largest, self._check_bound(partial(self._routed_inputs, M), buffers))
        return {"error of bound": largest}

    def rows_do_not_mix(self) -> None:
        """A token of NaN leaves all others finite."""
        buffers = self.suite.pack(self.experts)
        for M in (M for M in self._tokens() if M > 1):
            x = self._x(M)
            x[M // 2] = float("nan")
            assert_nan_in_one_row(self.suite.gemm(x, *self._routes(M), buffers), M // 2)

    def keeps_to_its_buffers(self) -> None:
        """Poison around buffers, tokens, ids and routing weights is neither read nor written."""
        for M in self._tokens()[:2]:
            guards = Guards()
            buffers = guards.around("buffers", self.suite.pack(self.experts))
            ids, weights = self._routes(M)
            x, ids = guards.around("x", self._x(M)), guards.around("ids", ids)
            inputs = x, ids, guards.around("weights", weights)
            self._check_bound(partial(fixed_inputs, inputs), buffers)
            guards.assert_whole()

    def _check_bound(self, sampler: InputSampler, buffers: Any) -> float:
        """Check the result for the first inputs, and return its largest error in units of the bound."""
        inputs = sampler(0)
        want = self._exact(*inputs)  # before a kernel can write to its inputs
        y = self.suite.gemm(*inputs, buffers)
        assert isinstance(y, Tensor), f"gemm returned {type(y).__name__}, expected a tensor (M, K)"
        assert tuple(y.shape) == tuple(want.value.shape), (
            f"y is {tuple(y.shape)}, expected {tuple(want.value.shape)}"
        )
        off = excess(y, want)
        wrong = (~(off <= 1)).nonzero()
        if wrong.numel():
            m, k = wrong[0].tolist()
            raise AssertionError(
                f"y[{m}, {k}] is {off[m, k]:g} times as far off as rounding can cost; {wrong.shape[0]} of "
                f"{off.numel()} are\n  cause     {self._cause(y, want, sampler, buffers)}"
            )
        return float(off.max())

    def _exact(self, x: Tensor, ids: Tensor, weights: Tensor) -> Bounded:
        between = self.suite.between and getattr(torch, self.suite.between)
        return bounds.of_experts(
            x, ids, weights, self.experts, "unquantized", between=between, dequantized=self.dtype
        )

    def _cause(self, y: Tensor, want: Bounded, sampler: InputSampler, buffers: Any) -> str:
        """Describe the known mistake that explains the results for all random inputs, or "no known one".

        One input is not enough: within a wide bound, another mistake may explain a few tokens too.
        """
        results = [(sampler(0), want, y)]
        for draw in range(1, DRAWS):
            inputs = sampler(draw)
            exact = self._exact(*inputs)
            results.append((inputs, exact, self.suite.gemm(*inputs, buffers)))
        for mistakes in zip(*(self._mistakes(*inputs) for inputs, _, _ in results), strict=True):
            share = 1.0
            for (_, mistaken), (_, exact, got) in zip(mistakes, results, strict=True):
                if share >= MIN_SHARE:
                    explained = explained_share(got, exact, mistaken)
                    share = share if share <= explained else explained  # also if NaN in y makes it NaN
            if share >= MIN_SHARE:
                return f"{mistakes[0][0]}: explains {100 * share:.1f} %"
        return "no known one"

    def _mistakes(
        self, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Descriptions of known mistakes, and their results."""
        E = self.suite.experts
        yield "gate and up are swapped", lambda: self._swapped(x, ids, weights)
        one = int(ids[0, 0]) if bool((ids == ids[0, 0]).all()) else None
        for step in range(1, E):
            words = f"every token goes to expert e + {step}"
            if one is not None:
                words = f"tokens of expert {one} go to expert {(one + step) % E}"
            yield words, partial(self._value, x, (ids + step) % E, weights)
        ones = torch.ones_like(weights)
        yield "the routing weights are left out", lambda: self._exact(x, ids, ones).value
        yield "the routing weights are applied twice", lambda: self._exact(x, ids, weights**2).value
        first = ids[:, :1], weights[:, :1]
        yield "only the first expert of each token counts", lambda: self._exact(x, *first).value

    def _value(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._exact(x, ids, weights).value

    def _swapped(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The result with gate and up exchanged, computed in float64 without typed experts."""
        functional = torch.nn.functional
        tanh = partial(functional.gelu, approximate="tanh")
        name = self.suite.activation
        function: Callable[[Tensor], Tensor] = tanh if name == "gelu_tanh" else getattr(functional, name)
        y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for token, slot in ((m, s) for m in range(x.shape[0]) for s in range(ids.shape[1])):
            gate_up, down = self.experts.dequantize(int(ids[token, slot]))
            up, gate = (gate_up.to(x.dtype).double() @ x[token].double()).chunk(2)
            inner = function(gate) * up
            y[token] += float(weights[token, slot]) * (down.to(x.dtype).double() @ inner)
        return y

    def _tokens(self) -> list[int]:
        return [M for M in TOKENS if self.suite.can_implement(replace(self.case, M=M))[0]] or [1]

    def _inputs_of(self, ids: Tensor, weights: Tensor, draw: int) -> Inputs:
        """Random tokens with given experts."""
        return self._x(len(ids), draw), ids, weights

    def _routed_inputs(self, M: int, draw: int) -> Inputs:
        """Random tokens with random experts."""
        return self._x(M, draw), *self._routes(M, draw)

    def _x(self, M: int, draw: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(M + 1000 * draw)
        x = torch.randn(M, self.case.K, generator=generator) / self._divisor
        return x.to(self.device, self.dtype)

    @cached_property
    def _divisor(self) -> float:
        """The power of two by which normal numbers are divided to stay in the range of x's type."""
        matrices = [self.experts.dequantize(e) for e in range(self.suite.experts)]
        gate = max(float(gate_up.square().sum(1).max()) for gate_up, _ in matrices) ** 0.5
        down = max(float(down.square().sum(1).max()) for _, down in matrices) ** 0.5
        excess = max(1.0, (4 * gate) ** 2 * 4 * down / torch.finfo(self.dtype).max)
        return 2.0 ** ceil(log2(excess) / 2)

    def _routes(self, M: int, draw: int = 0) -> tuple[Tensor, Tensor]:
        """Random distinct experts of each token, and weights whose sum is not 1."""
        generator = torch.Generator().manual_seed(M + 1000 * draw)
        scores = torch.rand(M, self.suite.experts, generator=generator)
        weights, ids = scores.topk(self.suite.chosen)
        return ids.to(self.device), weights.to(self.device)


def fixed_inputs(inputs: Inputs, draw: int) -> Inputs:
    """Return the same `inputs` for every `draw`."""
    return inputs


def explained_share(y: Tensor, want: Bounded, mistaken: Callable[[], Tensor]) -> float:
    """Return the share of the errors of `y` that a mistake explains; `mistaken`: its result.

    It is the least of three: of all numbers, of the wrong ones, and of the squared error.
    """
    wrong = ~(excess(y, want) <= 1)
    if not bool(wrong.any()):
        return 1.0
    left = y.double() - mistaken()
    close = (left.abs() <= want.rounded_to(y.dtype).error).double()
    error = (y.double() - want.value).square().sum()
    return min(1 - float(left.square().sum() / error), float(close.mean()), float(close[wrong].mean()))
