"""Casts of floats: allowed dtypes, the check of an `out` tensor, and the check that no value is lost."""

from __future__ import annotations

from qload import devices, dtypes
from qload.dtypes import STORED, TORCH, Dtype, DtypeLike
from qload.errors import ArgumentError, CastError, ShapeError
from qload.lazy_torch import Tensor, torch
from qload.spec.tensor import Shape


def check_cast(
    tensor: str,
    before: Tensor,
    after: Tensor,
    *,
    tiny: bool,
    remedy: str,
    stored: torch.dtype | None = None,
) -> None:
    """Raise CastError for an infinity or NaN in `after` in place of a number in `before`.

    `tiny`: also for a number with an error of more than one rounding, now 0 or subnormal: lost bits of a
    scale affect every weight of its group. `stored`: dtype for the message, if `before` was computed.
    """
    dtype = torch.float64 if before.dtype == torch.float64 else torch.float32  # to save memory
    wide, got = before.detach().to(after.device, dtype), after.detach().to(dtype)
    lost = ~torch.isfinite(got) & torch.isfinite(wide)
    if tiny:
        unit = torch.finfo(after.dtype).eps / 2
        lost |= (got - wide).abs() > unit * wide.abs()
    if bool(lost.any()):
        source, target = (str(t).removeprefix("torch.") for t in (stored or before.dtype, after.dtype))
        raise CastError(tensor, source, target, float(wide[lost][0]), int(lost.sum()), remedy)


FLOAT_DTYPES = (
    dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.float64,
    dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.float8_e4m3fnuz, dtypes.float8_e5m2fnuz,
)  # fmt: skip


def check_float(dtype: object) -> None:
    """Raise ArgumentError for a dtype that truncates weights or has no sign."""
    if not (isinstance(dtype, torch.dtype | Dtype) and STORED[dtype] in FLOAT_DTYPES):
        names = ", ".join(str(allowed).removeprefix("torch.") for allowed in FLOAT_DTYPES)
        raise ArgumentError("dtype", f"one of torch's {names}", str(dtype))


def check_out(out: Tensor, shape: Shape, device: torch.device, *read: Tensor) -> None:
    """Check that a dequantized weight of `shape` can be written to `out` during reads of other tensors."""
    devices.check_writable(out)
    if tuple(out.shape) != tuple(shape):
        raise ShapeError("out", f"{tuple(shape)}, as the weight", tuple(out.shape))
    if out.device != device or STORED[out.dtype] not in FLOAT_DTYPES:
        raise ArgumentError("out", f"floats on {device}", f"{out.dtype} on {out.device}")
    if any(devices.shares_memory(out, tensor) for tensor in read):
        raise ArgumentError("out", "memory of its own", "memory of the weight's tensors")


def rounded(exact: Tensor, dtype: DtypeLike, out: Tensor | None = None) -> Tensor:
    """Round an exact weight to a dtype, or into `out`."""
    if out is None:
        check_float(dtype)
        return exact.to(TORCH[dtype])
    check_out(out, tuple(exact.shape), exact.device)
    return out.copy_(exact)
