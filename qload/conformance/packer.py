"""`PackerSuite`: does a packer write codes, scales and zero points as the format stores them?"""

from abc import abstractmethod
from typing import Any

import pytest

from qload.conformance.case import ConformanceCase
from qload.conformance.suite import Judged, Suite


class PackerSuite(Suite):
    """Tests of what writes the tensors of a format: derive, and say how to call it.

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
        """Some or all tensors of a layer by field, such as `qweight`, made of plain `codes` of a `case`.

        `codes` has `codes` (N, K), integers from 0; `scales` and `zeros` (N, G), or None for no zero points;
        and `k_group` (K,), the group of each input, or None where there is one. Fields that are not returned
        are not judged.
        """

    def unpack(self, tensors: Any, case: ConformanceCase) -> Any:
        """The codes (N, K) of a layer's `tensors` by field, of a `case`; None: the subject only packs."""
        return None

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest) -> Judged:
        """The `case` on trial."""
        from qload.conformance.packer_trial import PackerTrial

        return Judged(self, case, request, lambda case, device: PackerTrial(self, case))

    def test_packs_to_the_bit(self, trial: Judged) -> None:
        """Every tensor that it returns is the one that the format's owner stores: `trial`."""
        trial.by("packs_to_the_bit")

    def test_unpacks_what_is_stored(self, trial: Judged) -> None:
        """What a file holds comes back as the codes that it means: `trial`."""
        trial.by("unpacks_what_is_stored")

    def test_the_codes_are_left_alone(self, trial: Judged) -> None:
        """Packing writes nothing into what it was given: `trial`."""
        trial.by("the_codes_are_left_alone")
