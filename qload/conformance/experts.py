"""`ExpertsKernelSuite`: does a kernel of gated experts send each token through the experts that it chose?"""

from abc import abstractmethod
from dataclasses import asdict
from typing import Any, ClassVar

import pytest

from qload.conformance.case import ConformanceCase
from qload.conformance.cases import MAIN, SMALL, TIERS
from qload.conformance.suite import Judged, Suite
from qload.errors import ArgumentError
from qload.testing.traits import contract


class ExpertsKernelSuite(Suite):
    """Tests of y = sum of w * down(act(gate(x)) * up(x)) over the experts of each token: derive from it.

    A case has K inputs of a token, and N between gate and down.

    Attributes
    ----------
    experts, chosen
        How many experts there are, and how many each token chooses.
    activation
        Between gate and up: "silu", "gelu" or "gelu_tanh".
    between
        The type, by name, that is rounded to between gate and down; None: x's on a GPU, float32 elsewhere.

    Examples
    --------
    >>> from qload.conformance import ExpertsKernelSuite
    >>> class TestMine(ExpertsKernelSuite):
    ...     format = "gptq"
    ...     def pack(self, experts):
    ...         return my_repack(experts.gate_up, experts.down)  # doctest: +SKIP
    ...     def gemm(self, x, ids, weights, buffers):
    ...         return my_fused_moe(x, *buffers, weights, ids)  # doctest: +SKIP
    """

    experts: ClassVar[int] = 4
    chosen: ClassVar[int] = 2
    activation: ClassVar[Any] = "silu"
    between: ClassVar[str | None] = None

    @abstractmethod
    def pack(self, experts: Any) -> Any:
        """What the kernel reads, made of typed `experts`, a `qload.ExpertsWeight`."""

    @abstractmethod
    def gemm(self, x: Any, ids: Any, weights: Any, buffers: Any) -> Any:
        """Call the kernel: x (M, K), `ids` and `weights` (M, chosen), `buffers` of `pack` -> y (M, K)."""

    @classmethod
    def cases(cls, tier: str = "default") -> tuple[ConformanceCase, ...]:
        """The cases of a `tier`, smallest first."""
        if tier not in TIERS:
            raise ArgumentError("tier", f"one of {', '.join(TIERS)}", repr(tier))
        sizes = [SMALL] if tier == "smoke" else [SMALL, MAIN]
        return tuple(
            ConformanceCase(**(asdict(traits) | {"dtype": dtype}), K=K, N=N, M=33)
            for K, N in sizes
            for dtype in cls.dtypes
            for traits in contract(cls.format).corners(cls.format)
        )

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest) -> Judged:
        """The `case` on trial."""
        from qload.conformance.experts_trial import ExpertsTrial

        return Judged(self, case, request, lambda case, device: ExpertsTrial(self, case, device))

    def test_each_expert_alone(self, trial: Judged) -> None:
        """Tokens that all choose one expert, for each of them: `trial`."""
        trial.by("each_expert_alone")

    def test_stays_within_the_bound(self, trial: Judged) -> None:
        """Tokens that choose at random are as far off as rounding can cost, and not more: `trial`."""
        trial.by("stays_within_the_bound")

    def test_rows_do_not_mix(self, trial: Judged) -> None:
        """A token that is NaN spoils no other: `trial`."""
        trial.by("rows_do_not_mix")

    def test_keeps_to_its_buffers(self, trial: Judged) -> None:
        """It reads nothing beyond its buffers and inputs, and writes to none of them: `trial`."""
        trial.by("keeps_to_its_buffers")
