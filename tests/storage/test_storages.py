"""Contract of every storage, in memory and in files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from qload.dtypes import TORCH
from qload.errors import ArgumentError, MissingTensorError, StorageError
from qload.storage import DTYPES, MemoryStorage, SafetensorsStorage, WeightStorage
from qload.storage.protocol import missing
from qload.testing import assert_same_bits
from tests.example_counts import at_most
from tests.storage.readings import reading

__all__ = ["reading"]  # a fixture
SHAPES = [(), (5,), (0, 3), (3, 0), (4, 6), (2, 3, 4), (2, 1, 3, 2)]
SAVED = [TORCH[dtype] for name, dtype in DTYPES.items() if name not in ("C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ")]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor with a different value in every byte, NaN payloads included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count) * 37 % 251).to(torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw
    return (raw.view(dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)


def in_memory(tensors: dict[str, Tensor], folder: Path) -> WeightStorage:
    return MemoryStorage(tensors)


def in_a_file(tensors: dict[str, Tensor], folder: Path) -> WeightStorage:
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsStorage(folder / "model.safetensors")


every_storage = pytest.mark.parametrize("make", [in_memory, in_a_file])
Make = Callable[[dict[str, Tensor], Path], WeightStorage]


@every_storage
@pytest.mark.parametrize("dtype", SAVED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_and_shape_comes_back_bit_for_bit(make: Make, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {f"t{i}": tensor_of(dtype, shape) for i, shape in enumerate(SHAPES)}

    storage = make(tensors, tmp_path)

    assert isinstance(storage, WeightStorage)
    assert set(storage.keys()) == set(tensors)
    for name, tensor in tensors.items():
        assert (storage.info(name).dtype, storage.info(name).shape) == (dtype, tuple(tensor.shape))
        assert storage.info(name).nbytes == tensor.numel() * dtype.itemsize
        assert_same_bits(storage.read(name), tensor)


@every_storage
@given(data=st.data())
@at_most(60)
def test_a_slice_is_those_elements_and_no_more(
    make: Make, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = data.draw(st.sampled_from([(7,), (4, 6), (3, 4, 5)]))
    tensor = tensor_of(data.draw(st.sampled_from([torch.int8, torch.bfloat16, torch.int64])), shape)
    index = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)[
        : data.draw(st.integers(0, len(shape)))
    ]
    storage: Any = make({"t": tensor}, tmp_path_factory.mktemp("slice"))

    got = storage.read("t", index)

    assert_same_bits(got, tensor[index])
    assert storage.bytes_read == got.numel() * got.element_size()


@pytest.mark.usefixtures("seen_texts")
@every_storage
@pytest.mark.parametrize(
    "index",
    [
        pytest.param((slice(0, 5),), id="beyond the end"),
        pytest.param((slice(-1, 2),), id="negative"),
        pytest.param((slice(2, 1),), id="backwards"),
        pytest.param((slice(0, 4, 2),), id="with a step"),
        pytest.param((slice(None),) * 3, id="too many"),
    ],
)
def test_a_slice_outside_of_the_tensor_is_refused(
    make: Make, index: tuple[slice, ...], tmp_path: Path
) -> None:
    storage = make({"t": torch.zeros(4, 6)}, tmp_path)

    with pytest.raises(ArgumentError, match=r"shape \(4, 6\)"):
        storage.read("t", index)


@pytest.mark.usefixtures("seen_texts")
@every_storage
def test_a_missing_name_is_told_with_the_names_like_it(make: Make, tmp_path: Path) -> None:
    storage = make({"layer.weight": torch.zeros(2)}, tmp_path)

    with pytest.raises(
        MissingTensorError, match=r"layer\.wieght: not in the checkpoint\n  stored   layer\.weight"
    ):
        storage.info("layer.wieght")


def test_of_a_hundred_thousand_names_few_are_compared_with_a_missing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []
    monkeypatch.setattr(
        "qload.storage.protocol.get_close_matches", lambda name, keys: compared.append(len(keys)) or []
    )
    keys = [f"model.layers.{i}.{'x' * (i % 40)}" for i in range(100_000)]

    missing("model.layers.7.xxxxxxy", keys)
    missing("x" * 5000, keys)

    assert 0 < compared[0] <= 1000
    assert compared[1] == 0


@every_storage
def test_what_was_read_can_be_changed_without_changing_the_store(make: Make, tmp_path: Path) -> None:
    mine = torch.ones(3)
    storage = make({"t": mine}, tmp_path)

    storage.read("t").zero_()
    mine.zero_()

    assert storage.read("t").tolist() == [1, 1, 1]


def test_memory_reads_one_element_of_any_stride_as_bytes() -> None:
    column = torch.ones(64).half()[::64]
    read = MemoryStorage({"a": column}).read("a")

    assert column.stride() == (64,)
    assert read.view(torch.uint8).tolist() == [0, 60]


def test_memory_counts_what_is_read() -> None:
    storage = MemoryStorage({"a": torch.zeros(4), "b": torch.zeros(4)})

    storage.read("a", (slice(0, 2),))
    storage.read("a")

    assert (storage.reads, storage.bytes_read) == ({"a": 2}, 24)


@every_storage
@pytest.mark.parametrize("dtype", SAVED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_what_is_read_into_memory_of_the_callers_is_what_is_handed_out(
    make: Make, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = {f"t{i}": tensor_of(dtype, shape) for i, shape in enumerate(SHAPES)}
    storage: Any = make(tensors, tmp_path)
    for name, tensor in tensors.items():
        for index in ((), tuple(slice(size // 3, size) for size in tensor.shape)):
            want = storage.read(name, index)
            read = storage.bytes_read
            around = tensor_of(dtype, (3, *want.shape))
            first, _, last = around.clone()

            storage.read_into(name, index, around[1])

            for got, expected in zip(around, (first, want, last), strict=True):
                assert_same_bits(got, expected)
            assert storage.bytes_read - read == want.nbytes


@pytest.mark.usefixtures("seen_texts")
@every_storage
def test_memory_that_a_tensor_does_not_fit_is_refused_and_not_written(make: Make, tmp_path: Path) -> None:
    storage: Any = make({"t": torch.arange(24).reshape(4, 6)}, tmp_path)
    for out in (
        torch.zeros(6, 4, dtype=torch.int64),
        torch.zeros(4, 6),
        torch.zeros(6, 4, dtype=torch.int64).T,
        torch.zeros(4, 6, dtype=torch.int64, device="meta"),
    ):
        with pytest.raises(ArgumentError, match="in one piece, for t"):
            storage.read_into("t", (), out)
        assert out.is_meta or not out.any()
    assert storage.bytes_read == 0


def row(nbytes: int) -> np.ndarray:
    return np.full(nbytes, 0xA5, np.uint8)


@pytest.mark.parametrize("dtype", SAVED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_bytes_of_many_pieces_are_those_that_are_handed_out(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {f"t{i}": tensor_of(dtype, shape) for i, shape in enumerate(SHAPES)}
    save_file(dict(list(tensors.items())[::2]), tmp_path / "a.safetensors")
    save_file(dict(list(tensors.items())[1::2]), tmp_path / "b.safetensors")
    with SafetensorsStorage([tmp_path / "a.safetensors", tmp_path / "b.safetensors"]) as storage:
        asked, wanted = [], []
        for name, tensor in tensors.items():
            for index in ((), tuple(slice(size // 3, size) for size in tensor.shape)):
                wanted.append(storage.read(name, index))
                asked.append((name, index, row(wanted[-1].nbytes)))
        read = storage.bytes_read

        storage.read_bytes_into(asked)

        for (_, _, memory), want in zip(asked, wanted, strict=True):
            assert memory.tobytes() == want.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert storage.bytes_read - read == sum(want.nbytes for want in wanted)


@pytest.mark.usefixtures("seen_texts")
def test_bytes_are_refused_before_any_is_written(tmp_path: Path) -> None:
    save_file({"t": torch.arange(24).reshape(4, 6)}, tmp_path / "a.safetensors")
    fits, frozen = row(192), row(192)
    frozen.flags.writeable = False
    with SafetensorsStorage(tmp_path / "a.safetensors") as storage:
        for memory in (
            row(191),
            row(193),
            row(384)[::2],
            row(192).reshape(2, 96),
            row(192).view(np.int8),
            frozen,
        ):
            with pytest.raises(ArgumentError, match="a row of 192 bytes that can be written, for t"):
                storage.read_bytes_into([("t", (), fits), ("t", (), memory)])
        with pytest.raises(ArgumentError, match="asked"):
            storage.read_bytes_into([("t", (), [0] * 192)])  # type: ignore[list-item]
        with pytest.raises(MissingTensorError):
            storage.read_bytes_into([("t", (), fits), ("u", (), fits)])
        assert storage.bytes_read == 0
    assert (fits == 0xA5).all()
    with pytest.raises(StorageError, match="closed"):
        storage.read_bytes_into([("t", (), fits)])


@pytest.mark.parametrize("dtype", SAVED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_rows_of_many_tensors_are_those_that_single_reads_return(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {f"s{i}.t{j}": tensor_of(dtype, shape) for i, shape in enumerate(SHAPES) for j in range(3)}
    tensors = {name: tensor.roll(at) for at, (name, tensor) in enumerate(tensors.items())}
    save_file(dict(list(tensors.items())[::2]), tmp_path / "a.safetensors")
    save_file(dict(list(tensors.items())[1::2]), tmp_path / "b.safetensors")
    with SafetensorsStorage([tmp_path / "a.safetensors", tmp_path / "b.safetensors"]) as storage:
        for i, shape in enumerate(SHAPES):
            names = [f"s{i}.t{j}" for j in (2, 0, 1)]
            ends = tuple(slice(size // 3, size) for size in shape)
            for index in ((), ends[:1], ends):
                wanted = torch.stack([storage.read(name, index) for name in names])
                rows = torch.empty_like(wanted)
                columns = torch.empty((*wanted.shape, 2), dtype=dtype)[..., 0]  # rows with gaps
                read = storage.bytes_read

                storage.read_rows([(names, index, rows), (names, index, columns)])

                assert_same_bits(rows, wanted)
                assert_same_bits(columns.contiguous(), wanted)
                assert storage.bytes_read - read == 2 * wanted.nbytes


@pytest.mark.usefixtures("seen_texts")
def test_rows_that_tensors_do_not_fit_are_refused_before_any_is_written(tmp_path: Path) -> None:
    tensors = {
        "s": torch.arange(24),
        "t": torch.arange(24),
        "u": torch.arange(25),
        "v": torch.arange(24).int(),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    rows = torch.zeros(2, 24, dtype=torch.int64)
    with SafetensorsStorage(tmp_path / "a.safetensors") as storage:
        for names in (["s", "u"], ["s", "v"]):
            with pytest.raises(ArgumentError, match=f"of {names[1]}$"):
                storage.read_rows([(["s", "t"], (), rows), (names, (), rows)])
        for out in (rows[:1], rows.int(), rows[:, :23]):
            with pytest.raises(ArgumentError, match="for s and tensors like it"):
                storage.read_rows([(["s", "t"], (), out)])
        with pytest.raises(MissingTensorError):
            storage.read_rows([(["s", "w"], (), rows)])
        assert storage.bytes_read == 0
    assert not rows.any()
    with pytest.raises(StorageError, match="closed"):
        storage.read_rows([(["s", "t"], (), rows)])


@pytest.mark.usefixtures("seen_texts")
def test_bytes_of_a_file_that_is_cut_short_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"s": torch.zeros(8), "t": torch.arange(24)}, path)
    with SafetensorsStorage(path) as storage:
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(StorageError, match=r"a\.safetensors"):
            storage.read_bytes_into([("s", (), row(32)), ("t", (), row(192))])
