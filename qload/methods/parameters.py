"""Parameters of a layer: tagged, born recognisably empty, filled with nothing lost, replaced once read.

A parameter that nothing was loaded into must not pass for a weight. Floats are born NaN; words, of which
every pattern is a lawful one, are born as one pattern throughout, and a whole column of it was never
written.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, CastError, DtypeError, MismatchError, ShapeError

UNWRITTEN = -0x61C88647  # in no way a likely run of codes or zero points


def blank_words(*shape: int) -> nn.Parameter:
    """An int32 parameter that holds nothing yet."""
    return nn.Parameter(torch.full(shape, UNWRITTEN, dtype=torch.int32), requires_grad=False)


def blank_floats(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of plain numbers that holds none yet."""
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype), requires_grad=False)


def set_weight_attrs(weight: Tensor, weight_attrs: Mapping[str, Any] | None) -> None:
    """Tag a parameter; ArgumentError where it has such an attribute already, and then nothing is set."""
    attrs = weight_attrs or {}
    for name in attrs:
        if hasattr(weight, name):
            raise ArgumentError(name, "a tag that the parameter does not have", repr(getattr(weight, name)))
    for name, value in attrs.items():
        setattr(weight, name, value)


def replace_parameter(layer: nn.Module, param_name: str, new_data: Tensor) -> None:
    """Put a plain parameter under a name, without the tags and the loader of the one that was there."""
    if hasattr(layer, param_name):
        delattr(layer, param_name)
    layer.register_parameter(param_name, nn.Parameter(new_data.detach(), requires_grad=False))


def full_name(layer: nn.Module, name: str) -> str:
    """A parameter's name as errors say it: under the layer's prefix, where it has one."""
    prefix = getattr(layer, "prefix", "")
    return f"{prefix}.{name}" if prefix else name


def load_whole(param: Tensor, loaded_weight: Tensor, *, tensor: str = "parameter") -> None:
    """The loader of a layer that brings none: all of the tensor, which has the parameter's shape."""
    fill(param.data, loaded_weight, tensor)


def fill(target: Tensor, loaded: Tensor, tensor: str) -> None:
    """Copy into (a part of) a parameter of the same shape.

    Words and integers keep their dtype, or DtypeError; floats are cast to the parameter's, and CastError
    where that makes an infinity of a number.
    """
    if target.shape != loaded.shape:
        raise ShapeError(tensor, str(tuple(target.shape)), tuple(loaded.shape))
    floats = target.dtype.is_floating_point and loaded.dtype.is_floating_point
    if target.dtype != loaded.dtype and not floats:
        raise DtypeError(tensor, [_short(target.dtype)], _short(loaded.dtype))
    cast = loaded.detach().to(target.device, target.dtype)
    if cast.dtype != loaded.dtype:
        lost = torch.isinf(cast) & torch.isfinite(loaded.to(cast.device))
        if bool(lost.any()):
            value = float(loaded.to(cast.device)[lost][0])
            raise CastError(tensor, _short(loaded.dtype), _short(target.dtype), value, int(lost.sum()))
    target.copy_(cast)


def check_loaded(layer: nn.Module, *names: str) -> None:
    """Every one of these parameters, and the bias if there is one, was filled; MismatchError names it."""
    biased = isinstance(getattr(layer, "bias", None), nn.Parameter)
    for name in (*names, *["bias"] * biased):
        param = getattr(layer, name).data
        tensor = full_name(layer, name)
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
