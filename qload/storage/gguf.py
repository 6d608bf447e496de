"""`GGUFStorage`: storage of tensors in GGUF files, under names of another program if desired.

A tensor of blocks is uint8 (..., K / elements, bytes of a block), and the last part of its name is its type:
`blk.0.attn_q.weight` of type Q4_K becomes `blk.0.attn_q.q4_k`. All other tensors keep name and dtype.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qload.errors import StorageError
from qload.lazy_torch import Tensor
from qload.storage.checkpoint_files import CheckpointFiles, PathLikes, check_index, folder_notes, locate
from qload.storage.converted import ConvertedStorage
from qload.storage.gguf_header import GGUFEntry, GGUFHeader, read_gguf_header
from qload.storage.gguf_types import GGMLType
from qload.storage.header import Entry, Header
from qload.storage.protocol import bounds
from qload.storage.safetensors import SafetensorsStorage

log: logging.Logger = logging.getLogger("qload")

WEIGHT = ".weight"
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class TensorView:
    """Part of a stored tensor under a name, with its conversion to the values of the original model.

    Attributes
    ----------
    source
        Name in the file.
    index
        Entry of the outermost axis, such as an expert; None: the whole tensor.
    part
        Number of a run of rows, and the number of equal runs: (1, 2) is the second half.
    heads
        Number of heads whose rows are interleaved in the file (0, d / 2, 1, ...); 0: rows in order.
    shift
        Number that the writer added to each element.
    """

    source: str
    index: int | None = None
    part: tuple[int, int] = (0, 1)
    heads: int = 0
    shift: float = 0.0

    @property
    def is_stored(self) -> bool:
        """True if the values are those of the file, in its order."""
        return not self.heads and not self.shift


def typed_name(name: str, kind: GGMLType) -> str:
    """Return the name with the type of blocks: `blk.0.attn_q.weight` -> `blk.0.attn_q.q4_k`."""
    return name if kind.dtype else f"{name.removesuffix(WEIGHT)}.{kind.suffix}"


Views = Mapping[str, TensorView]
Naming = Callable[[Mapping[str, Any], Mapping[str, GGUFEntry]], Views]


def stored_views(keys: Mapping[str, Any], tensors: Mapping[str, GGUFEntry]) -> Views:
    """Views of whole tensors under their own names."""
    return {name: TensorView(name) for name in tensors}


class GGUFStorage(ConvertedStorage):
    """Storage of a GGUF model: one file, or all files of a split model.

    Reads and errors are those of `SafetensorsStorage`. Rows of a view with `heads` are read by whole heads.

    Parameters
    ----------
    path
        A file, or any file of a split model. StorageError for an invalid header.
    headers
        Headers of the files, if they have been read and checked before.
    views
        Views of tensors by name, without the type of blocks; None: all tensors under their own names.

    Attributes
    ----------
    keys_of_model
        Values of the header of the first file, by key.
    """

    def __init__(
        self,
        path: PathLikes | CheckpointFiles,
        *,
        headers: Mapping[str, GGUFHeader] | None = None,
        views: Views | None = None,
    ) -> None:
        if sys.byteorder != "little":
            raise StorageError(str(path), "byte-order", "GGUF is little-endian, and this machine is not")
        located = path if isinstance(path, CheckpointFiles) else locate(path)
        if headers is None:
            headers = validate_gguf(located, _raise, partial(log.info, "%s"))
        self.keys_of_model: Mapping[str, Any] = model_keys(headers)
        if views is None:
            views = stored_views(self.keys_of_model, tensors_of(headers))
        self._views: dict[str, TensorView] = {}
        super().__init__(located, headers=self._renamed(headers, views))

    def _renamed(self, headers: Mapping[str, GGUFHeader], views: Views) -> dict[str, Header]:
        """Headers with the names of views; remembers the views with a conversion."""
        by_source: dict[str, list[tuple[str, TensorView]]] = {}
        for name, view in views.items():
            by_source.setdefault(view.source, []).append((name, view))
        renamed = {}
        for file, header in headers.items():
            entries: dict[str, Entry] = {}
            for source, tensor in header.tensors.items():
                for name, view in by_source.get(source, ()):
                    typed = typed_name(name, tensor.type)
                    entries[typed] = _entry_of(tensor, view)
                    if not view.is_stored:
                        self._views[typed] = view
            renamed[file] = Header(entries, {}, header.file_size, header.identity)
        return renamed

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Copy the elements `index` of the tensor `name` to the CPU, in the order of the model."""
        if name not in self._views:
            return super().read(name, index)
        covering, rows = self._covering_rows(name, index)
        values: Tensor = self._convert(name, super().read(name, covering), rows).contiguous()
        return values

    def read_array(self, name: str, index: tuple[slice, ...] = ()) -> NDArray[Any]:
        """Copy the elements `index` of the tensor `name` like `read`, as an array."""
        if name not in self._views:
            return super().read_array(name, index)
        covering, rows = self._covering_rows(name, index)
        return np.ascontiguousarray(self._convert(name, super().read_array(name, covering), rows))

    def _covering_rows(self, name: str, index: tuple[slice, ...]) -> tuple[tuple[slice, ...], slice]:
        """Slices of the whole heads that cover `index`, and the rows of `index` within them."""
        shape, heads = self.info(name).shape, self._views[name].heads
        (start, stop), *inner = bounds(name, shape, index)
        size = shape[0] // heads if heads else 1
        first, last = start // size * size, -(-stop // size) * size
        return (slice(first, last), *(slice(*pair) for pair in inner)), slice(start - first, stop - first)

    def _convert(self, name: str, values: Any, rows: slice) -> Any:
        """Undo the conversion of a view on the rows of whole heads, a tensor or an array; return `rows`."""
        view = self._views[name]
        if view.heads:
            size = self.info(name).shape[0] // view.heads
            pairs = values.reshape(values.shape[0] // size, size // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        values = values[rows]
        return values - view.shift if view.shift else values


def open_storage(path: PathLikes) -> SafetensorsStorage:
    """Open the storage of a checkpoint in safetensors or GGUF files; StorageError for other files."""
    located = locate(path)
    return GGUFStorage(located) if located.is_gguf else SafetensorsStorage(located)


def validate_gguf(
    located: CheckpointFiles, refuse: Callable[[StorageError], None], note: Callable[[str], None]
) -> dict[str, GGUFHeader]:
    """Read the headers of all files, and check them against each other.

    Each error is passed to `refuse`, which may raise it, and each remark to `note`.
    """
    headers: dict[str, GGUFHeader] = {}
    errors: list[StorageError] = []
    for file, place in located.files.items():
        try:
            headers[file] = read_gguf_header(place, file)
        except StorageError as error:
            errors.append(error)
    for each in errors or (*_split_errors(headers), *_content_errors(located, headers)):
        refuse(each)
    for text in folder_notes(located, headers):
        note(text)
    return headers


def _split_errors(headers: Mapping[str, GGUFHeader]) -> Iterator[StorageError]:
    """Yield an error for each file whose keys contradict its name or the number of files."""
    for number, (file, header) in enumerate(headers.items()):
        count, stated = header.keys.get(SPLIT_COUNT, 1), header.keys.get(SPLIT_NUMBER, 0)
        if count != len(headers) and not (count == 0 and len(headers) == 1):
            words = f"{SPLIT_COUNT} is {count!r:.40}, and {len(headers)} files have the name of this model"
            yield StorageError(file, "shard-gap", words, remedy="fetch all files, with their names")
        elif stated != number:
            words = f"{SPLIT_NUMBER} is {stated!r:.40}, and its name says {number}"
            yield StorageError(file, "index-mismatch", words, remedy="fetch all files, with their names")


def _content_errors(located: CheckpointFiles, headers: Mapping[str, GGUFHeader]) -> Iterator[StorageError]:
    """Yield an error for missing and for repeated tensors."""
    first, count = next(iter(headers)), len(tensors_of(headers))
    stated = headers[first].keys.get(SPLIT_TENSORS, count)
    if not count:
        words = "has no tensor: it is a vocabulary, or the first file of a split model"
        yield StorageError(first, "no-tensors", words, remedy="fetch the files of the model")
        return
    yield from check_index(located, headers)
    if stated != count and len(headers) > 1:
        words = f"{SPLIT_TENSORS} is {stated!r:.40}, and the files have {count} tensors"
        yield StorageError(first, "index-mismatch", words, remedy="fetch the files again")


def model_keys(headers: Mapping[str, GGUFHeader]) -> Mapping[str, Any]:
    """Return the keys of the model: those of the first file."""
    return next(iter(headers.values())).keys if headers else {}


def tensors_of(headers: Mapping[str, GGUFHeader]) -> dict[str, GGUFEntry]:
    """Header entries of all files by name."""
    return {name: entry for header in headers.values() for name, entry in header.tensors.items()}


def _entry_of(tensor: GGUFEntry, view: TensorView) -> Entry:
    """Entry of a view for the storage, with blocks as bytes."""
    shape, begin, kind = tensor.shape, tensor.begin, tensor.type
    size = tensor.end - begin
    if view.index is not None:
        size //= shape[0]
        shape, begin = shape[1:], begin + view.index * size
    number, count = view.part
    if count > 1:
        size //= count
        shape, begin = (shape[0] // count, *shape[1:]), begin + number * size
    if not kind.dtype:
        shape = (*shape[:-1], shape[-1] // kind.elements, kind.nbytes)
    return Entry(kind.dtype or "U8", shape, begin, begin + size)


def _raise(error: StorageError) -> None:
    raise error
