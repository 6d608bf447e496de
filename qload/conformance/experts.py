"""`ExpertsKernelSuite`: tests of fused kernels of gated experts."""

from abc import abstractmethod
from dataclasses import asdict
from typing import Any, ClassVar

import pytest

from qload.conformance.cases import MAIN, SMALL, ConformanceCase, check_tier
from qload.conformance.suite import CaseRun, Suite
from qload.testing.traits import contract


class ExpertsKernelSuite(Suite):
    """Tests of y = sum of w * down(act(gate(x)) * up(x)) over the experts of each token: derive from it.

    A case has K inputs of a token, and N between gate and down.

    Attributes
    ----------
    experts, chosen
        The number of experts, and the number that each token chooses.
    activation
        Between gate and up: "silu", "gelu" or "gelu_tanh".
    between
        The type, by name, of the rounding between gate and down; None: that of x on a GPU, float32 elsewhere.

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
        """Return the buffers for `gemm` from typed `experts`, a `qload.ExpertsWeight`."""

    @abstractmethod
    def gemm(self, x: Any, ids: Any, weights: Any, buffers: Any) -> Any:
        """Call the kernel: x (M, K), `ids` and `weights` (M, chosen), `buffers` of `pack` -> y (M, K)."""

    @classmethod
    def cases(cls, tier: str = "default") -> tuple[ConformanceCase, ...]:
        """Return the cases of a `tier`, smallest first."""
        check_tier(tier)
        sizes = [SMALL] if tier == "smoke" else [SMALL, MAIN]
        return tuple(
            ConformanceCase(**(asdict(traits) | {"dtype": dtype}), K=K, N=N, M=33)
            for K, N in sizes
            for dtype in cls.dtypes
            for traits in contract(cls.format).corners(cls.format)
        )

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest) -> CaseRun:
        """The run of the `case`."""
        from qload.conformance.expert_checks import ExpertChecks

        return CaseRun(self, case, request, lambda case, device: ExpertChecks(self, case, device))

    def test_each_expert_alone(self, trial: CaseRun) -> None:
        """Tokens of one expert, for each of them: `trial`."""
        trial.check("each_expert_alone")

    def test_stays_within_the_bound(self, trial: CaseRun) -> None:
        """Tokens of random experts have at most the error of rounding: `trial`."""
        trial.check("stays_within_the_bound")

    def test_rows_do_not_mix(self, trial: CaseRun) -> None:
        """A token of NaN affects no other: `trial`."""
        trial.check("rows_do_not_mix")

    def test_keeps_to_its_buffers(self, trial: CaseRun) -> None:
        """The kernel reads nothing beyond its buffers and inputs, and writes to none of them: `trial`."""
        trial.check("keeps_to_its_buffers")
