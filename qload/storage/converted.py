"""`ConvertedStorage`: base of storages that convert some tensors of their files at each read."""

from collections.abc import Mapping, Sequence

import numpy as np

from qload.errors import checked
from qload.lazy_torch import Tensor
from qload.storage.protocol import AskedBytes, AskedRows, bounds, check_memory, check_out
from qload.storage.safetensors import SafetensorsStorage


class ConvertedStorage(SafetensorsStorage):
    """Storage with views: tensors that are converted at each read.

    Subclasses fill `_views` by name, and convert in `read` and `read_array`.
    """

    _views: Mapping[str, object]

    @checked
    def read_into(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """Read the elements `index` of the tensor `name` into `out`, of their shape and dtype."""
        if name not in self._views:
            super().read_into(name, index, out)
            return
        info = self.info(name)
        check_out(name, out, [stop - start for start, stop in bounds(name, info.shape, index)], info.dtype)
        out.copy_(self.read(name, index))

    @checked
    def read_bytes_into(self, asked: Sequence[AskedBytes]) -> None:
        """Read the bytes of each (name, index, memory) in `asked`, row major, into its memory."""
        super().read_bytes_into([entry for entry in asked if entry[0] not in self._views])
        for name, index, memory in asked:
            if name in self._views:
                values = self.read_array(name, index)
                check_memory(name, memory, values.nbytes)
                memory[:] = values.reshape(-1).view(np.uint8)

    def read_rows(self, asked: Sequence[AskedRows]) -> None:
        """Read the same elements of several tensors, each into a row: (names, index, out) each."""
        super().read_rows([entry for entry in asked if self._views.keys().isdisjoint(entry[0])])
        for names, index, out in asked:
            if not self._views.keys().isdisjoint(names):
                for name, row in zip(names, out, strict=True):
                    row.copy_(self.read(name, index))
