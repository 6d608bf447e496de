"""Damage that nothing inside a checkpoint tells of, and a sound copy does: each kind once.

A function changes the model in place, or raises DoesNotApplyError with the reason why it cannot.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.verify.damage.model import DoesNotApplyError, Model, bytes_of
from tests.verify.damage.planted import pairs_of_layers

Plant = Callable[[Model], None]


def _alike(model: Model) -> tuple[str, str]:
    """The codes of a projection in two layers, which are of one shape and differ."""
    for codes in model.codes():
        for other in model.like(codes):
            same = model.tensors[other].shape == model.tensors[codes].shape
            if same and not bytes_of(model.tensors[other]).equal(bytes_of(model.tensors[codes])):
                return codes, other
    raise DoesNotApplyError("no two layers have the same projection")


def _fields(model: Model, codes: str) -> list[str]:
    lead = codes.rpartition("_blocks" if codes.endswith("_blocks") else ".")[0]
    return [name for name in model.tensors if name.startswith((f"{lead}.", f"{lead}_"))]


def _swap(model: Model, names: dict[str, str]) -> None:
    for name, other in names.items():
        model.tensors[name], model.tensors[other] = model.tensors[other], model.tensors[name]


def layers_exchanged(model: Model) -> None:
    """One projection of two layers of the model, with all that it has."""
    codes, other = _alike(model)
    number, another = codes.split(".layers.")[1].split(".")[0], other.split(".layers.")[1].split(".")[0]
    swapped = {
        name: name.replace(f".layers.{number}.", f".layers.{another}.") for name in _fields(model, codes)
    }
    if number == another or not all(name in model.tensors for name in swapped.values()):
        raise DoesNotApplyError("the two have other tensors")
    _swap(model, swapped)


def whole_layer_copied(model: Model) -> None:
    """A layer over the next with its norms and all, as models are lawfully made deeper; that is a note."""
    for name, other in pairs_of_layers(model).items():
        model.tensors[name] = model.tensors[other].clone()


def scales_of_another_layer(model: Model) -> None:
    codes, other = _alike(model)
    one, two = model.scales(codes), model.scales(other)
    if bytes_of(model.tensors[one]).equal(bytes_of(model.tensors[two])):
        raise DoesNotApplyError("both have the same scales")
    model.tensors[one] = model.tensors[two].clone()


def scales_rolled(model: Model) -> None:
    """By one group, or by one output where an output has one group."""
    for codes in model.codes():
        name = model.scales(codes)
        scales = model.tensors[name]
        data = scales.reshape(-1) if scales.ndim < 2 or 1 in scales.shape else scales
        if len(data) > 1 and scales.numel() > 1:
            rolled = data.view(_integers(data)).roll(1, 0).view(data.dtype).reshape(scales.shape)
            if not bytes_of(rolled.contiguous()).equal(bytes_of(scales.contiguous())):
                model.tensors[name] = rolled
                return
    raise DoesNotApplyError("one scale")


def nibbles_swapped(model: Model) -> None:
    """The two codes of every byte."""
    for codes in model.codes():
        if model.tensors[codes].dtype in (torch.uint8, torch.int32) and _bits(model, codes) == 4:
            data = bytes_of(model.tensors[codes])
            data.copy_(((data & 15) << 4) | (data >> 4))
            return
    raise DoesNotApplyError("no codes of four bits")


def rows_shifted(model: Model) -> None:
    """The rows of the codes by one."""
    codes = model.target()
    tensor = model.tensors[codes]
    if len(tensor) < 2:
        raise DoesNotApplyError("one row")
    model.tensors[codes] = tensor.view(_integers(tensor)).roll(1, 0).view(tensor.dtype)


def square_transposed(model: Model) -> None:
    """A plain square matrix, or one of codes of a byte."""
    for name, tensor in model.tensors.items():
        square = tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1] > 1
        whole = name in model.codes() or tensor.is_floating_point()
        if square and whole and ".layers." in name and name.endswith(".weight"):
            model.tensors[name] = tensor.view(_integers(tensor)).T.contiguous().view(tensor.dtype)
            return
    raise DoesNotApplyError("no square matrix of a value each place")


def bytes_replaced(model: Model) -> None:
    """Sixteen bytes by others that are as valid."""
    data = bytes_of(model.tensors[model.target(least=64)])
    data[16:32] = data[32:48].flip(0) ^ 1 if not data[16:32].equal(data[32:48].flip(0) ^ 1) else data[:16] ^ 1


def _integers(tensor: Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def _bits(model: Model, codes: str) -> int:
    if codes.endswith(("_blocks", ".weight_packed")) or model.tensors[codes].dtype is torch.uint8:
        return 4 if "uint8" in str(model.tensors[codes].dtype) else int(_group(model).get("num_bits", 4))
    return int(model.quantization.get("bits") or model.quantization.get("w_bit") or 4)


def _group(model: Model) -> dict[str, int]:
    groups = model.quantization.get("config_groups") or {}
    for group in groups.values():
        section: dict[str, int] = group.get("weights") or {}
        return section
    return {}


PLANTS: tuple[Plant, ...] = (
    layers_exchanged, whole_layer_copied, scales_of_another_layer, scales_rolled, nibbles_swapped,
    rows_shifted, square_transposed, bytes_replaced,
)  # fmt: skip
