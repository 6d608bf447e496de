"""The checks of `ExpertsKernelSuite`: a kernel beside the exact sum and its bound."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor

from qload.conformance.case import ConformanceCase
from qload.conformance.prefixed import prefixed
from qload.diagnosis.diagnosis import MIN_SHARE
from qload.experts import ExpertFacts, ExpertsWeight, GatedActivation
from qload.kernels import gated_bounds
from qload.kernels.bounds import Bounded, excess
from qload.storage import MemoryStorage
from qload.testing.guards import Guards
from qload.testing.layers_of import layer_of
from qload.weights import Weights

PREFIX = "experts"
TOKENS = (1, 2, 8, 17, 33)
DRAWS = 4  # how often tokens are drawn until a mistake is believed

Given = tuple[Tensor, Tensor, Tensor]  # x, ids, weights
Drawn = Callable[[int], Given]  # for each number of a draw


@lru_cache(maxsize=32)
def experts_of(case: ConformanceCase, count: int, activation: str) -> ExpertsWeight:
    """So many experts of a `case`, each of other numbers."""
    sizes = {"gate_proj": (case.N, case.K), "up_proj": (case.N, case.K), "down_proj": (case.K, case.N)}
    drawn = {
        f"{PREFIX}.{expert}.{name}": layer_of(case.traits, *size, filling="noise", seed=3 * expert + at)
        for expert in range(count)
        for at, (name, size) in enumerate(sizes.items())
    }
    for name, layer in drawn.items():
        if name.endswith("up_proj"):  # of a fused gate and up all groups lie alike
            gate = drawn[name.replace("up_proj", "gate_proj")].tensors
            layer.tensors.update({key: gate[key] for key in ("g_idx", "weight_g_idx") if key in gate})
    tensors = {key: tensor for name, layer in drawn.items() for key, tensor in layer.named(name).items()}
    weights = Weights(MemoryStorage(tensors), loader=next(iter(drawn.values())).loader())
    kind: Any = activation
    return weights.get_experts(PREFIX, facts=ExpertFacts(GatedActivation(kind)))


class ExpertsTrial:
    """A kernel and one case: `suite`, an `ExpertsKernelSuite`; `case`; `device`, where tensors lie."""

    def __init__(self, suite: Any, case: ConformanceCase, device: str) -> None:
        self.suite, self.case, self.device = suite, case, torch.device(device)
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        held = experts_of(replace(case, M=1), suite.experts, suite.activation)
        self.experts = held if self.device.type == "cpu" else held.to(device)

    def each_expert_alone(self) -> dict[str, Any]:
        """Three tokens through each."""
        buffers, most = self.suite.pack(self.experts), 0.0
        for expert in range(self.suite.experts):
            ids = torch.full((3, 1), expert, device=self.device)
            ones = torch.ones(3, 1, device=self.device)
            with prefixed(f"expert {expert}: "):
                most = max(most, self._within(partial(self._through, ids, ones), buffers))
        return {"error of bound": most}

    def stays_within_the_bound(self) -> dict[str, Any]:
        """Several numbers of tokens."""
        buffers, most = self.suite.pack(self.experts), 0.0
        for M in self._tokens():
            with prefixed(f"M = {M}: "):
                most = max(most, self._within(partial(self._routed, M), buffers))
        return {"error of bound": most}

    def rows_do_not_mix(self) -> None:
        """NaN in one token."""
        buffers = self.suite.pack(self.experts)
        for M in (M for M in self._tokens() if M > 1):
            x = self._x(M)
            x[M // 2] = float("nan")
            y = self.suite.gemm(x, *self._routes(M), buffers)
            spoiled = [int(m) for m in (~y.isfinite()).any(1).nonzero().flatten() if int(m) != M // 2]
            assert not spoiled, f"M = {M}: NaN in token {M // 2} reaches token {spoiled[0]}"
            assert bool(y[M // 2].isnan().all()), f"M = {M}: NaN in token {M // 2} is lost"

    def keeps_to_its_buffers(self) -> None:
        """Poison around buffers, tokens and what the router says."""
        for M in self._tokens()[:2]:
            guards = Guards()
            buffers = guards.around("buffers", self.suite.pack(self.experts))
            ids, weights = self._routes(M)
            x, ids = guards.around("x", self._x(M)), guards.around("ids", ids)
            given = x, ids, guards.around("weights", weights)
            self._within(partial(always, given), buffers)
            guards.assert_whole()

    def _within(self, drawn: Drawn, buffers: Any) -> float:
        __tracebackhide__ = True
        given = drawn(0)
        want = self._exact(*given)  # before the kernel may write into what it is given
        y = self.suite.gemm(*given, buffers)
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
                f"{off.numel()} are\n  cause     {self._cause(y, want, drawn, buffers)}"
            )
        return float(off.max())

    def _exact(self, x: Tensor, ids: Tensor, weights: Tensor) -> Bounded:
        between = self.suite.between and getattr(torch, self.suite.between)
        return gated_bounds.of_experts(
            x, ids, weights, self.experts, "unquantized", between=between, dequantized=self.dtype
        )

    def _cause(self, y: Tensor, want: Bounded, drawn: Drawn, buffers: Any) -> str:
        """The known mistake that gives all numbers, and the wrong ones, also of tokens that are drawn anew.

        A bound may be so wide that of a few tokens some other mistake gives them too.
        """
        seen = [(drawn(0), want, y)]
        for draw in range(1, DRAWS):
            given = drawn(draw)
            exact = self._exact(*given)
            seen.append((given, exact, self.suite.gemm(*given, buffers)))
        for tried in zip(*(self._mistakes(*given) for given, _, _ in seen), strict=True):
            share = 1.0
            for (_, made), (_, exact, got) in zip(tried, seen, strict=True):
                if share >= MIN_SHARE:  # else no other draw need be looked at
                    told = share_told(got, exact, made)
                    share = share if share <= told else told  # NaN, where y has one, explains nothing
            if share >= MIN_SHARE:
                return f"{tried[0][0]}: explains {100 * share:.1f} %"
        return "no known one"

    def _mistakes(
        self, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        E = self.suite.experts
        yield "gate and up are swapped", lambda: self._swapped(x, ids, weights)
        one = int(ids[0, 0]) if bool((ids == ids[0, 0]).all()) else None
        for step in range(1, E):
            where = f"every token goes to expert e + {step}"
            if one is not None:
                where = f"tokens of expert {one} go to expert {(one + step) % E}"
            yield where, partial(self._value, x, (ids + step) % E, weights)
        ones = torch.ones_like(weights)
        yield "the routing weights are left out", lambda: self._exact(x, ids, ones).value
        yield "the routing weights are applied twice", lambda: self._exact(x, ids, weights**2).value
        first = ids[:, :1], weights[:, :1]
        yield "only the first expert of each token counts", lambda: self._exact(x, *first).value

    def _value(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._exact(x, ids, weights).value

    def _swapped(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """By hand, in float64, as no typed experts have their parts the other way round."""
        functional = torch.nn.functional
        tanh = partial(functional.gelu, approximate="tanh")
        named = self.suite.activation
        function: Callable[[Tensor], Tensor] = tanh if named == "gelu_tanh" else getattr(functional, named)
        y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for token, slot in ((m, s) for m in range(x.shape[0]) for s in range(ids.shape[1])):
            gate_up, down = self.experts.dequantize(int(ids[token, slot]))
            up, gate = (gate_up.to(x.dtype).double() @ x[token].double()).chunk(2)
            inner = function(gate) * up
            y[token] += float(weights[token, slot]) * (down.to(x.dtype).double() @ inner)
        return y

    def _tokens(self) -> list[int]:
        return [M for M in TOKENS if self.suite.can_implement(replace(self.case, M=M))[0]] or [1]

    def _through(self, ids: Tensor, weights: Tensor, draw: int) -> Given:
        """Tokens of one choice of experts."""
        return self._x(len(ids), draw), ids, weights

    def _routed(self, M: int, draw: int) -> Given:
        """Tokens that choose at random."""
        return self._x(M, draw), *self._routes(M, draw)

    def _x(self, M: int, draw: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(M + 1000 * draw)
        x = torch.randn(M, self.case.K, generator=generator) / self._small
        return x.to(self.device, self.dtype)

    @cached_property
    def _small(self) -> float:
        """What normal numbers are divided by so that nothing leaves the range of x's type."""
        matrices = [self.experts.dequantize(e) for e in range(self.suite.experts)]
        gate = max(float(gate_up.square().sum(1).max()) for gate_up, _ in matrices) ** 0.5
        down = max(float(down.square().sum(1).max()) for _, down in matrices) ** 0.5
        most = max(1.0, (4 * gate) ** 2 * 4 * down / torch.finfo(self.dtype).max)
        return 2.0 ** ceil(log2(most) / 2)

    def _routes(self, M: int, draw: int = 0) -> tuple[Tensor, Tensor]:
        """Different experts for each token, and weights that do not sum to a round number."""
        generator = torch.Generator().manual_seed(M + 1000 * draw)
        scores = torch.rand(M, self.suite.experts, generator=generator)
        weights, ids = scores.topk(self.suite.chosen)
        return ids.to(self.device), weights.to(self.device)


def always(given: Given, draw: int) -> Given:
    """The same tokens, whatever the number of a draw."""
    return given


def share_told(y: Tensor, want: Bounded, made: Callable[[], Tensor]) -> float:
    """How much a mistake tells of what is wrong with `y`: of all numbers, the wrong ones, and the error."""
    wrong = ~(excess(y, want) <= 1)
    if not bool(wrong.any()):
        return 1.0
    left = y.double() - made()
    close = (left.abs() <= want.rounded_to(y.dtype).error).double()
    error = (y.double() - want.value).square().sum()
    return min(1 - float(left.square().sum() / error), float(close.mean()), float(close[wrong].mean()))
