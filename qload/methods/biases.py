"""The bias that is stored beside a weight: plain, whatever the weight is, and cut as its outputs are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qload.errors import DtypeError, ShapeError
from qload.formats.unquantized import FLOATS
from qload.loader import Part, Split
from qload.spec import Role, Weight, named
from qload.weights import Weights


def check_biases(weights: Weights, parts: Sequence[Part]) -> bool:
    """Whether a layer of these parts has a bias; ShapeError or DtypeError for what is none."""
    found = [
        check_bias(weights, prefix, weights.loader.shape(weights, prefix)[0])
        for prefix in dict.fromkeys(part.prefix for part in parts)
        if _has_bias(weights, prefix)
    ]
    return bool(found)


def check_bias(weights: Weights, prefix: str, N: int) -> bool:
    """Whether there is a bias of N outputs; ShapeError or DtypeError for another one."""
    if not _has_bias(weights, prefix):
        return False
    name = named(prefix, "bias")
    info = weights.info(name)
    if info.shape != (N,):
        raise ShapeError(name, f"({N},) = (N,)", info.shape, info.file)
    if info.dtype not in FLOATS:
        raise DtypeError(name, [_plain(dtype) for dtype in FLOATS], _plain(info.dtype), info.file)
    return True


def read_bias(weights: Weights, parts: Sequence[Part], weight: Weight, split: Split | None) -> Tensor | None:
    """(outputs of `weight`,): this rank's of each part; 0 for a part that has none. None: there is no bias.

    Of a layer that is cut along its inputs rank 0 alone has the bias, all of it.
    """
    names = [named(part.prefix, "bias") for part in parts if _has_bias(weights, part.prefix)]
    if not names:
        return None
    weights.take(dict.fromkeys(names))
    if split == "K" and weights.process_group.rank():
        return None
    shares = [
        _share(weights, part, width, split) for part, width in zip(parts, weight.layer.parts, strict=True)
    ]
    like = next(share for share in shares if share is not None)
    filled = [
        like.new_zeros(width) if share is None else share
        for share, width in zip(shares, weight.layer.parts, strict=True)
    ]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def _share(weights: Weights, part: Part, width: int, split: Split | None) -> Tensor | None:
    """This rank's run of a part's bias, which is as wide as its run of the weight."""
    if not _has_bias(weights, part.prefix):
        return None
    name = named(part.prefix, "bias")
    start, stop = part.start, weights.get_shape(name)[0] if part.stop is None else part.stop
    if split == "N":
        group = weights.process_group
        place, last = group.rank() // part.copies, group.size() // part.copies - 1
        start = start + place * width if place < last else stop - width  # the last may be short
        stop = start + width
    return weights.read(name, (slice(start, stop),), role=Role.FLOAT)


def _has_bias(weights: Weights, prefix: str) -> bool:
    return weights.has_tensor(named(prefix, "bias"))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
