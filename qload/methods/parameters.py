"""Parameters of a layer: tagged, born recognisably empty, filled with nothing lost, replaced once read.

A parameter that nothing was loaded into must not pass for a weight. Floats are born NaN; words, of which
every pattern is a lawful one, are born as one pattern throughout, and a whole column of it was never
written.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, DtypeError, MismatchError, ShapeError, check_values
from qload.methods.tags import keep_tags
from qload.spec.casts import check_cast

UNWRITTEN = -0x61C88647  # in no way a likely run of codes or zero points
SCALES = "scales"  # whose every bit is in a whole group of weights


def blank_words(*shape: int) -> nn.Parameter:
    """An int32 parameter that holds nothing yet."""
    return nn.Parameter(torch.full(shape, UNWRITTEN, dtype=torch.int32), requires_grad=False)


def blank_floats(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of plain numbers that holds none yet."""
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype), requires_grad=False)


def blank(shape: Sequence[int], dtype: torch.dtype, *, shared: bool) -> nn.Parameter:
    """A parameter of any dtype that holds nothing yet; `shared`: of one element's memory."""
    if shared:
        return nn.Parameter(_nothing(torch.empty((), dtype=dtype)).expand(*shape), requires_grad=False)
    return nn.Parameter(_nothing(torch.empty(*shape, dtype=dtype)), requires_grad=False)


def make_blank(param: Tensor) -> None:
    """Forget what a parameter holds, as one whose memory is new does not hold anything yet."""
    _nothing(param.data)


def is_blank(held: Tensor, tensor: str) -> bool:
    """Whether nothing was written into a parameter, or a part of one; MismatchError for half of it."""
    if held.numel() == 0:
        return True
    if not held.dtype.is_floating_point:
        if bool((held == _pattern(held.dtype)).all()):
            return True
        if held.dtype == torch.int32 and held.ndim == 2:
            _check_words(held, tensor)
        return False
    if bool(torch.isnan(held.float()).all()):
        return True
    if held.dtype.itemsize > 1:  # a code of 8 bits may mean that
        _check_floats(held, tensor)
    return False


def _nothing(held: Tensor) -> Tensor:
    return held.fill_(torch.nan if held.dtype.is_floating_point else _pattern(held.dtype))


def _pattern(dtype: torch.dtype) -> int:
    """The pattern of words as an integer of any width has it."""
    if dtype == torch.bool:
        return 0
    info = torch.iinfo(dtype)
    return (UNWRITTEN - info.min) % (info.max - info.min + 1) + info.min


def register_weight(layer: nn.Module, name: str, param: nn.Parameter, *attrs: Mapping[str, Any]) -> None:
    """Register a tagged parameter, whose `weight_loader` takes all of a tensor unless its tags bring one."""
    loader: Callable[..., None] = partial(load_whole, tensor=full_name(layer, name))
    brought = any("weight_loader" in each for each in attrs)
    tags: dict[str, Any] = {} if brought else {"weight_loader": loader}
    for each in (dict(tags), *attrs):
        set_weight_attrs(param, each)
        tags.update(each)
    layer.register_parameter(name, param)
    keep_tags(layer, name, tags)


def close_weights(layer: nn.Module, *names: str) -> None:
    """Nothing is loaded into these parameters from here on: they hold what a kernel reads."""
    for name in names:
        tags = {"weight_loader": partial(refuse_to_load, tensor=full_name(layer, name))}
        set_weight_attrs(getattr(layer, name), tags)
        keep_tags(layer, name, tags)


def set_weight_attrs(weight: Tensor, weight_attrs: Mapping[str, Any] | None) -> None:
    """Tag the parameter `weight` with `weight_attrs`, by name.

    ArgumentError where it has such an attribute already, and then nothing is set.
    """
    attrs = weight_attrs or {}
    for name in attrs:
        if hasattr(weight, name):
            raise ArgumentError(name, "a tag that the parameter does not have", repr(getattr(weight, name)))
    for name, value in attrs.items():
        setattr(weight, name, value)


def replace_parameter(layer: nn.Module, param_name: str, new_data: Tensor) -> None:
    """Put `new_data` as a plain parameter of `layer` under `param_name`.

    It has neither the tags nor the loader of the one that was there. ArgumentError where it is no tensor, or
    the name is that of something else.
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
    """A parameter's name as errors say it: under the layer's prefix, where it has one."""
    prefix = getattr(layer, "prefix", "")
    return f"{prefix}.{name}" if prefix else name


def load_whole(param: Tensor, loaded_weight: Tensor, *, tensor: str = "parameter") -> None:
    """The loader of a layer that brings none: all of the tensor, which has the parameter's shape."""
    fill(param.data, loaded_weight, tensor)


def refuse_to_load(param: Tensor, loaded_weight: Tensor, *_: object, tensor: str) -> None:
    """The loader of a parameter that a kernel has repacked."""
    raise ArgumentError(tensor, "a tensor loaded before process_weights_after_loading", "one loaded after")


def check_tensor(loaded: object, tensor: str) -> None:
    """What a loader is given is a tensor that holds values, or ArgumentError."""
    if not isinstance(loaded, Tensor):
        raise ArgumentError(tensor, "a tensor", type(loaded).__name__)
    check_values(tensor, loaded)


def fill(target: Tensor, loaded: Tensor, tensor: str) -> None:
    """Copy into (a part of) a parameter of the same shape.

    Words and integers keep their dtype, or DtypeError; floats are cast to the parameter's, and CastError
    where that makes an infinity of a number, or takes bits of a small scale.
    """
    check_tensor(loaded, tensor)
    if target.is_meta:
        raise ArgumentError(tensor, "a parameter with memory: to_empty before loading", "one on meta")
    if target.shape != loaded.shape:
        raise ShapeError(tensor, str(tuple(target.shape)), tuple(loaded.shape))
    floats = target.dtype.is_floating_point and loaded.dtype.is_floating_point
    if target.dtype != loaded.dtype and not floats:
        raise DtypeError(tensor, [_short(target.dtype)], _short(loaded.dtype))
    cast = loaded.detach().to(target.device, target.dtype)
    if cast.dtype != loaded.dtype:
        tiny = tensor.rpartition(".")[2] == SCALES
        check_cast(tensor, loaded, cast, tiny=tiny, remedy="a params_dtype that holds it, such as float32")
    target.copy_(cast)


def check_loaded(layer: nn.Module, *names: str) -> None:
    """Every one of these parameters, and the bias if there is one, was filled; MismatchError names it."""
    biased = isinstance(getattr(layer, "bias", None), nn.Parameter)
    for name in (*names, *["bias"] * biased):
        param = getattr(layer, name).data
        tensor = full_name(layer, name)
        if param.is_meta:
            raise MismatchError(tensor, "not loaded", "values", "a tensor on meta, which has none")
        if param.dtype.is_floating_point:
            _check_floats(param, tensor)
        else:
            _check_words(param, tensor)


def _check_floats(param: Tensor, tensor: str) -> None:
    wrong = torch.isnan(param)
    if bool(wrong.any()):
        first, count = wrong.nonzero()[0].tolist(), int(wrong.sum())
        got = f"{count} of {param.numel()} values are NaN, first at {tuple(first)}"
        raise MismatchError(tensor, "not loaded", "a number everywhere", got)


def _check_words(param: Tensor, tensor: str) -> None:
    columns = (param == UNWRITTEN).all(0).nonzero().flatten()
    if columns.numel():
        got = f"{columns.numel()} of {param.shape[1]} were not, the first is {int(columns[0])}"
        raise MismatchError(tensor, "not loaded", "every column of words written", got)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
