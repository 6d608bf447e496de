"""`MemoryStorage`: storage of tensors in a dict, for tests and for weights built in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from threading import Lock
from typing import Self

from qload.dtypes import STORED
from qload.errors import checked
from qload.lazy_torch import Tensor, torch
from qload.storage.protocol import TensorInfo, bounds, check_name, check_out, missing


class MemoryStorage:
    """Storage of tensors in a dict: copies on entry and on each read, with read counts.

    `reads` counts the reads of each tensor, `bytes_read` the bytes of all reads.

    Parameters
    ----------
    tensors
        Tensors by full name, as in files.

    Examples
    --------
    >>> import torch
    >>> from qload import MemoryStorage
    >>> storage = MemoryStorage({"up.weight": torch.arange(8).reshape(4, 2)})
    >>> storage.info("up.weight").shape
    (4, 2)
    >>> storage.read("up.weight", (slice(1, 3),))
    tensor([[2, 3],
            [4, 5]])
    >>> storage.bytes_read
    32
    """

    @checked
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.reads: Counter[str] = Counter()
        self.bytes_read: int = 0
        self._counting = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keys(self) -> Collection[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of the tensor `name`."""
        tensor = self._find(name)
        return TensorInfo(STORED[tensor.dtype], tuple(tensor.shape))

    @checked
    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Copy the elements `index` of the tensor `name`."""
        tensor = self._find(name)
        pairs = bounds(name, tuple(tensor.shape), index)
        part = tensor[tuple(slice(*pair) for pair in pairs)].cpu()
        piece = part.clone(memory_format=torch.contiguous_format)
        self._count(name, piece.nbytes)
        return piece

    @checked
    def read_into(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """Copy the elements `index` of the tensor `name` to `out`, of their shape and dtype.

        ArgumentError for another `out`.
        """
        tensor = self._find(name)
        pairs = bounds(name, tuple(tensor.shape), index)
        check_out(name, out, [stop - start for start, stop in pairs], tensor.dtype)
        out.copy_(tensor[tuple(slice(*pair) for pair in pairs)])
        self._count(name, out.nbytes)

    def close(self) -> None:
        """Do nothing: there is no file to close."""

    def _count(self, name: str, nbytes: int) -> None:
        with self._counting:
            self.reads[name] += 1
            self.bytes_read += nbytes

    def _find(self, name: str) -> Tensor:
        if type(name) is not str:
            check_name(name)
        if name not in self._tensors:
            raise missing(name, self._tensors.keys())
        return self._tensors[name]
