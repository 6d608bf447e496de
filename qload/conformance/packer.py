"""`PackerSuite`: tests of packers of codes, scales and zero points."""

from abc import abstractmethod
from typing import Any

import pytest

from qload.conformance.cases import ConformanceCase
from qload.conformance.suite import CaseRun, Suite


class PackerSuite(Suite):
    """Tests of a writer of the tensors of a format: derive, and define how to call it.

    Examples
    --------
    >>> from qload.conformance import PackerSuite
    >>> class TestMine(PackerSuite):
    ...     format = "gptq"
    ...     def pack(self, codes, case):
    ...         return {"qweight": my_pack(codes.codes, case.bits)}  # doctest: +SKIP
    """

    @abstractmethod
    def pack(self, codes: Any, case: ConformanceCase) -> Any:
        """Return some or all tensors of a layer by field, such as `qweight`, from plain `codes` of a `case`.

        `codes` has `codes` (N, K), integers from 0; `scales` and `zeros` (N, G), or None for no zero points;
        and `k_group` (K,), the group of each input, or None for a single group. Other fields are not checked.
        """

    def unpack(self, tensors: Any, case: ConformanceCase) -> Any:
        """Return the codes (N, K) of a layer's `tensors` by field, of a `case`; None if it only packs."""
        return None

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest) -> CaseRun:
        """The run of the `case`."""
        from qload.conformance.packer_checks import PackerChecks

        return CaseRun(self, case, request, lambda case, device: PackerChecks(self, case))

    def test_packs_to_the_bit(self, trial: CaseRun) -> None:
        """Every returned tensor equals that of the format's owner: `trial`."""
        trial.check("packs_to_the_bit")

    def test_unpacks_what_is_stored(self, trial: CaseRun) -> None:
        """Stored tensors are unpacked to their codes: `trial`."""
        trial.check("unpacks_what_is_stored")

    def test_the_codes_are_left_alone(self, trial: CaseRun) -> None:
        """Packing does not write to its arguments: `trial`."""
        trial.check("the_codes_are_left_alone")
