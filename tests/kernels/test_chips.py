"""On which chips a CUDA module runs, by its machine code and its PTX."""

import pytest

from qload.devices.cuda import _runs_on

DEFAULT = "80 86 89 90a 100 120"


@pytest.mark.parametrize(
    ("chips", "ptx", "capability", "runs"),
    [
        (DEFAULT, "80 90", (8, 0), True),
        (DEFAULT, "80 90", (8, 7), True),  # code for 8.6 runs there
        (DEFAULT, "80 90", (9, 0), True),
        (DEFAULT, "80 90", (10, 3), True),  # code for 10.0
        (DEFAULT, "80 90", (11, 0), True),  # PTX of 9.0
        (DEFAULT, "80 90", (12, 1), True),
        (DEFAULT, "80 90", (13, 0), True),  # PTX of 9.0
        (DEFAULT, "80 90", (7, 5), False),
        ("90a", "", (9, 0), True),
        ("90a", "", (9, 1), False),
        ("90a", "90", (9, 1), True),
        ("90a", "", (10, 0), False),
        ("90a", "", (8, 0), False),
        ("90a 100", "100", (9, 0), True),
        ("100", "100", (9, 0), False),  # PTX of a newer chip
        ("86", "", (8, 0), False),
        ("80", "", (8, 9), True),
        ("80", "", (9, 0), False),
        ("80", "80", (9, 0), True),
        ("86 120", "86", (11, 0), True),  # PTX for a chip between them
    ],
)
def test_a_module_runs_on_the_chips_of_its_code(
    chips: str, ptx: str, capability: tuple[int, int], runs: bool
) -> None:
    assert _runs_on(chips, ptx, *capability) == runs
