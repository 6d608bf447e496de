"""Layers for the CUDA module computed by hand, which stands in for the built one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from qload.devices import cuda, cuda_stored
from qload.formats import BNBConfig, BNBWeight, Fp8Config, Fp8Weight, GPTQConfig, GPTQWeight
from qload.kernel_formats import repack
from qload.kernels.cuda import byte_strips, exllama, marlin, module, strips
from qload.layouts import STORED_MINUS_ONE, Stored, gptq
from qload.native.modules import NativeModule
from tests.kernel_formats.bnb4_layers import bnb4
from tests.kernel_formats.fp4_layers import mxfp4, nvfp4
from tests.kernel_formats.marlin_layers import row_share
from tests.kernel_formats.test_mxfp8_strips import mxfp8
from tests.kernels.cuda_by_hand import STREAM, Hand

H = TypeVar("H", bound=Hand)
AMPERE, HOPPER = (8, 0), (9, 0)
OPERATORS = {
    "marlin": marlin._marlin,
    "strips": strips._strips,
    "exllama": exllama._exllama,
    "byte_strips": byte_strips._byte_strips,
}


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    with on_cpu(OPERATORS):
        yield


@contextmanager
def on_cpu(operators: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Run operators of the CUDA module on tensors of the CPU."""
    library = torch.library.Library("qload", "IMPL")
    for name, run in operators.items():
        library.impl(name, run, "CPU")
    yield
    library._destroy()


@pytest.fixture
def hand(chip: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Hand:
    return installed(Hand(chip), monkeypatch)


def installed(made: H, monkeypatch: pytest.MonkeyPatch) -> H:
    """Put a module in place of the built one, on a device of its capability."""
    chip = made.capability
    monkeypatch.setattr(module, "load", lambda name: NativeModule(made))
    for routines in (cuda, cuda_stored):
        monkeypatch.setattr(routines, "module_for", lambda *tensors: made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: chip)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


@cache
def layer(
    K: int, N: int, group: int, bits: int, dtype: torch.dtype, layout: str = "marlin",
    zeros: bool = False, act_order: bool = False, share: int = 1,
) -> Any:  # fmt: skip
    """Random codes, scales that are powers of two; `share`: one of so many ranks has these rows."""
    make, whole = torch.Generator().manual_seed(K + N), K * share
    groups = 1 if group == -1 else whole // group
    g_idx = torch.arange(whole) // (whole if group == -1 else group)
    points = torch.randint(1, 2**bits, (groups, N), generator=make)
    convention = STORED_MINUS_ONE if layout == "exllama" else Stored()
    stored = points if zeros else torch.full_like(points, 2 ** (bits - 1))
    weight = GPTQWeight(
        config=GPTQConfig(bits, group, convention),
        qweight=gptq.rows(bits).pack(torch.randint(2**bits, (whole, N), generator=make)),
        qzeros=convention.write(stored, gptq.columns(bits)),
        scales=(2.0 ** torch.randint(-3, 0, (groups, N), generator=make)).to(dtype),
        g_idx=(g_idx[torch.randperm(whole, generator=make)] if act_order else g_idx).to(torch.int32),
    )
    return repack(weight if share == 1 else row_share(weight, 0, share), layout)


@cache
def byte_layer(K: int, N: int, kind: str) -> Any:
    """FP8, int8, MXFP8, FP4 or nf4 in strips: small numbers, scales that are powers of two of a `kind`."""
    make = torch.Generator().manual_seed(K + N)
    if kind in ("nvfp4", "mxfp4"):
        shape, codes = (N, K // (16 if kind == "nvfp4" else 32)), torch.randint(16, (N, K), generator=make)
        powers = torch.randint(-3, 1, shape, generator=make)
        weight: Any = nvfp4(2.0**powers, codes) if kind == "nvfp4" else mxfp4(powers + 127, codes)
        return repack(weight, "strips")
    codes = torch.randint(-4, 5, (N, K), generator=make)
    if kind in ("nf4", "fp4"):  # codes of -1, 0 and 1
        codes = torch.tensor([0, 7, 15] if kind == "nf4" else [11, 0, 3])[
            torch.randint(3, (N, K), generator=make)
        ]
        absmax = 2.0 ** torch.randint(-3, 1, (N * K // 64,), generator=make)
        return repack(bnb4(codes, absmax, kind), "strips")
    if kind == "mxfp8":
        exponents = 127 + torch.randint(-3, 1, (N, K // 32), generator=make)
        return repack(mxfp8(exponents, codes.float().to(torch.float8_e4m3fn).view(torch.uint8)), "strips")
    shape = {
        "e5m2": (N, 1),
        "tensor": (1,),
        "channel": (N, 1),
        "block": (-(-N // 128), -(-K // 128)),
        "int8": (N,),
    }[kind]
    scales = 2.0 ** torch.randint(-3, 1, shape, generator=make)
    if kind == "int8":
        return repack(BNBWeight(config=BNBConfig(), weight=codes.to(torch.int8), SCB=127 * scales), "strips")
    config = Fp8Config("block", (128, 128)) if kind == "block" else Fp8Config()
    stored = codes.float().to(torch.float8_e5m2 if kind == "e5m2" else torch.float8_e4m3fn)
    return repack(Fp8Weight(config=config, weight=stored, weight_scale=scales), "strips")
