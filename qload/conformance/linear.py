"""`LinearKernelSuite`: is a kernel that multiplies by quantized weights right?"""

from abc import abstractmethod
from typing import Any, ClassVar

import pytest

from qload.conformance.case import ConformanceCase
from qload.conformance.suite import Judged, Suite


class LinearKernelSuite(Suite):
    """Tests of a kernel y = x @ w.T, where w (N, K) is a quantized weight: derive, and say how to call it.

    Attributes
    ----------
    format, dtypes, threads
        As `Suite` has them.
    accumulate, split_k, partials, scales
        How the kernel adds, as `qload.testing.derived_bound` has them, dtypes by name; None: it rounds no
        scales.
    borders
        Numbers of tokens at which it takes another way; () for those where the kernels that we know do.
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
        """What `gemm` takes, made of a typed `weight` such as `qload.GPTQWeight`."""

    @abstractmethod
    def gemm(self, x: Any, buffers: Any) -> Any:
        """Call the kernel: x (M, K) by what `pack` returned, `buffers` -> y (M, N) in the dtype of x."""

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest) -> Judged:
        """The `case` on trial."""
        from qload.conformance.linear_trial import LinearTrial

        return Judged(self, case, request, lambda case, device: LinearTrial(self, case, device))

    def test_reads_back(self, trial: Judged) -> None:
        """One input at a time, the kernel returns the weight that it was given, to the bit: `trial`."""
        trial.by("reads_back")

    def test_sums_exactly(self, trial: Judged) -> None:
        """Small integers sum exactly, for numbers of tokens around every border: `trial`."""
        trial.by("sums_exactly")

    def test_stays_within_the_bound(self, trial: Judged) -> None:
        """Random numbers come out as far off as rounding can cost, and not more: `trial`."""
        trial.by("stays_within_the_bound")

    def test_says_the_same_twice(self, trial: Judged) -> None:
        """Two calls give the same bits, whatever the memory of y held before: `trial`."""
        trial.by("says_the_same_twice")

    def test_keeps_to_its_buffers(self, trial: Judged) -> None:
        """It reads nothing beyond its buffers and x, and writes to none of them: `trial`."""
        trial.by("keeps_to_its_buffers")

    def test_rows_do_not_mix(self, trial: Judged) -> None:
        """A token that is NaN spoils no other: `trial`."""
        trial.by("rows_do_not_mix")

    def test_packing_leaves_the_weight_alone(self, trial: Judged) -> None:
        """Packing writes nothing into the weight, and the same weight packs the same way: `trial`."""
        trial.by("packing_leaves_the_weight_alone")
