"""Dtypes without torch, and arrays of stored tensors."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qload import MemoryStorage, SafetensorsStorage, TensorInfo, dtypes
from qload.dtypes import BY_NAME, STORED, TORCH
from qload.storage.protocol import read_array


@pytest.mark.parametrize("name", BY_NAME)
def test_a_dtype_has_the_properties_and_the_text_of_torchs(name: str) -> None:
    own, theirs = BY_NAME[name], getattr(torch, name)

    assert TORCH[own] is theirs
    assert STORED[theirs] is STORED[own] is own
    assert repr(own) == repr(theirs)
    assert own.itemsize == theirs.itemsize
    assert (own.is_floating_point, own.is_complex) == (theirs.is_floating_point, theirs.is_complex)
    assert pickle.loads(pickle.dumps(own)) is copy.deepcopy(own) is own


def test_a_dtype_that_no_file_has_gets_an_entry_of_its_own() -> None:
    own = STORED[torch.complex128]

    assert (own.name, own.itemsize, own.is_complex) == ("complex128", 16, True)
    assert STORED[torch.complex128] is own
    assert TORCH[own] is torch.complex128


def test_the_information_of_a_tensor_takes_dtypes_of_torch_and_of_files() -> None:
    info = TensorInfo(torch.bfloat16, (3, 5), "a.safetensors")

    assert info == TensorInfo(dtypes.bfloat16, (3, 5), "a.safetensors")
    assert info != TensorInfo(dtypes.float16, (3, 5), "a.safetensors")
    assert (info.dtype, info.stored_dtype, info.nbytes) == (torch.bfloat16, dtypes.bfloat16, 30)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("complex64", "bool")])
def test_an_array_has_the_elements_of_a_tensor_or_their_bits(name: str, tmp_path: Path) -> None:
    count, dtype = 24, getattr(torch, name)
    raw = (torch.arange(count * dtype.itemsize) * 37 % 251).to(torch.uint8)
    save_file({"a": raw.view(dtype).reshape(4, 6)}, tmp_path / "model.safetensors")
    whole = raw.numpy().reshape(4, 6 * dtype.itemsize)
    has_numpy_type = name not in ("bfloat16",) and not name.startswith("float8")

    with SafetensorsStorage(tmp_path) as storage:
        for index in ((), (slice(1, 3),), (slice(0, 4), slice(2, 5))):
            array = read_array(storage, "a", index)
            rows = index[0] if index else slice(0, 4)
            columns = index[1] if len(index) > 1 else slice(0, 6)
            size = dtype.itemsize
            expected = whole[rows, columns.start * size : columns.stop * size]
            assert array.dtype == (name if has_numpy_type else f"uint{8 * size}")
            assert np.ascontiguousarray(array).view(np.uint8).tobytes() == expected.tobytes()
        assert read_array(storage, "a", (slice(0, 0),)).shape == (0, 6)


def test_an_array_of_a_storage_without_arrays_is_that_of_its_tensor() -> None:
    storage = MemoryStorage({"a": torch.arange(6, dtype=torch.int16).reshape(2, 3)})

    assert read_array(storage, "a", (slice(1, 2),)).tolist() == [[3, 4, 5]]
