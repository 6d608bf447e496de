"""Products of llama.cpp, by the libraries that its Python build brings along (`llama-cpp-python`).

Weights of 4 or 8 bits have a scale for each 32 inputs, and inputs become whole numbers of 8 bits in blocks of
32, so its outputs are further off than those of a product of floats. Weights lie in the order that llama.cpp
brings them to when it loads a model, where it has one for them.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload.devices import in_large_pages

TYPES = {"Q4_0": 2, "Q8_0": 8}  # of `enum ggml_type`
REORDERED = ("Q4_0",)  # which have an order of their own on processors of this kind
FLOAT32 = 0
LIBRARIES = ("ggml-base", "ggml-cpu")  # in the order in which they need each other
ROOM = 1 << 24  # bytes of what ggml says of tensors and graphs
WORST = 0.25  # of the length of the outputs, by which rounding to 4 bits puts off random ones at most


class _Room(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_: ClassVar = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("empty", ctypes.c_bool)]


def libraries() -> Any:
    """The functions of ggml, or ImportError where llama.cpp's Python build is not installed."""
    found = find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise ImportError("llama_cpp")
    folder, held = Path(found.origin).parent / "lib", []
    for name in LIBRARIES:
        files = sorted(folder.glob(f"*{name}.*"))
        if not files:
            raise ImportError(f"llama_cpp brings no {name}")
        held.append(ctypes.CDLL(str(files[0]), mode=ctypes.RTLD_GLOBAL))
    return _Functions(held)


class _Functions:
    """Functions by name, each of which returns a pointer or a size unless it is told otherwise."""

    def __init__(self, held: Sequence[ctypes.CDLL]) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Callable[..., Any]:
        library = next(each for each in self._held if hasattr(each, name))
        function = getattr(library, name)
        function.restype = ctypes.c_void_p
        return partial(_called, function)


def _called(function: Any, *asked: Any) -> Any:
    """With numbers and addresses as they are wide in C."""
    return function(*(ctypes.c_void_p(each) if isinstance(each, int) else each for each in asked))


class Layers:
    """As many copies of a random layer as are asked for, each a call of `multiply`."""

    def __init__(self, kind: str, K: int, N: int, copies: int, threads: int) -> None:
        self.ggml, self.K, self.N = libraries(), K, N
        ggml = self.ggml
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        ggml.ggml_log_set(self._quiet, None)
        self.backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self.backend, ctypes.c_int(threads))
        room = self._room()
        self.weights = [ggml.ggml_new_tensor_2d(room, ctypes.c_int(TYPES[kind]), K, N) for _ in range(copies)]
        buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(room, self._order(kind))
        size = ggml.ggml_nbytes(self.weights[0])
        base = ggml.ggml_backend_buffer_get_base(buffer)
        in_large_pages(
            torch.frombuffer((ctypes.c_uint8 * (copies * size)).from_address(base), dtype=torch.uint8)
        )
        self.dense = torch.randn(N, K)
        codes = torch.empty(size, dtype=torch.uint8)
        ggml.ggml_quantize_chunk(
            ctypes.c_int(TYPES[kind]), self.dense.data_ptr(), codes.data_ptr(), 0, N, K, None
        )
        for weight in self.weights:
            ggml.ggml_backend_tensor_set(weight, codes.data_ptr(), 0, size)
        self._graphs: dict[
            int, tuple[int, list[tuple[int, int]]]
        ] = {}  # inputs, and each graph and its outputs
        self._check(torch.randn(3, K))

    def multiply(self, copy: int, x: Tensor) -> Tensor:
        """`x` times a copy, as float32."""
        inputs, graphs = self._graphs_of(len(x))
        graph, outputs = graphs[copy]
        x = x.float().contiguous()
        ctypes.memmove(self.ggml.ggml_get_data(inputs), x.data_ptr(), x.nbytes)
        self.ggml.ggml_backend_graph_compute(self.backend, graph)
        y = torch.empty(len(x), self.N)
        ctypes.memmove(y.data_ptr(), self.ggml.ggml_get_data(outputs), y.nbytes)
        return y

    def _graphs_of(self, tokens: int) -> tuple[int, list[tuple[int, int]]]:
        if tokens not in self._graphs:
            ggml, room = self.ggml, self._room()
            inputs = ggml.ggml_new_tensor_2d(room, ctypes.c_int(FLOAT32), self.K, tokens)
            graphs = []
            for weight in self.weights:
                outputs, graph = ggml.ggml_mul_mat(room, weight, inputs), ggml.ggml_new_graph(room)
                ggml.ggml_build_forward_expand(graph, outputs)
                graphs.append((graph, outputs))
            ggml.ggml_backend_alloc_ctx_tensors(room, self.backend)
            self._graphs[tokens] = inputs, graphs
        return self._graphs[tokens]

    def _room(self) -> int:
        return int(self.ggml.ggml_init(_Room(ROOM, None, True)))

    def _order(self, kind: str) -> int:
        """Memory whose tensors are brought to the order that kernels like; ordinary where there is none."""
        ggml = self.ggml
        registry = ggml.ggml_backend_cpu_reg()
        device = ggml.ggml_backend_reg_dev_get(registry, 0)
        address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        ordinary = int(ggml.ggml_backend_cpu_buffer_type())
        if not address or kind not in REORDERED:
            return ordinary
        several = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        for each in several or ():
            if each is None:
                break
            if b"REPACK" in ctypes.string_at(ggml.ggml_backend_buft_name(each)):
                return int(each)
        return ordinary

    def _check(self, x: Tensor) -> None:
        want = x @ self.dense.T
        off = float((self.multiply(0, x) - want).norm() / want.norm())
        if not off < WORST:
            raise AssertionError(f"llama.cpp's outputs are off by {off:.2f} of their length")
