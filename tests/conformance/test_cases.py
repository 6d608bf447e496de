"""The ids of cases are part of the interface: pinned for every format."""

import pytest
from syrupy.assertion import SnapshotAssertion

from qload.conformance import cases
from qload.errors import ArgumentError
from qload.testing.traits import CONTRACTS


@pytest.mark.parametrize("format", CONTRACTS)
def test_ids_are_pinned(format: str, golden: SnapshotAssertion) -> None:
    assert "\n".join(case.id for case in cases(format)) == golden


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^format\n  expected one of unquantized, gptq"):
        cases("gguf")
    with pytest.raises(ArgumentError, match=r"^tier\n  expected one of smoke"):
        cases("gptq", "quick")
    with pytest.raises(ArgumentError, match="dtypes"):
        cases("gptq", "smoke", ())
