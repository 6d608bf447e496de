"""The ids of cases are part of the interface: pinned for every format."""

from itertools import product

import pytest
from syrupy.assertion import SnapshotAssertion

from qload.conformance import cases
from qload.errors import ArgumentError
from qload.testing.traits import CONTRACTS


@pytest.mark.parametrize("format", CONTRACTS)
def test_ids_are_pinned(format: str, golden: SnapshotAssertion) -> None:
    assert "\n".join(case.id for case in cases(format)) == golden


@pytest.mark.parametrize("format", CONTRACTS)
def test_the_largest_tier_has_every_combination_once(format: str) -> None:
    allowed, listed = CONTRACTS[format], cases(format, "exhaustive", ("float16", "bfloat16"))
    axes = (allowed.bits, allowed.groups, allowed.symmetric, allowed.act_order, allowed.zeros)
    for bits, group, symmetric, act_order, zeros, variant in product(*axes, allowed.variants):
        found = {
            (case.dtype, case.K, case.N, case.world, case.split)
            for case in listed
            if (case.bits, case.group_size, case.symmetric) == (bits, group, symmetric)
            and (case.act_order, case.zeros, case.variant) == (act_order, zeros, variant)
        }
        whole = {
            (dtype, *size, 1, "")
            for dtype, size in product(("float16", "bfloat16"), ((256, 128), (512, 256), (384, 192)))
            if size[0] % allowed.inputs == 0
        }
        shares = {("float16", 512, 256, world, split) for world in (2, 4) for split in ("col", "row")}
        if zeros == "wrapping" and symmetric:  # a zero point of 0 is not the middle
            assert not found
        else:
            assert whole | shares <= found
    assert len({case.id for case in listed}) == len(listed)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^format\n  expected one of unquantized, gptq"):
        cases("aqlm")
    with pytest.raises(ArgumentError, match=r"^tier\n  expected one of smoke"):
        cases("gptq", "quick")
    with pytest.raises(ArgumentError, match="dtypes"):
        cases("gptq", "smoke", ())
