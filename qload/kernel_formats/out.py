"""A weight that is written over: whether it can be is known before the first of its tensors changes."""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TypeVar

from torch import Tensor

from qload import devices
from qload.errors import ArgumentError
from qload.spec import Weight

W = TypeVar("W", bound=Weight)


def apart(made: W, source: Weight) -> W:
    """No tensor in common: whoever overwrites the one, as `out` does, must not change the other."""
    places = {tensor.data_ptr() for tensor in source.fields().values()}
    return made.holding({n: t.clone() for n, t in made.fields().items() if t.data_ptr() in places})


def share_memory(out: Weight, source: Weight) -> bool:
    """Whether writing to the one would change the other."""
    held, given = ({t.untyped_storage().data_ptr() for t in w.fields().values()} for w in (out, source))
    return bool(held & given)


def written(out: Weight, made: W, writes: Iterable[Callable[[], object]]) -> W:
    """What was made, in the tensors of `out`; ArgumentError, and nothing written, where they do not fit.

    `made` may hold tensors of `out` already, which `writes` fill.
    """
    held, fresh = out.fields(), made.fields()
    wanted, got = _described(made), _described(out)
    if type(out) is not type(made) or wanted != got:
        raise ArgumentError("out", f"{type(made).__name__} with {wanted}", f"{type(out).__name__} with {got}")
    for name, tensor in held.items():
        devices.check_writable(tensor, f"out: {name}")
    _check_apart(held)
    for write in writes:
        write()
    for name, tensor in held.items():
        if tensor is not fresh[name]:
            tensor.copy_(fresh[name])
    return made.holding(held)


def _check_apart(held: Mapping[str, Tensor]) -> None:
    """No tensor in one piece begins inside of another, or ArgumentError."""
    whole = [(t.data_ptr(), t.nbytes, name) for name, t in held.items() if t.is_contiguous() and t.numel()]
    for (start, size, name), (following, _, other) in pairwise(sorted(whole)):
        if 0 < following < start + size:
            raise ArgumentError(
                "out", "tensors with memory of their own", f"{name} and {other} in one memory"
            )


def _described(weight: Weight) -> dict[str, str]:
    """Of each tensor its dtype, shape and device, for messages."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
        for name, tensor in weight.fields().items()
    }
