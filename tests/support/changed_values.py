"""Lawful arguments of a call with one change at a time, and the outcome of each call as a line of text."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from qload.dtypes import Dtype
from qload.errors import QloadError

ADDRESS = re.compile(r" at 0x[0-9a-f]+|/tmp/\S+")
THE_SAME, UNCHECKED = "as lawful", "an error of torch or Python"
MAX_SHOWN = 200  # characters of a result


def changed_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor with each axis one shorter, with another rank or dtype, and with damaged values."""
    for axis, size in enumerate(tensor.shape):
        if size > 1:
            yield f"axis {axis} one shorter", tensor.narrow(axis, 0, size - 1).contiguous()
    yield "one axis more", tensor.unsqueeze(-1)
    if tensor.ndim:
        yield "one axis fewer", tensor.flatten(0, 1) if tensor.ndim > 1 else tensor[0]
    yield "another dtype", tensor.to(torch.int16 if tensor.dtype != torch.int16 else torch.float64)
    yield from damaged_tensors(tensor)


def damaged_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of zeros, and one with a value at its end that few tensors may have."""
    yield "zeros", torch.zeros_like(tensor)
    floats = {"a NaN": float("nan"), "a huge value": 1e5, "a negative value": -1.0}
    for words, value in floats.items() if tensor.dtype.is_floating_point else {"-1 at the end": -1}.items():
        if tensor.dtype != torch.bool and tensor.numel():
            changed = tensor.to(torch.float64 if isinstance(value, float) else torch.int64).clone()
            changed.view(-1)[-1] = value
            yield words, changed.to(tensor.dtype)


def changed_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value with one change at a time, each with words for it."""
    if isinstance(value, Tensor):
        yield from changed_tensors(value)
    elif isinstance(value, bool):
        yield str(not value), not value
    elif isinstance(value, int):
        yield from (
            (str(other), other)
            for other in dict.fromkeys((-1, 0, 1, value + 1, 3 * value, 7))
            if other != value
        )
    elif isinstance(value, float):
        yield from ((str(other), other) for other in (-1.5, 0.0, 2 * value, float("nan"), float("inf")))
    elif isinstance(value, str):
        yield "another text", f"{value}x"
    elif isinstance(value, torch.dtype | Dtype):
        yield from (
            (str(other), other)
            for other in (torch.int32, torch.float64, torch.bfloat16)
            if str(other) != str(value)
        )
    elif isinstance(value, Mapping):
        for key, held in value.items():
            yield f"no {key}", {name: each for name, each in value.items() if name != key}
            yield from ((f"{key}: {words}", {**value, key: other}) for words, other in changed_values(held))
            if not isinstance(held, Tensor):
                yield f"{key}: null", {**value, key: None}
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and value:
        kind, first = type(value), value[0]
        yield "one fewer", value[:-1]
        yield "one twice", kind((*value, value[-1]))
        yield from ((f"first: {words}", kind((other, *value[1:]))) for words, other in changed_values(first))


def changed_calls(arguments: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the arguments with one of them changed, and words for the change."""
    for name, value in arguments.items():
        for words, other in changed_values(value):
            yield f"{name}: {words}", {**arguments, name: other}


def outcomes(call: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return a line for each changed call with another outcome: the error, or the change of the result."""
    try:
        lawful = call(**arguments)
    except QloadError:
        return outcome(call, arguments)
    lines = [f"lawful -> {outcome(call, arguments)}"]
    for words, changed in changed_calls(arguments):
        text = outcome(call, changed, lawful)
        if text not in (THE_SAME, UNCHECKED):
            lines.append(f"{words} -> {text}")
    return "\n".join(lines)


def outcome(call: Callable[..., Any], arguments: Mapping[str, Any], lawful: Any = None) -> str:
    """Return the text of an error of qload, or the change of the result."""
    try:
        result = call(**arguments)
    except QloadError as error:
        return ADDRESS.sub("", f"{type(error).__name__}: {error}".replace("\n", " | "))
    except Exception:  # of torch or Python, where the caller checks: its text differs between versions
        return UNCHECKED
    return difference(lawful, result)


def difference(lawful: Any, result: Any) -> str:
    """Return the fields of a record that differ from the lawful one, or the whole of another result."""
    if not is_dataclass(result) or type(lawful) is not type(result):
        return THE_SAME if shown(lawful) == shown(result) else shown(result)
    pairs = (
        (each.name, getattr(lawful, each.name, None), getattr(result, each.name, None))
        for each in fields(result)
    )
    changed = [
        f"{name}: {difference(before, after)}"
        for name, before, after in pairs
        if shown(before) != shown(after)
    ]
    return f"({', '.join(changed)})" if changed else THE_SAME


def shown(value: Any, depth: int = 3) -> str:
    """Return the text of a result: tensors by shape, dtype and sum, records by fields down to a depth."""
    if isinstance(value, Tensor):
        total = value.double().nan_to_num(0, 0, 0).sum().item() if not value.is_complex() else 0.0
        return f"{str(value.dtype)[6:]}{list(value.shape)} sum {total:.4g}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(shown(each, depth) for each in value)})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(shown, value)))}}}"
    if isinstance(value, torch.nn.Module) or type(value).__repr__ is object.__repr__ or not depth:
        return type(value).__name__
    if is_dataclass(value) and not isinstance(value, type):
        held = ((each.name, getattr(value, each.name, None)) for each in fields(value) if each.repr)
        return f"{type(value).__name__}({', '.join(f'{name}={shown(own, depth - 1)}' for name, own in held)})"
    return ADDRESS.sub("", repr(value))[:MAX_SHOWN]
