"""Blocks of ggml, drawn at random: qload gives the values of gguf-py and of llama.cpp's own C functions.

Only `nox -s outsiders` collects this file.
"""

import ctypes
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qload import GGUFConfig, GGUFWeight
from qload.storage import BLOCK_TYPES
from qload.storage.gguf_types import GGML_TYPES
from tests.bench.llama_cpp import libraries

BLOCKS, ROWS = 10_000, 100
UNKNOWN_TO_GGUF_PY = ("Q1_0", "Q2_0")  # gguf 0.19.0
NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}


class Traits(ctypes.Structure):
    """`struct ggml_type_traits`, as far as `to_float`."""

    _fields_: ClassVar = [
        ("name", ctypes.c_char_p),
        ("elements", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("nbytes", ctypes.c_size_t),
        ("quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


def drawn(kind: str) -> NDArray[np.uint8]:
    """Return rows of random bytes, with NaN and infinite scales among them."""
    shape = (ROWS, BLOCKS // ROWS * BLOCK_TYPES[kind].nbytes)
    return np.random.default_rng(NUMBERS[kind]).integers(0, 256, shape, np.uint8)


def check_values(kind: str, content: NDArray[np.uint8], want: NDArray[np.float32]) -> None:
    """Compare the bits of numbers, and the places of NaN."""
    blocks = torch.from_numpy(content).reshape(ROWS, BLOCKS // ROWS, -1)
    got = GGUFWeight(config=GGUFConfig(kind), blocks=blocks).dequantize().numpy()
    numbers = ~np.isnan(want)

    assert got.shape == want.shape == (ROWS, BLOCKS // ROWS * BLOCK_TYPES[kind].elements)
    assert np.array_equal(numbers, ~np.isnan(got))
    assert np.array_equal(got.view(np.int32)[numbers], want.view(np.int32)[numbers])


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES.keys() - set(UNKNOWN_TO_GGUF_PY)))
def test_drawn_blocks_have_the_values_of_gguf_py(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    content = drawn(kind)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(content, gguf.GGMLQuantizationType[kind])

    check_values(kind, content, want)


@pytest.fixture(scope="module")
def ggml() -> Any:
    try:
        return libraries()
    except ImportError as error:
        pytest.skip(f"llama-cpp-python is not installed: {error}")


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES))
def test_drawn_blocks_have_the_values_of_llama_cpp(kind: str, ggml: Any) -> None:
    address = ggml.ggml_get_type_traits(ctypes.c_int(NUMBERS[kind]))
    traits = ctypes.cast(address, ctypes.POINTER(Traits)).contents
    assert (traits.elements, traits.nbytes) == (BLOCK_TYPES[kind].elements, BLOCK_TYPES[kind].nbytes)
    content = drawn(kind)
    want = np.empty((ROWS, BLOCKS // ROWS * traits.elements), np.float32)
    traits.to_float(content.ctypes.data, want.ctypes.data, want.size)

    check_values(kind, content, want)
