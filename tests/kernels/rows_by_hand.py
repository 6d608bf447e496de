"""The CPU module's products with rows of codes, by hand: plain torch over what lies at the addresses."""

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.devices.tensors import FLOATS
from qload.kernels import cpu
from qload.layouts import fp4
from qload.native.modules import NativeModule


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A module that multiplies rows; the numbers of tokens that it was asked for."""
    asked: list[int] = []

    def multiply_rows(isa: str, bits: int, sizes: Sequence[int], *rest: Any) -> None:
        asked.append(sizes[0])
        product(bits, sizes, *rest)

    module: Any = SimpleNamespace(multiply_rows=multiply_rows)
    monkeypatch.setattr(cpu, "load", lambda name: NativeModule(module))
    monkeypatch.setattr(cpu, "isa", lambda: "avx2")
    monkeypatch.setattr(cpu, "has_routines", lambda *tensors: True)
    return asked


def product(
    bits: int,
    sizes: Sequence[int],
    x: tuple[int, int],
    values: Sequence[Any],
    scales: tuple[int, float, bool],
    codes: int,
    row_bytes: int,
    bias: int,
    y: tuple[int, int],
    threads: int,
) -> None:
    """y (M, N) = x (M, K) times the rows, and the bias: sums in float32."""
    M, K, N, pitch = sizes
    inputs = at(x[0], (M - 1) * pitch + K, FLOATS[x[1]]).as_strided((M, K), (pitch, 1))
    stored = at(codes, (N - 1) * row_bytes + -(-K * bits // 8), torch.uint8)
    rows = stored.as_strided((N, -(-K * bits // 8)), (row_bytes, 1))
    made = inputs.float() @ meant(numbers(rows, bits, values[0])[:, :K], bits, values, scales).T
    if bias:
        made = made + at(bias, N, torch.float32)
    at(y[0], M * N, FLOATS[y[1]]).copy_(made.flatten())


def numbers(rows: Tensor, bits: int, high_first: bool) -> Tensor:
    """Bytes (N, row bytes) -> codes, each in so many bits from the lowest on."""
    each = (rows[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    if high_first:
        each = each.unflatten(-1, (2, 4)).flip(-2)
    whole = each.flatten(1)[:, : rows.shape[1] * 8 // bits * bits].unflatten(1, (-1, bits))
    return (whole.long() << torch.arange(bits)).sum(-1)


def meant(codes: Tensor, bits: int, values: Sequence[Any], kind: tuple[int, float, bool]) -> Tensor:
    """What they stand for, in float32, as `qload.devices.cpu.values_of` and `CodeRows` say."""
    _, lookup, scales, zeros, groups, k_group, run, n_group, of_a_table, *_ = values
    divide, factor = values[10], values[11]
    N, K = codes.shape
    column = at(k_group, K, torch.int32).long() if k_group else torch.arange(K) // run
    row = at(n_group, N, torch.int32).long() if n_group else torch.arange(N) // of_a_table
    place = row[:, None] * groups + column
    w = at(lookup, 2**bits, torch.float32)[codes] if lookup else codes.float()
    if zeros:
        w = w - at(zeros, int(place.max()) + 1, torch.float32)[place]
    scale = floats(scales, int(place.max()) + 1, *kind)[place]
    return (w / scale if divide else w * scale) * factor


def floats(address: int, count: int, kind: int, second: float, divided: bool) -> Tensor:
    """Scales of a type of `qload.kernels.cpu.BYTE_SCALES`, as float32."""
    stored = at(address, count, cpu.BYTE_SCALES[kind])
    if kind == 0:
        return stored
    each = fp4.e8m0(stored) if stored.dtype == torch.uint8 else stored.float()
    return each / torch.tensor(second) if divided else each * torch.tensor(second)


def at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """The elements at an address."""
    held = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(held, dtype=dtype)
