"""Damage to formats with a fixture of one layer: each kind once, with the damaged tensor as parameter."""

import json
from collections.abc import Callable

import torch
from torch import Tensor

from tests.verify.damage import Case

Damage = Callable[[Case], None]


def name_of(case: Case, suffix: str) -> str:
    """Return the only tensor name with this ending."""
    (name,) = [name for name in case.tensors if name.endswith(suffix)]
    return name


def _changed(suffix: str, change: Callable[[Tensor], Tensor]) -> Damage:
    def damage(case: Case) -> None:
        name = name_of(case, suffix)
        case.tensors[name] = change(case.tensors[name].clone())

    return damage


def dropped(suffix: str) -> Damage:
    """Remove the tensor."""

    def damage(case: Case) -> None:
        del case.tensors[name_of(case, suffix)]

    return damage


def alone(suffix: str) -> Damage:
    """Remove all tensors but this one."""

    def damage(case: Case) -> None:
        kept = name_of(case, suffix)
        for name in case.tensors.keys() - {kept}:
            del case.tensors[name]

    return damage


def emptied(case: Case) -> None:
    """Remove the quantized layer; a norm is left."""
    case.tensors.clear()
    case.tensors["model.norm.weight"] = torch.ones(8)


def copied(suffix: str, as_: str) -> Damage:
    """Store the tensor twice, the second time under another name."""

    def damage(case: Case) -> None:
        name = name_of(case, suffix)
        case.tensors[name.removesuffix(suffix) + as_] = case.tensors[name].clone()

    return damage


def set_to(suffix: str, value: float) -> Damage:
    """Set the first value of a float tensor."""
    return _changed(suffix, lambda tensor: _first(tensor, torch.tensor(value).to(tensor.dtype)))


def byte(suffix: str, value: int) -> Damage:
    """Set the first byte of a tensor of bytes or one-byte floats."""

    def change(tensor: Tensor) -> Tensor:
        bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        return _first(bits, torch.tensor(value).to(bits.dtype)).view(tensor.dtype)

    return _changed(suffix, change)


def zeros(suffix: str) -> Damage:
    """Set every value to zero."""
    return _changed(suffix, torch.zeros_like)


def retyped(suffix: str, dtype: torch.dtype) -> Damage:
    """Store the same values in another dtype."""
    return _changed(suffix, lambda tensor: tensor.to(dtype))


def rolled(suffix: str, dim: int = 0) -> Damage:
    """Move each entry to the next position along an axis."""
    return _changed(
        suffix, lambda tensor: tensor.view(torch.uint8).roll(tensor.element_size(), dim).view(tensor.dtype)
        if tensor.element_size() == 1
        else tensor.roll(1, dim)
    )  # fmt: skip


def nibbles_swapped(suffix: str) -> Damage:
    """Swap the two codes of every byte."""

    def change(tensor: Tensor) -> Tensor:
        bits = tensor.contiguous().view(torch.uint8)
        return ((bits >> 4) | (bits << 4)).view(tensor.dtype)

    return _changed(suffix, change)


def longer(suffix: str) -> Damage:
    """Add one entry along the first axis."""
    return _changed(suffix, lambda tensor: torch.cat([tensor, tensor[:1]]))


def without_rows(suffix: str) -> Damage:
    """Remove all rows of a tensor."""
    return _changed(suffix, lambda tensor: tensor.reshape(-1, *tensor.shape[1:])[:0])


def truncated(suffix: str) -> Damage:
    """Truncate a blob within its JSON."""
    return _changed(suffix, lambda tensor: tensor[:-3])


def says(suffix: str, key: str, value: object) -> Damage:
    """Change one value in a blob of JSON."""

    def change(tensor: Tensor) -> Tensor:
        state = {**json.loads(bytes(tensor.tolist())), key: value}
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return _changed(suffix, change)


def bias(*shape: int, dtype: torch.dtype = torch.float16, beside: str) -> Damage:
    """Add a bias to the layer."""

    def damage(case: Case) -> None:
        prefix = name_of(case, beside).removesuffix(beside)
        case.tensors[f"{prefix}bias"] = torch.ones(*shape, dtype=dtype)

    return damage


def _first(tensor: Tensor, value: Tensor) -> Tensor:
    if tensor.element_size() == 1 and tensor.is_floating_point():
        bits = _first(tensor.view(torch.uint8), value.view(torch.uint8))
        return bits.view(tensor.dtype)
    tensor.view(-1)[0] = value
    return tensor
