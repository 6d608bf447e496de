"""Layers in the dialects of many programs, and their values by numpy alone, without an import of qload.

Each quantizer takes matrices (E, N, K) and returns their values, and tensors with a leading axis E by the
last part of the tensor's name. `together` requests one scale for all experts in place of one per matrix.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = NDArray[np.float64]
Fields = dict[str, Tensor]  # (E, ...) each, by the last part of the tensor's name

GROUP, BLOCK = 32, 32


# ---------- numbers ----------


def float_table(exponent_bits: int, mantissa_bits: int, bias: int) -> Values:
    """Return the value of each code of a small float; NaN for codes without a finite number."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = np.where(codes >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    unit = 1 << mantissa_bits
    normal = np.ldexp(1 + mantissa / unit, exponent - bias)
    values = sign * np.where(exponent == 0, np.ldexp(mantissa / unit, 1 - bias), normal)
    if (exponent_bits, mantissa_bits) == (4, 3):
        values[(codes & 0x7F) == 0x7F] = np.nan
    if (exponent_bits, mantissa_bits) == (5, 2):
        values[exponent == 31] = np.nan
    return np.asarray(values, dtype=np.float64)


E4M3, E5M2, E2M1 = float_table(4, 3, 7), float_table(5, 2, 15), float_table(2, 1, 1)
STORED = {"e4m3": (E4M3, torch.float8_e4m3fn, 448.0), "e5m2": (E5M2, torch.float8_e5m2, 57344.0)}


def nearest(values: Values, table: Values) -> NDArray[np.uint8]:
    """Return the code of the nearest value in a table, by bisection between neighbours."""
    finite = np.flatnonzero(np.isfinite(table))
    order = finite[np.argsort(table[finite], kind="stable")]
    ranked = table[order]
    return order[np.searchsorted((ranked[1:] + ranked[:-1]) / 2, values)].astype(np.uint8)


def rounded(values: Values, dtype: torch.dtype) -> Values:
    """Round to a float type; float32 to 12 bits, for exact products of codes and scales in float32."""
    if dtype == torch.bfloat16:
        bits = values.astype(np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    if dtype == torch.float16:
        return values.astype(np.float16).astype(np.float64)
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 4096) / 4096, exponent)


def as_floats(values: Values, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(dtype)


def as_bytes(codes: NDArray[Any], dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes, dtype=np.uint8)).view(dtype)


def as_exponents(exponents: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return exponents as E8M0: the exponent plus 127, as a byte or as float8_e8m0fnu."""
    return as_bytes(exponents.astype(np.int64) + 127, dtype)


def words(codes: NDArray[Any], bits: int = 4, dtype: torch.dtype = torch.int32) -> Tensor:
    """Pack codes along the last axis into 32-bit words, the first code in the low bits."""
    per = 32 // bits
    split = codes.astype(np.uint64).reshape(*codes.shape[:-1], -1, per)
    packed = (split << (bits * np.arange(per, dtype=np.uint64))).sum(-1).astype(np.uint32)
    return torch.from_numpy(packed.view(np.int32).copy()).view(dtype)


def pairs(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack two codes of 4 bits per byte along the last axis, the first code in the low bits."""
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def grouped(values: Values, size: int) -> Values:
    return values.reshape(*values.shape[:-1], -1, size)


def spread(values: Values, *sizes: int) -> Values:
    """Repeat each entry of the last axes."""
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        values = values.repeat(size, axis)
    return values


# ---------- quantizers: (E, N, K) -> tensors with a leading E, and their values ----------


def plain(w: Values, *, dtype: torch.dtype, together: bool = False) -> tuple[Fields, Values]:
    values = rounded(w, dtype)
    return {"weight": as_floats(values, dtype)}, values


def fp8(
    w: Values, *, kind: str = "e4m3", per: str = "tensor", scale: str = "weight_scale",
    dtype: torch.dtype = torch.float32, axes: int = 0, static: bool = False, together: bool = False,
) -> tuple[Fields, Values]:  # fmt: skip
    """Quantize to FP8; `axes` is the number of stored axes of a scale per tensor or per output."""
    table, stored, most = STORED[kind]
    E, N, K = w.shape
    if per == "block":
        size = np.abs(w.reshape(E, N // BLOCK, BLOCK, K // BLOCK, BLOCK)).max((2, 4))
    elif per == "channel":
        size = np.abs(w).max(2, keepdims=True)
    else:
        size = np.abs(w).max((0, 1, 2) if together else (1, 2), keepdims=True) * np.ones((E, 1, 1))
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = np.ceil(np.log2(size / most))
        scales, tensor = np.exp2(exponents), as_exponents(exponents, dtype)
    else:
        scales = rounded(size / most, dtype)
        tensor = as_floats(scales, dtype)
    if per != "block":
        tensor = tensor.reshape(E, *(() if per == "tensor" else (N,)), *[1] * axes)
    wide = spread(scales, BLOCK, BLOCK) if per == "block" else scales
    codes = nearest(np.clip(w / wide, -most, most), table)
    found: Fields = {"weight": as_bytes(codes, stored), scale: tensor}
    if static:
        found["input_scale"] = torch.full((E, *[1] * axes), 0.015625)
    return found, table[codes] * wide


def int8(
    w: Values, *, group: int | None, dtype: torch.dtype, together: bool = False
) -> tuple[Fields, Values]:
    split = grouped(w, group or w.shape[-1])
    scales = rounded(np.abs(split).max(-1) / 127, dtype)
    codes = np.clip(np.round(split / scales[..., None]), -128, 127)
    found = torch.from_numpy(codes.reshape(w.shape).astype(np.int8))
    return {"weight": found, "weight_scale": as_floats(scales, dtype)}, (codes * scales[..., None]).reshape(
        w.shape
    )


def integers(
    w: Values, size: int, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[NDArray[np.int64], NDArray[np.int64], Values, Values]:
    """Quantize to integers: codes (E, N, K), zero points and scales (E, N, G), values."""
    split, top = grouped(w, size), (1 << bits) - 1
    low, high = np.minimum(split.min(-1), -1e-3), np.maximum(split.max(-1), 1e-3)
    scales = rounded(np.abs(split).max(-1) * 2 / top if symmetric else (high - low) / top, dtype)
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if not symmetric:
        zeros = np.clip(np.round(-low / scales), 1, top)
    codes = np.clip(np.round(split / scales[..., None]) + zeros[..., None], 0, top).astype(np.int64)
    values = ((codes - zeros[..., None]) * scales[..., None]).reshape(w.shape)
    return codes.reshape(w.shape), zeros.astype(np.int64), scales, values


def packed(
    w: Values, *, bits: int = 4, group: int = GROUP, symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16, together: bool = False,
) -> tuple[Fields, Values]:  # fmt: skip
    E, N, K = w.shape
    codes, zeros, scales, values = integers(w, K if group < 0 else group, bits, symmetric, dtype)
    found = {"weight_packed": words(codes, bits), "weight_scale": as_floats(scales, dtype)}
    if not symmetric:
        found["weight_zero_point"] = words(zeros.swapaxes(1, 2), bits).transpose(1, 2).contiguous()
    return found | {"weight_shape": torch.tensor([[N, K]] * E)}, values


def gptq(
    w: Values, *, v2: bool, symmetric: bool, g_idx: bool = True, together: bool = False
) -> tuple[Fields, Values]:
    E, _, K = w.shape
    codes, zeros, scales, values = integers(w, GROUP, 4, symmetric, torch.float16)
    found = {
        "qweight": words(codes).transpose(1, 2).contiguous(),
        "qzeros": words((zeros if v2 else zeros - 1).swapaxes(1, 2)),
        "scales": as_floats(scales.swapaxes(1, 2), torch.float16),
    }
    if g_idx:
        found["g_idx"] = (torch.arange(K, dtype=torch.int32) // GROUP).repeat(E, 1)
    return found, values


def awq(w: Values, *, together: bool = False) -> tuple[Fields, Values]:
    codes, zeros, scales, values = integers(w, GROUP, 4, False, torch.float16)

    def interleaved(numbers: NDArray[np.int64]) -> Tensor:
        split = numbers.swapaxes(1, 2).reshape(numbers.shape[0], numbers.shape[2], -1, 8)
        return words(split[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(*split.shape[:2], -1))

    fields = {"qweight": interleaved(codes), "qzeros": interleaved(zeros)}
    return fields | {"scales": as_floats(scales.swapaxes(1, 2), torch.float16)}, values


def nvfp4(w: Values, *, owner: str, group: int = 16, together: bool = False) -> tuple[Fields, Values]:
    """Quantize to NVFP4: ModelOpt multiplies by a global scale, compressed-tensors divides by one."""
    E = w.shape[0]
    largest = np.abs(w).max((0, 1, 2) if together else (1, 2), keepdims=True) * np.ones((E, 1, 1))
    whole = largest / (6 * 448)
    whole = rounded(whole, torch.bfloat16) if owner == "modelopt" else np.exp2(np.ceil(np.log2(whole)))
    split = grouped(w, group)
    eights = nearest(np.abs(split).max(-1) / 6 / whole, E4M3)
    scales = (E4M3[eights] * whole)[..., None]
    codes = nearest(split / scales, E2M1)
    values = (E2M1[codes] * scales).reshape(w.shape)
    fours, of_groups = as_bytes(pairs(codes.reshape(w.shape))), as_bytes(eights, torch.float8_e4m3fn)
    if owner == "modelopt":
        found = {"weight": fours, "weight_scale": of_groups}
        return found | {"weight_scale_2": as_floats(whole.reshape(E), torch.float32)}, values
    found = {"weight_packed": fours, "weight_scale": of_groups}
    return found | {"weight_global_scale": as_floats(1 / whole.reshape(E, 1), torch.float32)}, values


def mx(
    w: Values, *, bits: int, weight: str = "weight", scale: str = "weight_scale",
    dtype: torch.dtype = torch.uint8, stored: torch.dtype = torch.uint8, together: bool = False,
) -> tuple[Fields, Values]:  # fmt: skip
    """Quantize groups of 32 with a power of two as scale: e2m1 pairs as bytes of type `stored`, or e4m3."""
    split, (table, most) = grouped(w, 32), ((E2M1, 6.0) if bits == 4 else (E4M3, 448.0))
    exponents = np.ceil(np.log2(np.abs(split).max(-1) / most))
    codes = nearest(split / np.exp2(exponents)[..., None], table)
    values = (table[codes] * np.exp2(exponents)[..., None]).reshape(w.shape)
    flat = codes.reshape(w.shape)
    whole = as_bytes(pairs(flat), stored) if bits == 4 else as_bytes(flat, torch.float8_e4m3fn)
    return {weight: whole, scale: as_exponents(exponents, dtype)}, values


def mx_blocks(w: Values, *, together: bool = False) -> tuple[Fields, Values]:
    """Store MXFP4 in the form of gpt-oss: blocks of 16 bytes as a separate axis."""
    found, values = mx(w, bits=4)
    blocks = found["weight"].reshape(*w.shape[:2], -1, 16)
    return {"blocks": blocks, "scales": found["weight_scale"]}, values


def nobodys(w: Values, *, dtype: torch.dtype, scale: str, together: bool = False) -> tuple[Fields, Values]:
    """Pack signed codes of 4 bits in pairs, in an undocumented format of no program."""
    split = grouped(w, GROUP)
    scales = rounded(np.abs(split).max(-1) / 7, torch.bfloat16)
    codes = np.round(split / scales[..., None]).astype(np.int64)
    values = (codes * scales[..., None]).reshape(w.shape)
    nibbles = pairs((codes & 15).reshape(w.shape))
    return {"weight": as_bytes(nibbles, dtype), scale: as_floats(scales, torch.bfloat16)}, values


def mlx(w: Values, *, together: bool = False) -> tuple[Fields, Values]:
    codes, zeros, scales, values = integers(w, GROUP, 4, False, torch.bfloat16)
    biases = rounded(-zeros * scales, torch.bfloat16)
    values = (grouped(codes.astype(np.float64), GROUP) * scales[..., None] + biases[..., None]).reshape(
        w.shape
    )
    found = {"weight": words(codes, dtype=torch.uint32), "scales": as_floats(scales, torch.bfloat16)}
    return found | {"biases": as_floats(biases, torch.bfloat16)}, values


def quanto(w: Values, *, together: bool = False) -> tuple[Fields, Values]:
    found, values = int8(w, group=None, dtype=torch.bfloat16)
    one = torch.ones(w.shape[0])
    return {
        "weight._data": found["weight"], "weight._scale": found["weight_scale"],
        "input_scale": one, "output_scale": one.clone(),
    }, values  # fmt: skip
