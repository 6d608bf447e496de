"""Mistakes in zero points: off by one, none, another group's."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from qload.diagnosis.misreading import Misreading, clamped, neighbours, rolled, with_zeros
from qload.spec import Codes


def off_by_one(codes: Codes) -> Iterator[Misreading]:
    """In the other convention: stored as they are, or minus one."""
    if codes.zeros is not None:
        yield with_zeros(
            codes, "zero-points-one-lower", "zero points one lower", lambda zeros: zeros.int() - 1
        )
        yield with_zeros(
            codes, "zero-points-one-higher", "zero points one higher", lambda zeros: zeros.int() + 1
        )


def others(codes: Codes) -> Iterator[Misreading]:
    """All other mistakes in zero points."""
    if codes.zeros is None:
        return
    wrap, middle = 2**codes.bits, 2 ** (codes.bits - 1)
    changes: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("zero-points-one-lower", "zero points one lower, wrapped", lambda z: (z.int() - 1) % wrap),
        ("zero-points-one-higher", "zero points one higher, wrapped", lambda z: (z.int() + 1) % wrap),
        ("zero-points-wrapped", "zero points of 0 that are not wrapped", lambda z: z.int() + wrap * (z == 0)),
        ("zero-points-wrapped", "zero points wrapped", lambda z: z.int() % wrap),
        ("zero-points-missing", "no zero points", torch.zeros_like),
        ("zero-points-twice", "zero points subtracted twice", lambda z: 2 * z.int()),
        ("zero-points-added", "zero points added", lambda z: -z.int()),
        ("zero-points-ignored", f"{middle} for every zero point", lambda z: torch.full_like(z, middle)),
        (
            "zero-points-ignored",
            f"{middle - 1} for every zero point",
            lambda z: torch.full_like(z, middle - 1),
        ),
    )
    yield from (with_zeros(codes, *change) for change in changes)
    for axis, one in ((1, "group"), (0, "output")):
        for which, step in neighbours(codes.zeros.shape[axis]):
            fault, words = f"zero-points-of-another-{one}", f"zero points of the {one} {which}"
            yield with_zeros(codes, fault, words, partial(rolled, axis=axis, step=step))
            yield with_zeros(codes, fault, words, partial(clamped, axis=axis, step=step))
