"""Layers of dialects in stored form, and their values by numpy alone."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Layer = tuple[dict[str, Tensor], Floats]  # tensors by suffix, and the weight (N, K)

BITS = np.arange(256)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(codes: NDArray[Any]) -> Floats:
    """Decode bytes of e4m3fn: a sign, four bits of exponent with a bias of 7, three of mantissa."""
    exponent, mantissa = BITS >> 3 & 15, BITS & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(BITS & 128, -size, size)[codes]


def e2m1(packed: NDArray[Any]) -> Floats:
    """Decode bytes (N, C) of two codes, the first in the low bits, to values (N, 2 C)."""
    return E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)]


def spread(scales: Floats, block: tuple[int, int], shape: tuple[int, int]) -> Floats:
    """Expand scales of blocks to one scale per element."""
    return scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def drawn(seed: int, shape: tuple[int, ...], high: int = 256) -> NDArray[np.uint8]:
    """Return random bytes."""
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.uint8)


def codes(seed: int, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Return random bytes of finite e4m3fn numbers."""
    made = drawn(seed, shape)
    return np.where(made & 127 == 127, 1, made).astype(np.uint8)


def as_fp8(stored: NDArray[np.uint8]) -> Tensor:
    """Return bytes as a tensor of e4m3fn."""
    return torch.from_numpy(stored).view(torch.float8_e4m3fn)


def floats(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Floats]:
    """Return positive scales in stored form, and their values."""
    made = torch.from_numpy(np.random.default_rng(seed).uniform(0.001, 0.02, shape)).to(dtype)
    return made, made.double().numpy()


def exponents(seed: int, shape: tuple[int, ...], *, float8: bool) -> tuple[Tensor, Floats]:
    """Return powers of two as bytes or as float8_e8m0fnu, and their values."""
    stored = (drawn(seed, shape, 12) + 116).astype(np.uint8)
    tensor = torch.from_numpy(stored)
    return tensor.view(torch.float8_e8m0fnu) if float8 else tensor, 2.0 ** (stored.astype(float) - 127)


def fp8(
    shape: tuple[int, int] = (64, 128),
    scales: tuple[int, ...] = (),
    block: tuple[int, int] | None = None,
    name: str = "weight_scale",
    dtype: torch.dtype = torch.float32,
) -> Layer:
    """Return a layer of FP8 with scales of a shape, each for a block of outputs and inputs."""
    stored = codes(1, shape)
    if dtype == torch.float8_e8m0fnu:
        tensor, values = exponents(2, scales, float8=True)
    else:
        tensor, values = floats(2, scales, dtype)
    wide = values.reshape(-1, 1) if block is None else spread(values, block, shape)
    return {"weight": as_fp8(stored), name: tensor}, e4m3(stored) * wide


def mxfp8(shape: tuple[int, int] = (64, 128), name: str = "weight_scale", *, float8: bool = False) -> Layer:
    """Return a layer of MXFP8: a power of two for 32 inputs."""
    stored = codes(3, shape)
    tensor, values = exponents(4, (shape[0], shape[1] // 32), float8=float8)
    return {"weight": as_fp8(stored), name: tensor}, e4m3(stored) * values.repeat(32, 1)


def mxfp4(
    shape: tuple[int, int] = (64, 128),
    names: tuple[str, str] = ("weight", "scale"),
    *,
    signed: bool = False,
    float8: bool = False,
) -> Layer:
    """Return a layer of MXFP4: two codes per byte, a power of two for 32 inputs."""
    packed = drawn(5, (shape[0], shape[1] // 2))
    tensor, values = exponents(6, (shape[0], shape[1] // 32), float8=float8)
    stored = torch.from_numpy(packed)
    layer = {names[0]: stored.view(torch.int8) if signed else stored, names[1]: tensor}
    return layer, e2m1(packed) * values.repeat(32, 1)


def nvfp4(shape: tuple[int, int] = (64, 128), *, compressed_tensors: bool = False) -> Layer:
    """Return a layer of NVFP4: two codes per byte, a scale of e4m3 for 16 inputs, one for the tensor."""
    packed, scales = drawn(7, (shape[0], shape[1] // 2)), drawn(8, (shape[0], shape[1] // 16), 126)
    second, value = floats(9, (1,))
    values = e4m3(scales)
    both = (values.astype(np.float32) / value.astype(np.float32)) if compressed_tensors else values * value
    layer = {"weight_scale": as_fp8(scales)}
    if compressed_tensors:
        layer |= {"weight_packed": torch.from_numpy(packed), "weight_global_scale": second}
    else:
        layer |= {"weight": torch.from_numpy(packed), "weight_scale_2": second}
    return layer, e2m1(packed) * both.astype(np.float32).repeat(16, 1)


def packed(shape: tuple[int, int] = (64, 128), bits: int = 4, group: int = 32) -> Layer:
    """Return a layer of pack-quantized, symmetric: codes along K in words, the first in the low bits."""
    made = drawn(10, shape, 2**bits).astype(np.int64)
    fields = made.reshape(shape[0], -1, 32 // bits) << bits * np.arange(32 // bits)
    words = fields.sum(-1).astype(np.uint32).view(np.int32)
    scale, values = floats(11, (shape[0], shape[1] // group), torch.bfloat16)
    layer = {
        "weight_packed": torch.from_numpy(words),
        "weight_scale": scale,
        "weight_shape": torch.tensor(shape),
    }
    return layer, (made - 2 ** (bits - 1)) * values.repeat(group, 1)


def int8(scales: tuple[int, ...], shape: tuple[int, int] = (64, 128)) -> Layer:
    """Return a layer of 8-bit integers with a scale for the tensor or for each output."""
    stored = drawn(13, shape).view(np.int8)
    scale, values = floats(14, scales)
    return {"weight": torch.from_numpy(stored), "weight_scale": scale}, stored * values.reshape(-1, 1)


def gptq(shape: tuple[int, int] = (64, 128), group: int = 32) -> dict[str, Tensor]:
    """Return a GPTQ layer of 4 bits with arbitrary values."""
    N, K = shape
    return {
        "qweight": torch.from_numpy(drawn(12, (K // 8, N * 4))).view(torch.int32),
        "qzeros": torch.full((K // group, N // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.ones(K // group, N, dtype=torch.float16),
        "g_idx": torch.arange(K, dtype=torch.int32) // group,
    }
