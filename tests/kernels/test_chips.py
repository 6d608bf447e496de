"""On which chips a CUDA module runs, by what it was built for."""

import pytest

from qload.devices.cuda import _runs_on


@pytest.mark.parametrize(
    ("chips", "later", "capability", "runs"),
    [
        ("80 86 89 90a", True, (8, 0), True),
        ("80 86 89 90a", True, (8, 7), True),  # code for 8.6 runs there
        ("80 86 89 90a", True, (9, 0), True),
        ("80 86 89 90a", True, (10, 0), True),  # from PTX
        ("80 86 89 90a", True, (7, 5), False),
        ("90a", False, (9, 0), True),
        ("90a", False, (10, 0), False),
        ("90a", False, (8, 0), False),
        ("86", False, (8, 0), False),
        ("80", False, (8, 9), True),
        ("80", False, (9, 0), False),
    ],
)
def test_a_module_runs_on_the_chips_that_it_was_built_for(
    chips: str, later: bool, capability: tuple[int, int], runs: bool
) -> None:
    assert _runs_on(chips, later, *capability) == runs
