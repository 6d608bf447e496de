"""`ComfyStorage`: files of ComfyUI, with marked layers converted to the formats of other programs.

A mark is a tensor `LAYER.comfy_quant` with JSON in its bytes, or an entry of `_quantization_metadata` in a
header. Older files mark all layers below a prefix by one tensor `PREFIX.scaled_fp8`, and name their scales
`scale_weight`. By the format of a mark, reads return:

    nvfp4              codes with the low nibble first, scales in plain order (N, K/16), as ModelOpt's NVFP4
    mxfp8              exponents in plain order (N, K/32)
    int8_tensorwise    a scale for each output, (N, 1)
    convrot_w4a4       likewise, and words `weight_packed` (N, K/8) of codes that count from 0

Files have scales of groups in tiles of 128 outputs and 4 groups, with padding. Nothing is rounded.
Source: comfy-kitchen 0.2.40.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from reprlib import Repr
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qload import dtypes
from qload.errors import StorageError
from qload.layouts.swizzle import GROUPS, OUTPUTS, plain_scales
from qload.lazy_torch import Tensor, torch
from qload.storage.checkpoint_files import CheckpointFiles
from qload.storage.converted import ConvertedStorage
from qload.storage.files import parse_json
from qload.storage.header import Entry, Header
from qload.storage.protocol import DTYPES, bounds, metadata_of, numpy_dtype
from qload.storage.safetensors import SafetensorsStorage

COMFY_METADATA, MARK, SCALED_FP8 = "_quantization_metadata", "comfy_quant", "scaled_fp8"
OLD_SCALE, OLD_INPUT_SCALE = "scale_weight", "scale_input"
MAX_MARK_BYTES, MAX_METADATA_CHARACTERS = 1 << 12, 1 << 24
SIGN_BITS = 0x88  # of two codes in a byte
ACTIVATION_SETTING = "full_precision_matrix_mult"  # in a mark, without a meaning for weights
_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxdict = 3, 6

Marks = Mapping[str, Mapping[str, Any]]


def read_marks(storage: SafetensorsStorage) -> dict[str, Mapping[str, Any]]:
    """Map each marked layer to its mark; StorageError for an invalid mark, or two unequal ones."""
    marks: dict[str, Mapping[str, Any]] = {}
    for file, metadata in metadata_of(storage).items():
        for layer, mark in parse_layers(metadata.get(COMFY_METADATA, ""), file).items():
            _add_mark(marks, layer, mark, f"{COMFY_METADATA}.layers.{layer:.80}", file)
    names = storage.keys()
    old = tuple(name.removesuffix(SCALED_FP8) for name in names if name.rpartition(".")[2] == SCALED_FP8)
    for name in names:
        layer, _, last = name.rpartition(".")
        if last == MARK:
            _add_mark(marks, layer, _parse_mark(storage, name), name, storage.info(name).file or "")
        elif last == OLD_SCALE and name.startswith(old):
            marks.setdefault(layer, {"format": SCALED_FP8})
    return marks


def _add_mark(
    marks: dict[str, Mapping[str, Any]], layer: str, mark: Mapping[str, Any], name: str, file: str
) -> None:
    """Add the mark of a layer; StorageError if metadata has the layer with other settings of weights."""
    both = (mark, marks.setdefault(layer, mark))
    first, other = ({key: each[key] for key in each if key != ACTIVATION_SETTING} for each in both)
    if first != other:
        words = f"is {_SHORT.repr(mark)}, and {COMFY_METADATA} has {_SHORT.repr(marks[layer])}"
        remedy = f"delete the wrong one; ComfyUI takes that of {COMFY_METADATA}"
        raise StorageError(file, "header-json", words, name, remedy)


def parse_layers(text: str, file: str) -> dict[str, Mapping[str, Any]]:
    """Parse the layers in metadata; empty for text of another kind."""
    if not 0 < len(text) <= MAX_METADATA_CHARACTERS:
        return {}
    try:
        value = parse_json(text.encode(), file)
    except (ValueError, RecursionError, StorageError):
        return {}
    layers = value.get("layers") if isinstance(value, dict) else None
    found = layers if isinstance(layers, dict) else {}
    return {name: mark for name, mark in found.items() if isinstance(mark, dict)}


def is_setting(name: str) -> bool:
    """Return whether a tensor states settings: a mark, or the marks and input scales of older files."""
    return name.rpartition(".")[2] in (MARK, SCALED_FP8, OLD_INPUT_SCALE)


def _parse_mark(storage: SafetensorsStorage, name: str) -> Mapping[str, Any]:
    info, value = storage.info(name), None
    if info.nbytes <= MAX_MARK_BYTES and info.stored_dtype is dtypes.uint8:
        try:
            value = parse_json(storage.read_array(name).tobytes(), name)
        except (ValueError, RecursionError, StorageError):
            value = None
    if not isinstance(value, dict):
        words = f"is not a JSON object in at most {MAX_MARK_BYTES} bytes, the mark of a layer"
        raise StorageError(info.file or "", "header-json", words, name, "fetch the file again")
    return value


@dataclass(frozen=True)
class ComfyView:
    """Tensor that is converted from a stored one.

    `source`: name of the stored tensor; `convert`: function from its values to those of the view; `by_rows`:
    whether each row of the view depends on the same stored row alone.
    """

    source: str
    dtype: str
    shape: tuple[int, ...]
    convert: Callable[[NDArray[Any]], NDArray[Any]]
    by_rows: bool = True


def swap_nibbles(packed: NDArray[Any]) -> NDArray[Any]:
    """Exchange the codes of each byte."""
    return packed << 4 | packed >> 4


def pack_signed_nibbles(packed: NDArray[Any]) -> NDArray[Any]:
    """Convert bytes of two signed codes to words of unsigned codes."""
    return (packed.view(np.uint8) ^ SIGN_BITS).view(np.int32)


def unswizzle(stored: NDArray[Any], rows: int, groups: int) -> NDArray[Any]:
    """Convert scales in tiles of 128 rows and 4 groups to plain order (rows, groups)."""
    return np.ascontiguousarray(plain_scales(stored, rows, groups))


def _named(layer: str, suffix: str) -> str:
    return f"{layer}.{suffix}" if layer else suffix


def _repeat(stored: NDArray[Any], rows: int) -> NDArray[Any]:
    """Expand one scale, or one for each row, to (rows, 1)."""
    return np.repeat(stored.reshape(-1, 1), rows // stored.size, 0)


def _shape(_: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    return np.array([rows, columns])


def _views(layer: str, form: object, entries: Mapping[str, Entry], file: str) -> dict[str, ComfyView]:
    """Views of the tensors of a layer, by suffix; StorageError for scales that do not fill whole tiles.

    A layer without the tensors of its mark has no views; the loader refuses it.
    """
    weight, scale = (entries.get(_named(layer, name)) for name in ("weight", "weight_scale"))
    if weight is None or scale is None or len(weight.shape) != 2 or 0 in weight.shape:
        return {}
    codes, scales, (N, width) = _named(layer, "weight"), _named(layer, "weight_scale"), weight.shape
    views = {}
    if form == "nvfp4" and weight.dtype == "U8":
        views["weight"] = ComfyView(codes, "U8", weight.shape, swap_nibbles)
    if form == "nvfp4" or form == "mxfp8":
        groups = width * 2 // 16 if form == "nvfp4" else width // 32
        dtype = "F8_E4M3" if form == "nvfp4" and scale.dtype == "U8" else scale.dtype
        padded = -(-N // OUTPUTS) * OUTPUTS * -(-groups // GROUPS) * GROUPS
        if not groups or prod(scale.shape) != padded:
            words = f"has {prod(scale.shape)} scales, and the tiles of ({N}, {groups}) have {padded}"
            raise StorageError(file, "header-entry", words, scales, "fetch the file again")
        convert = partial(unswizzle, rows=N, groups=groups)
        views["weight_scale"] = ComfyView(scales, dtype, (N, groups), convert, by_rows=False)
    if form in ("int8_tensorwise", "convrot_w4a4"):
        if prod(scale.shape) not in (1, N):
            words = f"has {prod(scale.shape)} scales, and {form} has one, or one for each of {N} outputs"
            remedy = "ComfyUI does not read it either; quantize the layer again"
            raise StorageError(file, "header-entry", words, scales, remedy)
        repeat = partial(_repeat, rows=N)
        views["weight_scale"] = ComfyView(scales, scale.dtype, (N, 1), repeat, by_rows=False)
    if form == "convrot_w4a4" and weight.dtype == "I8" and width % 4 == 0:
        shape = partial(_shape, rows=N, columns=2 * width)
        views["weight_packed"] = ComfyView(codes, "I32", (N, width // 4), pack_signed_nibbles)
        views["weight_shape"] = ComfyView(scales, "I64", (2,), shape, by_rows=False)
    taken = {name for name in views if _named(layer, name) in entries} - {"weight", "weight_scale"}
    if taken:
        words = f"is stored, but {codes} is marked as {form}, which has no such tensor"
        raise StorageError(file, "header-entry", words, _named(layer, min(taken)), "fetch the file again")
    return views


class ComfyStorage(ConvertedStorage):
    """Storage of a file of ComfyUI, with views of the tensors of marked layers.

    Parameters
    ----------
    path
        The located file.
    headers
        Its header.
    marks
        Marks of layers by name, as of `read_marks`.
    """

    def __init__(self, path: CheckpointFiles, *, headers: Mapping[str, Header], marks: Marks) -> None:
        entries = {name: entry for header in headers.values() for name, entry in header.tensors.items()}
        self._views: dict[str, ComfyView] = {}
        for layer, mark in marks.items():
            for name, view in _views(layer, mark.get("format"), entries, next(iter(headers))).items():
                self._views[_named(layer, name)] = view
        self._stored = SafetensorsStorage(path, headers=dict(headers))
        super().__init__(path, headers={file: self._with_views(header) for file, header in headers.items()})

    def _with_views(self, header: Header) -> Header:
        """Header with the entries of views in place of those of their sources."""
        sources = {view.source for view in self._views.values()}
        tensors = {name: entry for name, entry in header.tensors.items() if name not in sources}
        for name, view in self._views.items():
            if source := header.tensors.get(view.source):
                tensors[name] = Entry(view.dtype, view.shape, source.begin, source.end)
        return replace(header, tensors=tensors)

    def is_repeated(self, name: str) -> bool:
        """Return whether one stored value is repeated in the tensor `name`."""
        view = self._views.get(name)
        return view is not None and prod(self._stored.info(view.source).shape) == 1 < prod(view.shape)

    def read_array(self, name: str, index: tuple[slice, ...] = ()) -> NDArray[Any]:
        """Copy the elements `index` of the tensor `name` like `read`, as an array."""
        view = self._views.get(name)
        if view is None:
            return super().read_array(name, index)
        (start, stop), *inner = bounds(name, view.shape, index)
        rows = (slice(start, stop),) if view.by_rows else ()
        values = view.convert(self._stored.read_array(view.source, rows))
        within = slice(0, stop - start) if view.by_rows else slice(start, stop)
        dtype = numpy_dtype(DTYPES[view.dtype])
        return np.ascontiguousarray(values.view(dtype)[within, *(slice(*pair) for pair in inner)])

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Copy the elements `index` of the tensor `name` to the CPU, in the order of the view."""
        if name not in self._views:
            return super().read(name, index)
        values = torch.from_numpy(self.read_array(name, index))
        return values.view(self.info(name).dtype)

    def close(self) -> None:
        """Close all files; a read afterwards is a StorageError."""
        super().close()
        self._stored.close()
