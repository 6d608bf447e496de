"""The native half of docs/extending/cuda-kernel.md compiles, and on a GPU it computes what the page says."""

import ctypes
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.testing import assert_reads_back, assert_sums_exactly, assert_within_bound
from tests.examples import pages
from tests.paths import ROOT

PAGE = "cuda-kernel"
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc on PATH")
LINEARS = "void add_linears(py::module_& module) {"
# What ctypes can call: the launcher under a plain name.
PLAIN_NAME = """
#include "quads.h"
extern "C" int run(const void* x, const void* w, const void* s, const void* z, const void* b, void* y,
                   int M, int K, int N, int group, int bfloat16, cudaStream_t stream) {
  const auto* zeros = static_cast<const uint8_t*>(z);
  return qload::cuda::quads({x, w, s, zeros, b, y, M, K, N, group, bfloat16 != 0}, stream);
}
"""


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    """A copy of csrc with the page's files and binding in their places."""
    copy = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", copy)
    for block in pages.blocks(PAGE, "cuda"):
        place, _, text = block.partition("\n")
        file = tmp_path / place.removeprefix("// ")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    bindings = copy / "cuda" / "bindings" / "linear.cpp"
    (binding,) = pages.blocks(PAGE, "cpp")
    text, include = bindings.read_text(), '#include "../mma/mma.h"\n'
    assert text.count(include) == text.count(LINEARS) == 1
    head = text.partition(LINEARS)[0].replace(include, f'#include "../quads/quads.h"\n{include}')
    bindings.write_text(f"{head}{LINEARS}\n{binding}}}\n}}\n")  # alone, as the others take their time
    return copy


def nvcc(*arguments: object) -> None:
    done = subprocess.run(
        [str(NVCC), "-std=c++17", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@needs_nvcc
def test_the_device_code_compiles(csrc: Path, tmp_path: Path) -> None:
    ptx = tmp_path / "quads.ptx"
    nvcc("-ptx", "-arch=compute_80", csrc / "cuda" / "quads" / "quads.cu", "-o", ptx)

    assert ptx.read_text().count(".entry") == 2


@pytest.mark.slow
@needs_nvcc
def test_the_binding_compiles(csrc: Path) -> None:
    pybind11 = pytest.importorskip("pybind11", reason="bindings need pybind11, which is not installed here")
    folders = pybind11.get_include(), sysconfig.get_path("include")
    nvcc(
        *(f"-I{each}" for each in folders),
        "-Xcompiler=-fsyntax-only",
        "-c",
        csrc / "cuda" / "bindings" / "linear.cpp",
    )


@pytest.mark.gpu
@needs_nvcc
def test_it_computes_what_the_page_says(csrc: Path) -> None:
    folder = csrc / "cuda" / "quads"
    (folder / "plain.cu").write_text(PLAIN_NAME)
    library = folder / "quads.so"
    parts = folder / "quads.cu", folder / "plain.cu"
    nvcc("-arch=native", "-shared", "-Xcompiler=-fPIC", *parts, "-o", library)
    page: Any = pages.module(PAGE)

    for dtype in (torch.float16, torch.bfloat16):
        for N, group in ((24, 16), (128, 32), (129, 64)):
            weight = page.small(N, dtype, group).to("cuda")
            kernel = runner(ctypes.CDLL(str(library)), weight)
            assert_reads_back(kernel, weight, dtype)
            for M in (1, 4):
                assert_sums_exactly(kernel, weight, dtype, M=M)
                x = torch.randn(M, 64, generator=torch.Generator().manual_seed(M)).to("cuda", dtype)
                assert_within_bound(kernel, weight, x)


def runner(library: Any, weight: Any) -> Callable[[Tensor], Tensor]:
    """x (M, K) -> (M, N) by the launcher."""
    N, K = weight.shape

    def run(x: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], N)
        tensors = x, weight.qweight, weight.scales, weight.zeros
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in tensors]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = x.shape[0], K, N, weight.config.group_size, int(x.dtype == torch.bfloat16)
        assert library.run(*pointers, None, ctypes.c_void_p(y.data_ptr()), *sizes, stream) == 0
        return y

    return run
