"""Parameters of a layer: attributes for loaders, recognizably empty values, and filling by a rank's share.

A parameter without a loaded tensor must not pass for a weight. Empty floats are NaN; empty words, for which
every bit pattern is valid, have one constant pattern, and a whole column of it counts as not loaded.

Attributes describe a parameter to a loader:

    input_dim, output_dim      the axes of the layer's inputs and outputs
    packed_dim, packed_factor  the axis along which a word has several codes, and how many
    input_dim_whole            the size of the input axis in the checkpoint
    weight_loader              the function (param, tensor, shard_id) that fills the parameter

torch drops the attributes of a replaced parameter: in a deep copy, in `to_empty` from device meta and in
`load_state_dict(assign=True)`. The layer keeps a copy of them, see `restore_attrs`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from qload.errors import (
    ArgumentError,
    CutError,
    DivideError,
    DtypeError,
    MismatchError,
    ShapeError,
    check_values,
)
from qload.parallel import ProcessGroup
from qload.spec.casts import check_cast

EMPTY_WORD = -0x61C88647  # an unlikely run of codes or zero points
SCALES = "scales"  # parameters with a check of small values: a scale's bits affect a whole group
ATTRS = "weight_attrs"  # attribute of a layer: attributes by parameter name


def empty_parameter(shape: Sequence[int], dtype: torch.dtype, *, expanded: bool = False) -> nn.Parameter:
    """Create a parameter without values; `expanded`: over the memory of one element."""
    if expanded:
        return nn.Parameter(_clear(torch.empty((), dtype=dtype)).expand(*shape), requires_grad=False)
    return nn.Parameter(_clear(torch.empty(*shape, dtype=dtype)), requires_grad=False)


def clear_parameter(param: Tensor) -> None:
    """Make a parameter empty again, after its memory was replaced by uninitialized memory."""
    _clear(param.data)


def is_empty(values: Tensor, tensor: str) -> bool:
    """Return whether a parameter, or a part of it, was not loaded; MismatchError if some of it was."""
    if values.numel() == 0:
        return True
    if not values.dtype.is_floating_point:
        if bool((values == _empty_word(values.dtype)).all()):
            return True
        if values.dtype == torch.int32 and values.ndim == 2:
            _check_words(values, tensor)
        return False
    if bool(torch.isnan(values.float()).all()):
        return True
    if values.dtype.itemsize > 1:  # NaN may be a code of 8 bits
        _check_floats(values, tensor)
    return False


def _clear(values: Tensor) -> Tensor:
    return values.fill_(torch.nan if values.dtype.is_floating_point else _empty_word(values.dtype))


def _empty_word(dtype: torch.dtype) -> int:
    """Pattern of an empty word as an integer of any width."""
    if dtype == torch.bool:
        return 0
    info = torch.iinfo(dtype)
    return (EMPTY_WORD - info.min) % (info.max - info.min + 1) + info.min


def register_weight(layer: nn.Module, name: str, param: nn.Parameter, *attrs: Mapping[str, Any]) -> None:
    """Register a parameter with attributes; without a `weight_loader` it takes a whole tensor."""
    merged: dict[str, Any] = {}
    if not any("weight_loader" in each for each in attrs):
        merged["weight_loader"] = partial(load_whole, tensor=full_name(layer, name))
    for each in (dict(merged), *attrs):
        set_weight_attrs(param, each)
        merged.update(each)
    layer.register_parameter(name, param)
    _keep_attrs(layer, name, merged)


def close_weights(layer: nn.Module, *names: str) -> None:
    """Refuse further loads into these parameters, which a kernel has repacked."""
    for name in names:
        attrs = {"weight_loader": partial(refuse_to_load, tensor=full_name(layer, name))}
        set_weight_attrs(getattr(layer, name), attrs)
        _keep_attrs(layer, name, attrs)


def set_weight_attrs(weight: Tensor, weight_attrs: Mapping[str, Any] | None) -> None:
    """Set `weight_attrs` as attributes of the parameter `weight`.

    ArgumentError if it has one of them already; then none is set.
    """
    attrs = weight_attrs or {}
    for name in attrs:
        if hasattr(weight, name):
            raise ArgumentError(name, "a new attribute of the parameter", repr(getattr(weight, name)))
    for name, value in attrs.items():
        setattr(weight, name, value)


def restore_attrs(layer: nn.Module) -> None:
    """Restore the attributes of every parameter that has lost them.

    `RestoringModule` does so at once; for other modules a method does before it reads the parameters.
    """
    for name, attrs in _kept_attrs(layer).items():
        param = getattr(layer, name, None)
        for attr, value in attrs.items():
            if param is not None and not hasattr(param, attr):
                setattr(param, attr, value)


def _keep_attrs(layer: nn.Module, name: str, attrs: Mapping[str, Any]) -> None:
    setattr(layer, ATTRS, {**_kept_attrs(layer), name: dict(attrs)})


def _kept_attrs(layer: nn.Module) -> dict[str, dict[str, Any]]:
    return getattr(layer, ATTRS, {})


class RestoringModule(nn.Module):
    """Module whose parameters keep their attributes in copies, moves and assignments."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        restore_attrs(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        restore_attrs(self)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        restore_attrs(self)


def replace_parameter(layer: nn.Module, param_name: str, new_data: Tensor) -> None:
    """Replace the parameter `param_name` of `layer` by `new_data`, without attributes and loader.

    ArgumentError if it is no tensor, or if the name is in use for something else.
    """
    if not hasattr(new_data, "detach"):
        raise ArgumentError(param_name, "a tensor", type(new_data).__name__)
    own = (vars(layer), layer._parameters, layer._buffers)
    if any(param_name in each for each in own):
        delattr(layer, param_name)
    elif hasattr(layer, param_name):
        raise ArgumentError("param_name", f"a parameter of {type(layer).__name__}", repr(param_name))
    layer.register_parameter(param_name, nn.Parameter(new_data.detach(), requires_grad=False))


def full_name(layer: nn.Module, name: str) -> str:
    """Return a parameter's name for errors, with the layer's prefix if it has one."""
    prefix = getattr(layer, "prefix", "")
    return f"{prefix}.{name}" if prefix else name


def load_whole(param: Tensor, loaded_weight: Tensor, *, tensor: str = "parameter") -> None:
    """Fill a parameter with a tensor of its shape."""
    fill(param.data, loaded_weight, tensor)


def refuse_to_load(param: Tensor, loaded_weight: Tensor, *_: object, tensor: str) -> None:
    """Raise ArgumentError: a kernel has repacked the parameter."""
    raise ArgumentError(tensor, "a tensor loaded before process_weights_after_loading", "one loaded after")


def check_tensor(loaded: object, tensor: str) -> None:
    """Raise ArgumentError unless a loader's argument is a tensor with values."""
    if not isinstance(loaded, Tensor):
        raise ArgumentError(tensor, "a tensor", type(loaded).__name__)
    check_values(tensor, loaded)


def fill(target: Tensor, loaded: Tensor, tensor: str) -> None:
    """Copy a tensor into (a part of) a parameter of its shape.

    DtypeError for words and integers of another dtype. Floats are cast: CastError if the cast makes a number
    infinite, or loses bits of a small scale.
    """
    check_tensor(loaded, tensor)
    if target.is_meta:
        raise ArgumentError(tensor, "a parameter with memory: to_empty before loading", "one on meta")
    if target.shape != loaded.shape:
        raise ShapeError(tensor, str(tuple(target.shape)), tuple(loaded.shape))
    floats = target.dtype.is_floating_point and loaded.dtype.is_floating_point
    if target.dtype != loaded.dtype and not floats:
        raise DtypeError(tensor, [short_name(target.dtype)], short_name(loaded.dtype))
    cast = loaded.detach().to(target.device, target.dtype)
    if cast.dtype != loaded.dtype:
        tiny = tensor.rpartition(".")[2] == SCALES
        check_cast(tensor, loaded, cast, tiny=tiny, remedy="a params_dtype that holds it, such as float32")
    target.copy_(cast)


def check_loaded(layer: nn.Module, *names: str) -> None:
    """Raise MismatchError for the first of these parameters, or of a bias, with empty values."""
    has_bias = isinstance(getattr(layer, "bias", None), nn.Parameter)
    for name in (*names, *["bias"] * has_bias):
        param = getattr(layer, name).data
        tensor = full_name(layer, name)
        if param.is_meta:
            raise MismatchError(tensor, "not loaded", "values", "a tensor on meta, without values")
        if param.dtype.is_floating_point:
            _check_floats(param, tensor)
        else:
            _check_words(param, tensor)


def _check_floats(param: Tensor, tensor: str) -> None:
    empty = torch.isnan(param)
    if bool(empty.any()):
        first, count = empty.nonzero()[0].tolist(), int(empty.sum())
        got = f"{count} of {param.numel()} values are NaN, first at {tuple(first)}"
        raise MismatchError(tensor, "not loaded", "a number everywhere", got)


def _check_words(param: Tensor, tensor: str) -> None:
    columns = (param == EMPTY_WORD).all(0).nonzero().flatten()
    if columns.numel():
        got = f"{columns.numel()} of {param.shape[1]} were not, the first is {int(columns[0])}"
        raise MismatchError(tensor, "not loaded", "every column of words written", got)


def short_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Shard:
    """Share of one part of a layer's outputs.

    Attributes
    ----------
    id
        Shard id of the part.
    size, share
        Outputs of the whole part, and of this rank.
    index
        Position of this rank's share among the size / share equal ones.
    """

    id: int | str
    size: int
    share: int
    index: int


def divide(tensor: str, dim: str, size: int, group: ProcessGroup) -> int:
    """Return a rank's equal share of a size; DivideError for uneven shares."""
    if size % group.size():
        raise DivideError(tensor, dim, size, f"{group.size()} ranks")
    return size // group.size()


def load_outputs(
    param: Tensor, loaded: Tensor, shards: Sequence[Shard], shard_id: int | str | None, tensor: str
) -> None:
    """Fill a rank's outputs of one shard from its own tensor, or of all shards from one (`shard_id` None).

    CutError for a share that begins or ends inside of a word.
    """
    check_tensor(loaded, tensor)
    dim = getattr(param, "output_dim", None)
    if dim is None:
        fill(param.data, loaded, tensor)
        return
    factor = getattr(param, "packed_factor", 1) if getattr(param, "packed_dim", None) == dim else 1
    matches = [type(shard.id) is type(shard_id) and shard.id == shard_id for shard in shards]
    chosen = [shard for shard, match in zip(shards, matches, strict=True) if shard_id is None or match]
    if not chosen:
        known = ", ".join(repr(shard.id) for shard in shards)
        raise ArgumentError(f"{tensor}: shard_id", f"None or one of {known}", repr(shard_id))

    def words(codes: int, size: int) -> int:
        if codes % factor:
            raise CutError(tensor, "N", size, codes, factor, f"as a word holds {factor} codes along N")
        return codes // factor

    expected = sum(words(shard.size, shard.size) for shard in chosen)
    if loaded.ndim != param.ndim or loaded.shape[dim] != expected:
        raise ShapeError(tensor, f"{expected} along axis {dim}, the axis of outputs", tuple(loaded.shape))
    source = 0
    for shard in chosen:
        share = words(shard.share, shard.size)
        offset = sum(other.share for other in shards[: list(shards).index(shard)])
        target = param.data.narrow(dim, words(offset, offset + shard.share), share)
        fill(target, loaded.narrow(dim, source + shard.index * share, share), tensor)
        source += words(shard.size, shard.size)


def load_inputs(param: Tensor, loaded: Tensor, group: ProcessGroup, tensor: str) -> None:
    """Fill a rank's inputs from the whole tensor; a parameter without an input axis takes all of it.

    A parameter with the whole axis, such as scales of a layer with one group, is not cut.
    """
    check_tensor(loaded, tensor)
    dim = getattr(param, "input_dim", None)
    if dim is None or loaded.ndim != param.ndim:
        fill(param.data, loaded, tensor)
        return
    share, world = param.shape[dim], group.size()
    whole = getattr(param, "input_dim_whole", None)
    accepted = (share * world, share) if whole is None else (whole,)
    if loaded.shape[dim] not in accepted:
        sizes = " or ".join(map(str, sorted(set(accepted))))
        raise ShapeError(tensor, f"{sizes} along axis {dim}, the axis of inputs", tuple(loaded.shape))
    start = 0 if loaded.shape[dim] == share else group.rank() * share
    fill(param.data, loaded.narrow(dim, start, share), tensor)
