"""Which part of a checkpoint's tensor goes where in a rank's parameter, from the parameter's tags.

    input_dim, output_dim      the axes along which the layer's inputs and outputs lie
    packed_dim, packed_factor  the axis whose words hold several codes, and how many
    input_dim_whole            the size of the input axis in the checkpoint

A cut that falls inside of a word is refused. An axis of groups is cut in shares of the parameter's own
size; where the parameter has all of it, as the one row of a layer without groups, it is not cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qload.errors import ArgumentError, CutError, DivideError, ShapeError
from qload.methods.parameters import check_tensor, fill
from qload.parallel import ProcessGroup


@dataclass(frozen=True)
class Shard:
    """One part of a layer's outputs: `whole` of them in the checkpoint, of which a rank has `share`.

    `place`: which of the whole / share equal runs is this rank's.
    """

    id: int | str
    whole: int
    share: int
    place: int


def divided(tensor: str, dim: str, size: int, group: ProcessGroup) -> int:
    """A rank's equal share of a size, or DivideError."""
    if size % group.size():
        raise DivideError(tensor, dim, size, f"{group.size()} ranks")
    return size // group.size()


def load_outputs(
    param: Tensor, loaded: Tensor, shards: Sequence[Shard], shard_id: int | str | None, tensor: str
) -> None:
    """Fill a rank's outputs: of one shard from its own tensor, or (`shard_id` None) of all from one."""
    check_tensor(loaded, tensor)
    dim = getattr(param, "output_dim", None)
    if dim is None:
        fill(param.data, loaded, tensor)
        return
    factor = _factor(param, dim)
    same = [type(shard.id) is type(shard_id) and shard.id == shard_id for shard in shards]
    chosen = [shard for shard, asked in zip(shards, same, strict=True) if shard_id is None or asked]
    if not chosen:
        known = ", ".join(repr(shard.id) for shard in shards)
        raise ArgumentError(f"{tensor}: shard_id", f"None or one of {known}", repr(shard_id))
    wanted = sum(_words(shard.whole, factor, tensor, shard.whole) for shard in chosen)
    if loaded.ndim != param.ndim or loaded.shape[dim] != wanted:
        raise ShapeError(tensor, f"{wanted} along axis {dim}, which has the outputs", tuple(loaded.shape))
    source = 0
    for shard in chosen:
        share, before = _words(shard.share, factor, tensor, shard.whole), _before(shards, shard)
        here = param.data.narrow(dim, _words(before, factor, tensor, before + shard.share), share)
        fill(here, loaded.narrow(dim, source + shard.place * share, share), tensor)
        source += _words(shard.whole, factor, tensor, shard.whole)


def load_inputs(param: Tensor, loaded: Tensor, group: ProcessGroup, tensor: str) -> None:
    """Fill a rank's inputs from the whole tensor; a parameter that has no inputs is filled with all of it."""
    check_tensor(loaded, tensor)
    dim = getattr(param, "input_dim", None)
    if dim is None or loaded.ndim != param.ndim:
        fill(param.data, loaded, tensor)
        return
    own, world = param.shape[dim], group.size()
    stated = getattr(param, "input_dim_whole", None)
    wanted = (own * world, own) if stated is None else (stated,)
    if loaded.shape[dim] not in wanted:
        sizes = " or ".join(map(str, sorted(set(wanted))))
        raise ShapeError(tensor, f"{sizes} along axis {dim}, which has the inputs", tuple(loaded.shape))
    start = 0 if loaded.shape[dim] == own else group.rank() * own
    fill(param.data, loaded.narrow(dim, start, own), tensor)


def _before(shards: Sequence[Shard], shard: Shard) -> int:
    return sum(other.share for other in shards[: list(shards).index(shard)])


def _factor(param: Tensor, dim: int) -> int:
    return getattr(param, "packed_factor", 1) if getattr(param, "packed_dim", None) == dim else 1


def _words(place: int, factor: int, tensor: str, size: int) -> int:
    if place % factor:
        raise CutError(tensor, "N", size, place, factor, f"as a word holds {factor} codes along N")
    return place // factor
