"""`LinearKernelSuite`: tests of products with quantized weights."""

from abc import abstractmethod
from typing import Any, ClassVar

import pytest

from qload.conformance.cases import ConformanceCase
from qload.conformance.suite import CaseRun, Suite


class LinearKernelSuite(Suite):
    """Tests of a kernel y = x @ w.T with a quantized weight w (N, K): derive, and define how to call it.

    Attributes
    ----------
    format, dtypes, threads
        As in `Suite`.
    accumulate, split_k, partials, scales
        How the kernel adds, as in `qload.testing.derived_bound`, with dtypes by name; None: it rounds no
        scales.
    borders
        Numbers of tokens at which it dispatches differently; () for those of known kernels.
    deterministic
        Whether it gives the same bits twice.

    Examples
    --------
    >>> from qload.conformance import LinearKernelSuite
    >>> class TestPlain(LinearKernelSuite):
    ...     format = "unquantized"
    ...     def pack(self, weight):
    ...         return weight.weight
    ...     def gemm(self, x, buffers):
    ...         return (x.float() @ buffers.float().T).to(x.dtype)
    >>> [case.id for case in TestPlain.cases("smoke")]
    ['unquantized.w16.k256n128']
    """

    accumulate: ClassVar[str] = "float32"
    split_k: ClassVar[int] = 1
    partials: ClassVar[str] = "float32"
    scales: ClassVar[str | None] = None
    borders: ClassVar[tuple[int, ...]] = ()
    deterministic: ClassVar[bool] = True

    @abstractmethod
    def pack(self, weight: Any) -> Any:
        """Return the buffers for `gemm` from a typed `weight` such as `qload.GPTQWeight`."""

    @abstractmethod
    def gemm(self, x: Any, buffers: Any) -> Any:
        """Call the kernel: x (M, K) and the `buffers` of `pack` -> y (M, N) in the dtype of x."""

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest) -> CaseRun:
        """The run of the `case`."""
        from qload.conformance.linear_checks import LinearChecks

        return CaseRun(self, case, request, lambda case, device: LinearChecks(self, case, device))

    def test_reads_back(self, trial: CaseRun) -> None:
        """One-hot inputs return the weight, to the bit: `trial`."""
        trial.check("reads_back")

    def test_sums_exactly(self, trial: CaseRun) -> None:
        """Small integers sum exactly, for numbers of tokens around every border: `trial`."""
        trial.check("sums_exactly")

    def test_stays_within_the_bound(self, trial: CaseRun) -> None:
        """Random numbers have at most the error of rounding: `trial`."""
        trial.check("stays_within_the_bound")

    def test_says_the_same_twice(self, trial: CaseRun) -> None:
        """Two calls give the same bits, independent of the memory of y: `trial`."""
        trial.check("says_the_same_twice")

    def test_keeps_to_its_buffers(self, trial: CaseRun) -> None:
        """The kernel reads nothing beyond its buffers and x, and writes to neither: `trial`."""
        trial.check("keeps_to_its_buffers")

    def test_rows_do_not_mix(self, trial: CaseRun) -> None:
        """A token of NaN affects no other: `trial`."""
        trial.check("rows_do_not_mix")

    def test_packing_leaves_the_weight_alone(self, trial: CaseRun) -> None:
        """Packing does not write to the weight, and is the same each time: `trial`."""
        trial.check("packing_leaves_the_weight_alone")
