"""Which cases there are: of each format the common layer, its odd corners one at a time, and some in pairs.

A tier holds all cases of those before it. Nothing here is random, and torch is not imported.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product

from qload.conformance.case import ConformanceCase
from qload.errors import ArgumentError
from qload.testing.traits import Contract, Traits, contract

TIERS = ("smoke", "default", "gpu", "exhaustive")
SMALL, MAIN = (256, 128), (512, 256)  # (K, N)
ODD, DEEP = (384, 192), (2048, 64)  # whole granules that are no powers of two; more groups than outputs need
LARGE = ((4096, 512), (2048, 1536))


def cases(
    format: str, tier: str = "default", dtypes: tuple[str, ...] = ("float16",)
) -> tuple[ConformanceCase, ...]:
    """The cases of a `format` in a `tier`, smallest first, with activations of these `dtypes`.

    `tier`: "smoke", "default", "gpu" or "exhaustive". ArgumentError for a format or a tier that is not there.
    """
    if tier not in TIERS:
        raise ArgumentError("tier", f"one of {', '.join(TIERS)}", repr(tier))
    if not dtypes:
        raise ArgumentError("dtypes", "at least one, such as ('float16',)", "none")
    allowed, found = contract(format), []
    for name in TIERS[: TIERS.index(tier) + 1]:
        found += [*_TIERS[name](allowed, format, dtypes)]
    return tuple({case.id: case for case in found}.values())


def _of(
    traits: Traits, dtype: str, size: tuple[int, int], world: int = 1, split: str = ""
) -> ConformanceCase:
    said = asdict(traits) | {"dtype": dtype}
    return ConformanceCase(**said, K=size[0], N=size[1], M=257, world=world, split=split)


def _smoke(allowed: Contract, format: str, dtypes: tuple[str, ...]) -> Iterator[ConformanceCase]:
    for traits in allowed.corners(format):
        yield _of(traits, dtypes[0], SMALL)


def _default(allowed: Contract, format: str, dtypes: tuple[str, ...]) -> Iterator[ConformanceCase]:
    own = allowed.common(format)
    for traits in (*allowed.corners(format)[1:], *_pairs(allowed, own)):
        yield _of(traits, dtypes[0], MAIN)
    for dtype, size in product(dtypes, (MAIN, ODD, DEEP)):
        yield _of(own, dtype, size)
    orders = [replace(own, act_order=order) for order in allowed.act_order]
    for traits, split in product(orders, ("col", "row")):
        yield _of(traits, dtypes[0], MAIN, 2, split)


def _pairs(allowed: Contract, own: Traits) -> Iterator[Traits]:
    """Zero points and act order at once, which meet in one index; and each with groups of another size."""
    odd = allowed.groups[1:2]
    for symmetric, order, zeros in product(allowed.symmetric, allowed.act_order, allowed.zeros):
        if symmetric and zeros == "wrapping":
            continue
        yield replace(own, symmetric=symmetric, act_order=order, zeros=zeros)
        for group in odd:
            yield replace(own, symmetric=symmetric, act_order=order, zeros=zeros, group_size=group)


def _gpu(allowed: Contract, format: str, dtypes: tuple[str, ...]) -> Iterator[ConformanceCase]:
    for traits, dtype, size in product(allowed.corners(format), dtypes, LARGE):
        yield _of(traits, dtype, size)
    for split in ("col", "row"):
        yield _of(allowed.common(format), dtypes[0], LARGE[1], 4, split)


def _exhaustive(allowed: Contract, format: str, dtypes: tuple[str, ...]) -> Iterator[ConformanceCase]:
    every = (allowed.bits, allowed.groups, allowed.symmetric, allowed.act_order, allowed.zeros)
    for bits, group, symmetric, order, zeros, variant in product(*every, allowed.variants):
        if symmetric and zeros == "wrapping":
            continue
        traits = Traits(format, bits, group, symmetric, order, zeros, variant)
        for dtype, size in product(dtypes, (SMALL, MAIN, ODD)):
            yield _of(traits, dtype, size)
        for world, split in product((2, 4), ("col", "row")):
            yield _of(traits, dtypes[0], MAIN, world, split)


_TIERS = {"smoke": _smoke, "default": _default, "gpu": _gpu, "exhaustive": _exhaustive}
