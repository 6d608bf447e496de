"""Suites of ggml's blocks as gguf-py and llama.cpp dequantize them."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from tests.bench.llama_cpp import libraries
from tests.outsiders.ggml_blocks import NUMBERS, Traits
from tests.outsiders.tensor_suite import DequantizedSuite


class TestGGUFPy(DequantizedSuite):
    """Blocks of 13 types."""

    format = "gguf"
    subject = "quants.dequantize"
    package = "gguf"

    def pack(self, weight: Any) -> Any:
        gguf = pytest.importorskip("gguf", reason="gguf is not installed")
        blocks = np.ascontiguousarray(weight.blocks.reshape(len(weight.blocks), -1).numpy())
        return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[weight.config.type]))


class TestLlamaCpp(TestGGUFPy):
    """The same by llama.cpp's functions of C."""

    subject = "ggml_get_type_traits().to_float"
    package = "llama-cpp-python"

    def pack(self, weight: Any) -> Any:
        try:
            ggml = libraries()
        except ImportError as error:
            pytest.skip(f"llama-cpp-python is not installed: {error}")
        address = ggml.ggml_get_type_traits(ctypes.c_int(NUMBERS[weight.config.type]))
        traits = ctypes.cast(address, ctypes.POINTER(Traits)).contents
        blocks, want = weight.blocks.contiguous(), torch.empty(weight.shape)
        traits.to_float(blocks.data_ptr(), want.data_ptr(), want.numel())
        return want
