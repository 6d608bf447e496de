"""Cases of the suites: a layer, its size and its shares, under an id that stays.

A format has its common layer, each odd corner alone, and some corners in pairs. A tier holds all cases of the
tiers before it. Nothing is random, and torch is not imported.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product

from qload.errors import ArgumentError
from qload.testing.traits import Contract, Traits, contract

TIERS = ("smoke", "default", "gpu", "exhaustive")
SMALL, MAIN = (256, 128), (512, 256)  # (K, N)
ODD, DEEP = (384, 192), (2048, 64)  # no powers of two; many groups and few outputs
LARGE = ((4096, 512), (2048, 1536))
MAX_TOKENS = 257


@dataclass(frozen=True)
class ConformanceCase(Traits):
    """A task for a kernel, a loader or a packer. An `id` never changes its meaning.

    Attributes
    ----------
    K, N
        Inputs and outputs of the whole layer.
    M
        The number of tokens; while tests are collected, the largest.
    world, split
        The number of ranks that share the layer, and the axis: "col" for N, "row" for K; 1 and "" for a whole
        layer.
    rank
        The rank of the task.
    """

    K: int = 256
    N: int = 128
    M: int = 1
    rank: int = 0
    world: int = 1
    split: str = ""

    @property
    def id(self) -> str:
        """The name, such as `gptq.v1.w4.g128.actorder.k4096n512.tp2row`."""
        share = f".tp{self.world}{self.split}" if self.world > 1 else ""
        return f"{self.words()}.k{self.K}n{self.N}{share}"

    @property
    def traits(self) -> Traits:
        """The kind of layer, without sizes and shares."""
        return Traits(**{each.name: getattr(self, each.name) for each in fields(Traits)})

    def __str__(self) -> str:
        return self.id


def cases(
    format: str, tier: str = "default", dtypes: tuple[str, ...] = ("float16",)
) -> tuple[ConformanceCase, ...]:
    """Return the cases of a `format` in a `tier`, smallest first, with activations of `dtypes`.

    `tier`: "smoke", "default", "gpu" or "exhaustive". ArgumentError for an unknown format or tier, and for no
    dtypes.
    """
    check_tier(tier)
    if not dtypes:
        raise ArgumentError("dtypes", "at least one, such as ('float16',)", "none")
    allowed, listed = contract(format), []
    for name in TIERS[: TIERS.index(tier) + 1]:
        listed += [*_TIERS[name](allowed, format, dtypes)]
    return tuple({case.id: case for case in listed}.values())


def check_tier(tier: str) -> None:
    """Raise ArgumentError for an unknown `tier`."""
    if tier not in TIERS:
        raise ArgumentError("tier", f"one of {', '.join(TIERS)}", repr(tier))


def _case(
    traits: Traits, dtype: str, size: tuple[int, int], world: int = 1, split: str = ""
) -> ConformanceCase:
    shared = asdict(traits) | {"dtype": dtype}
    return ConformanceCase(**shared, K=size[0], N=size[1], M=MAX_TOKENS, world=world, split=split)


def _smoke(allowed: Contract, format: str, dtypes: tuple[str, ...]) -> Iterator[ConformanceCase]:
    for traits in allowed.corners(format):
        yield _case(traits, dtypes[0], SMALL)


def _default(allowed: Contract, format: str, dtypes: tuple[str, ...]) -> Iterator[ConformanceCase]:
    common = allowed.common(format)
    for traits in (*allowed.corners(format)[1:], *_pairs(allowed, common)):
        yield _case(traits, dtypes[0], MAIN)
    for dtype, size in product(dtypes, (MAIN, ODD, DEEP)):
        yield _case(common, dtype, size)
    orders = [replace(common, act_order=order) for order in allowed.act_order]
    for traits, split in product(orders, ("col", "row")):
        yield _case(traits, dtypes[0], MAIN, 2, split)


def _pairs(allowed: Contract, common: Traits) -> Iterator[Traits]:
    """Pairs of zero points and act order, which share an index, also with groups of another size."""
    other_groups = allowed.groups[1:2]
    for symmetric, order, zeros in product(allowed.symmetric, allowed.act_order, allowed.zeros):
        if symmetric and zeros == "wrapping":
            continue
        yield replace(common, symmetric=symmetric, act_order=order, zeros=zeros)
        for group in other_groups:
            yield replace(common, symmetric=symmetric, act_order=order, zeros=zeros, group_size=group)


def _gpu(allowed: Contract, format: str, dtypes: tuple[str, ...]) -> Iterator[ConformanceCase]:
    for traits, dtype, size in product(allowed.corners(format), dtypes, LARGE):
        yield _case(traits, dtype, size)
    for split in ("col", "row"):
        yield _case(allowed.common(format), dtypes[0], LARGE[1], 4, split)


def _exhaustive(allowed: Contract, format: str, dtypes: tuple[str, ...]) -> Iterator[ConformanceCase]:
    axes = (allowed.bits, allowed.groups, allowed.symmetric, allowed.act_order, allowed.zeros)
    for bits, group, symmetric, order, zeros, variant in product(*axes, allowed.variants):
        if symmetric and zeros == "wrapping":
            continue
        traits = Traits(format, bits, group, symmetric, order, zeros, variant)
        for dtype, size in product(dtypes, (SMALL, MAIN, ODD)):
            if size[0] % allowed.inputs == 0:
                yield _case(traits, dtype, size)
        for world, split in product((2, 4), ("col", "row")):
            yield _case(traits, dtypes[0], MAIN, world, split)


_TIERS = {"smoke": _smoke, "default": _default, "gpu": _gpu, "exhaustive": _exhaustive}
