"""Refuse layers with scales that are NaN or infinite: such a scale spoils all weights of its group.

Ranks that load a share of a layer examine the scales of all of it, on the CPU: all ranks refuse with one
sentence. Codes are not read for it.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from qload.errors import ArgumentError, NonfiniteScaleError
from qload.loader.description import LayerDescription
from qload.loader.layer_values import whole_source
from qload.loader.source import TensorSource, fact_of
from qload.spec import Role, TensorSpec

Nonfinite = Literal["error", "allow"]
CHOICES: tuple[Nonfinite, ...] = ("error", "allow")
E8M0 = torch.float8_e8m0fnu
NAN_BITS = {E8M0: (0xFF, 0xFF), torch.float8_e4m3fn: (0x7F, 0x7F)}  # dtype -> (mask, bits of a NaN)
REMEDY = (
    "remedy   fetch or quantize the layer again (qload verify lists all such tensors), "
    'or load it as it is by nonfinite="allow" (--nonfinite allow)'
)


def check_nonfinite(nonfinite: object) -> None:
    """ArgumentError for a setting other than "error" and "allow"."""
    if nonfinite not in CHOICES:
        raise ArgumentError("nonfinite", "'error' or 'allow'", repr(nonfinite))


def refuses_nonfinite(source: TensorSource) -> bool:
    """Whether loads from `source` refuse scales that are not finite; those from sources of others do."""
    return getattr(source, "nonfinite", "error") == "error"


def check_scales(
    source: TensorSource, layers: Iterable[LayerDescription], tensors: Mapping[str, Tensor], *, whole: bool
) -> None:
    """Raise NonfiniteScaleError for the first tensor of the `layers` with such a scale.

    Parameters
    ----------
    source, layers
        Where they are stored, and the parts of one load in order.
    tensors
        What the load has read, by the names of fields, the parts joined.
    whole
        Whether that is all this load depends on, as it is for a world of one rank.
    """
    layers = list(layers)
    for spec in layers[0].specs:
        if spec.role is not Role.SCALE:
            continue
        read = tensors.get(spec.name)
        on_cpu = read is not None and read.device.type == "cpu"  # elsewhere an answer is waited for
        if read is not None and (read.is_meta or (whole and on_cpu and is_finite(read, spec))):
            continue
        for layer in layers:
            name = layer.names.full(spec.name)
            if not (source.info(name).dtype.is_floating_point or spec.is_exponents):
                continue  # whole numbers, which others scale
            stored = layer.facts[spec.name] if spec.name in layer.facts else _stored(source, name, spec)
            examined = read if stored is None else stored
            if examined is not None and not is_finite(examined, spec):
                raise _error(name, examined, spec)


def is_finite(scales: Tensor, spec: TensorSpec) -> bool:
    """Whether no scale is NaN or infinite; True for whole numbers."""
    floats = _floats(scales, spec)
    if floats is None or not floats.numel():
        return True
    if floats.dtype in NAN_BITS:
        mask, nan = NAN_BITS[floats.dtype]
        return int((floats.view(torch.uint8) & mask).amax()) != nan
    return bool(_finite(floats).all())


def _finite(floats: Tensor) -> Tensor:
    return torch.isfinite(floats.float() if floats.dtype.itemsize == 1 else floats)


def _floats(scales: Tensor, spec: TensorSpec) -> Tensor | None:
    """The scales as floats, bytes of exponents too; None for whole numbers, and without values."""
    if scales.is_meta:
        return None
    if spec.is_exponents and scales.dtype == torch.uint8:
        return scales.view(E8M0)
    return scales if scales.dtype.is_floating_point else None


def _stored(source: TensorSource, name: str, spec: TensorSpec) -> Tensor | None:
    """All of a tensor, on the CPU where the source can; None where an engine has a part of it here."""
    root = whole_source(source)
    readable = getattr(getattr(root, "storage", None), "readable", None)
    if readable is not None and readable(name) != tuple((0, size) for size in root.info(name).shape):
        return None
    return fact_of(root, name, spec.role)


def _error(name: str, scales: Tensor, spec: TensorSpec) -> NonfiniteScaleError:
    floats = _floats(scales, spec)
    assert floats is not None  # or it is finite
    wrong = (~_finite(floats)).nonzero().cpu()
    first = tuple(wrong[0].tolist())
    got = f"{float(floats[first]):g} at {first}; {wrong.shape[0]} of {scales.numel()} are not finite"
    return NonfiniteScaleError(name, "has scales that are not finite", "finite numbers", got, REMEDY)
