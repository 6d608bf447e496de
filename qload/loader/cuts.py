"""Where the world cuts a layer: every rank checks all the places, from declarations alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from qload.errors import CutError, DivideError, worlds
from qload.loader.base import Part, Split
from qload.loader.study import Studied
from qload.parallel import ProcessGroup
from qload.spec import Axis

WORLDS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)  # world sizes that an error offers, where lawful


@dataclass(frozen=True)
class Share:
    """One rank's share of a part: outputs [n0, n1), inputs [k0, k1), and all the world's cuts of K."""

    layer: Studied
    n0: int
    n1: int
    k0: int
    k1: int
    k_places: tuple[int, ...]

    def piece(self, axis: Axis) -> tuple[int, int] | None:
        """[start, stop) of a stored axis, or None where it stays whole."""
        if axis.dim == "N":
            return axis.at(self.n0, self.layer.N), axis.at(self.n1, self.layer.N)
        if axis.dim == "K" and len(self.k_places) > 2 and self._suits(axis):
            return axis.at(self.k0, self.layer.K), axis.at(self.k1, self.layer.K)
        return None

    def _suits(self, axis: Axis) -> bool:
        return axis.free is None or all(_exact(axis, place, self.layer.K) for place in self.k_places)


def share(
    layer: Studied, part: Part, split: Split | None, group: ProcessGroup, *, joined: bool = False
) -> Share:
    """This rank's share of a part; CutError or DivideError, the same on every rank.

    `joined`: another part follows, so that the end of this one is a cut like any other.
    """
    world, rank = group.size(), group.rank()
    start, stop = part.start, layer.N if part.stop is None else part.stop
    _check(layer, "N", (start, stop), None, joined)
    n, k = (start, stop), (0, layer.K)
    k_places: tuple[int, ...] = k
    if split == "N" and world > 1:
        places = _places(layer, "N", start, stop, world)
        n = (places[rank], places[rank + 1])
    if split == "K" and world > 1:
        k_places = _places(layer, "K", 0, layer.K, world)
        k = (k_places[rank], k_places[rank + 1])
    return Share(layer, *n, *k, k_places)


def _places(layer: Studied, dim: str, start: int, stop: int, world: int) -> tuple[int, ...]:
    width = stop - start
    if width % world:
        raise DivideError(
            _binding(layer, dim)[0],
            dim,
            width,
            f"{world} ranks",
            f"lawful   {worlds(_lawful(layer, dim, start, stop))}",
        )
    places = tuple(start + width // world * i for i in range(world + 1))
    _check(layer, dim, places, (start, stop, world))
    return places


def _check(
    layer: Studied, dim: str, places: Sequence[int], span: tuple[int, int, int] | None, joined: bool = False
) -> None:
    size = layer.sizes.get(dim, 1)
    for place in places:
        for spec in layer.specs:
            for axis in spec.axes:
                if axis.dim == dim and axis.free is None and not _exact(axis, place, size, joined):
                    name, block, why = _binding(layer, dim)
                    lawful = _lawful(layer, dim, *span[:2]) if span else ()
                    raise CutError(name, dim, size, place, block, why, span and span[2], lawful)


def _exact(axis: Axis, place: int, size: int, joined: bool = False) -> bool:
    if place == 0 or (place == size and not joined):
        return True
    return place % axis.granule == 0 and (not axis.never or place == size)


def granule(layer: Studied, dim: str) -> int:
    """Cuts of a dimension are lawful at multiples of this; 0 where it is never cut."""
    return _binding(layer, dim)[1]


def _binding(layer: Studied, dim: str) -> tuple[str, int, str]:
    """The tensor that binds a dimension most, the joint granule, and the tensor's declaration."""
    bound = [
        (0 if axis.never else axis.granule, spec)
        for spec in layer.specs
        for axis in spec.axes
        if axis.dim == dim and axis.free is None
    ]
    if not bound:
        return layer.prefix, 1, f"no tensor has an axis {dim}"
    never = [spec for block, spec in bound if not block]
    spec = never[0] if never else max(bound, key=lambda pair: pair[0])[1]
    block = 0 if never else lcm(*(block for block, _ in bound))
    return layer.names.full(spec.name), block, f"as {spec.name} is ({', '.join(spec.text.split())})"


def _lawful(layer: Studied, dim: str, start: int, stop: int) -> tuple[int, ...]:
    block = granule(layer, dim)
    size, width = layer.sizes.get(dim, 1), stop - start
    return tuple(
        world
        for world in WORLDS
        if block
        and width % world == 0
        and all(
            (start + width // world * i) % block == 0 or start + width // world * i == size
            for i in range(world)
        )
    )
