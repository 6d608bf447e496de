"""A diagnosis in a sentence."""

from torch import Tensor

from qload.diagnosis.case import Case
from qload.diagnosis.where import Where

# What a mistake usually comes from.
NOTES = {
    "zero-points-one-higher": "v2 read as v1",
    "zero-points-one-lower": "v1 read as v2",
    "zero-points-ignored": "read as symmetric",
}


def said(words: str, share: float, where: Where, everywhere: Where | None, fault: str = "") -> str:
    """A fault, how much it explains, and where it is if it is not wherever it could be, `everywhere`."""
    note = f" ({NOTES[fault]})" if fault in NOTES else ""
    shown = f"{100 * share:.1f}".removesuffix(".0")
    told = f"{words}{note}: explains {shown} % of {where.wrong} wrong numbers of {where.total}"
    wide = everywhere.bounds() if everywhere is not None else {}
    narrow = [
        _bound(name, bound) for name, bound in where.bounds().items() if not _covers(bound, wide.get(name))
    ]
    return f"{told}, at {', '.join(narrow)}" if narrow else told


def said_of_none(case: Case, wrong: Tensor, where: Where) -> str:
    """That no known fault explains what is wrong, where that is, and the first of it."""
    n, k = wrong.nonzero()[0].tolist()
    at = ", ".join(_bound(name, bound) for name, bound in where.bounds().items())
    return (
        f"a fault of no known class: {where.wrong} of {where.total} numbers are wrong, at {at}; the first at "
        f"(n, k) = ({n}, {k}): {case.got[n, k]:g}, expected {case.expected[n, k]:g}"
    )


def _covers(bound: tuple[int, int], wide: tuple[int, int] | None) -> bool:
    return wide is not None and bound[0] <= wide[0] and wide[1] <= bound[1]


def _bound(name: str, bound: tuple[int, int]) -> str:
    first, last = bound[0], bound[1] - 1
    return f"{name} {first} to {last}" if last > first else f"{name.removesuffix('s')} {first}"
