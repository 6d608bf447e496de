"""Storage of GGUF files: names, slices, rows of heads, stacks of experts, split models, hostile folders."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from qload.errors import ArgumentError, MissingTensorError, StorageError
from qload.storage import GGUFStorage, SafetensorsStorage, TensorView, locate, open_storage
from tests.storage.gguf_files import LLAMA, blocks, floats, gguf_file

VALUES = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
STACK = np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in the order of llama.cpp, written from its converter: LlamaModel.permute."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> GGUFStorage:
    """Return a storage with an interleaved matrix and bias, a shifted norm, a stack, and blocks."""
    tensors = {
        "q.weight": floats(interleaved(VALUES, 3)),
        "q.bias": floats(interleaved(VALUES[:, 0], 3)),
        "norm.weight": floats(VALUES[:, 0] + 1),
        "up_exps.weight": floats(STACK),
        "down.weight": blocks("Q4_K", (6, 512)),
    }
    path = write(tmp_path_factory.mktemp("gguf") / "a.gguf", gguf_file(LLAMA, tensors))
    views = {
        "q_proj.weight": TensorView("q.weight", heads=3),
        "q_proj.bias": TensorView("q.bias", heads=3),
        "norm.weight": TensorView("norm.weight", shift=1.0),
        "down.weight": TensorView("down.weight"),
        **{f"up.{expert}.weight": TensorView("up_exps.weight", index=expert) for expert in range(4)},
        "half.weight": TensorView("up_exps.weight", index=2, part=(1, 2)),
    }
    return GGUFStorage(path, views=views)


MEANT = {
    "q_proj.weight": VALUES,
    "q_proj.bias": VALUES[:, 0],
    "norm.weight": VALUES[:, 0],
    **{f"up.{expert}.weight": STACK[expert] for expert in range(4)},
    "half.weight": STACK[2, 3:],
}


def test_names_end_with_the_type_of_blocks(opened: GGUFStorage) -> None:
    assert {*opened.keys()} == {*MEANT, "down.q4_k"}
    assert opened.info("down.q4_k").shape == (6, 2, 144)
    assert opened.info("down.q4_k").dtype == torch.uint8
    assert opened.info("up.3.weight").shape == (6, 5)
    with pytest.raises(MissingTensorError):
        opened.read("down.weight")


@pytest.mark.parametrize("name", MEANT)
@given(data=st.data())
def test_each_way_of_reading_gives_the_values_of_the_model(
    opened: GGUFStorage, name: str, data: st.DataObject
) -> None:
    index = []
    for size in MEANT[name].shape:
        start = data.draw(st.integers(0, size))
        index.append(slice(start, data.draw(st.integers(start, size))))
    want = torch.from_numpy(MEANT[name][tuple(index)].copy())
    slices = tuple(index)

    assert torch.equal(opened.read(name, slices), want)
    assert np.array_equal(opened.read_array(name, slices), want.numpy())
    out = torch.empty_like(want)
    opened.read_into(name, slices, out)
    assert torch.equal(out, want)
    memory = np.empty(want.nbytes, np.uint8)
    opened.read_bytes_into([(name, slices, memory)])
    assert memory.tobytes() == want.numpy().tobytes()
    rows = torch.empty((1, *want.shape))
    opened.read_rows([([name], slices, rows)])
    assert torch.equal(rows[0], want)


@pytest.mark.usefixtures("seen_texts")
def test_arguments_of_reads_are_checked(opened: GGUFStorage) -> None:
    with pytest.raises(ArgumentError, match="index"):
        opened.read("q_proj.weight", (slice(0, 25),))
    with pytest.raises(ArgumentError, match="out"):
        opened.read_into("q_proj.weight", (), torch.empty(24, 3).double())
    with pytest.raises(ArgumentError, match="asked"):
        opened.read_bytes_into([("q_proj.weight", (), np.empty(3, np.uint8))])


def test_a_read_of_few_rows_reads_few_heads(opened: GGUFStorage) -> None:
    before = opened.bytes_read
    opened.read("q_proj.weight", (slice(9, 10),))

    assert opened.bytes_read - before == 8 * 3 * 4  # the second of three heads


def split(folder: Path, change: Callable[[int, dict[str, object]], None] = lambda *_: None) -> list[Path]:
    """Write a model of three files; the first has the keys and no tensor, as `small_first_shard` does."""
    paths = []
    for number in range(3):
        keys: dict[str, object] = {"split.no": number, "split.count": 3, "split.tensors.count": 2}
        change(number, keys)
        tensors = {} if number == 0 else {f"blk.{number}.norm.weight": floats(VALUES[:, number])}
        content = gguf_file({**(LLAMA if number == 0 else {}), **keys}, tensors)
        paths.append(write(folder / f"m-{number + 1:05}-of-00003.gguf", content))
    return paths


def test_any_file_of_a_split_model_opens_all_of_it(tmp_path: Path) -> None:
    for path in (tmp_path, *split(tmp_path)):
        with GGUFStorage(path) as storage:
            assert [*storage.keys()] == ["blk.1.norm.weight", "blk.2.norm.weight"]
            assert torch.equal(storage.read("blk.2.norm.weight"), torch.from_numpy(VALUES[:, 2].copy()))
            assert storage.keys_of_model["general.architecture"] == "llama"


@pytest.mark.usefixtures("seen_texts")
def test_a_missing_file_of_a_split_model_is_named(tmp_path: Path) -> None:
    first, second, _ = split(tmp_path)
    second.unlink()

    with pytest.raises(StorageError, match=r"m-00002-of-00003\.gguf not found: 1 of 3") as caught:
        GGUFStorage(first)
    assert caught.value.rule == "shard-gap"


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("split.count", 4, "shard-gap"),
        ("split.no", 2, "index-mismatch"),
        ("split.tensors.count", 5, "index-mismatch"),
    ],
)
def test_keys_of_a_split_model_have_to_agree_with_its_files(
    tmp_path: Path, key: str, value: int, rule: str
) -> None:
    split(tmp_path, lambda number, keys: keys.update({key: value} if number == 0 else {}))

    with pytest.raises(StorageError) as caught:
        GGUFStorage(tmp_path)
    assert caught.value.rule == rule
    assert key in str(caught.value)


@pytest.mark.usefixtures("seen_texts")
def test_one_file_of_a_split_model_under_another_name_is_refused(tmp_path: Path) -> None:
    path = split(tmp_path)[1].rename(tmp_path / "second.gguf")

    with pytest.raises(StorageError, match=r"split\.count is 3, and 1 files") as caught:
        GGUFStorage(path)
    assert caught.value.rule == "shard-gap"


@pytest.mark.usefixtures("seen_texts")
def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        keys = {"split.no": number, "split.count": 2}
        content = gguf_file(keys, {"a.weight": floats(VALUES)})
        write(tmp_path / f"m-{number + 1:05}-of-00002.gguf", content)

    with pytest.raises(StorageError, match=r"a\.weight: is also in m-00001-of-00002\.gguf"):
        GGUFStorage(tmp_path)


@pytest.mark.usefixtures("seen_texts")
def test_a_file_without_tensors_is_named_for_what_it_may_be(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="has no tensor: it is a vocabulary") as caught:
        GGUFStorage(write(tmp_path / "a.gguf", gguf_file(LLAMA, {})))
    assert caught.value.rule == "no-tensors"


@pytest.mark.usefixtures("seen_texts")
def test_of_several_models_in_a_folder_one_has_to_be_named(tmp_path: Path) -> None:
    content = gguf_file(LLAMA, {"a.weight": floats(VALUES)})
    write(tmp_path / "a-Q4_K_M.gguf", content)
    write(tmp_path / "mmproj-a-F16.gguf", content)
    assert [*locate(tmp_path).files] == ["a-Q4_K_M.gguf"]
    assert [*locate(tmp_path).beside] == ["mmproj-a-F16.gguf"]
    write(tmp_path / "a-Q8_0.gguf", content)

    with pytest.raises(StorageError, match=r"several GGUF models: a-Q4_K_M\.gguf, a-Q8_0\.gguf") as caught:
        locate(tmp_path)
    assert (caught.value.rule, caught.value.remedy) == ("no-files", "name one of the files")


def test_safetensors_take_precedence_in_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", gguf_file(LLAMA, {"a.weight": floats(VALUES)}))
    save_file({"b.weight": torch.ones(2)}, tmp_path / "model.safetensors")

    assert type(open_storage(tmp_path)) is SafetensorsStorage
    assert type(open_storage(tmp_path / "a.gguf")) is GGUFStorage


@pytest.mark.usefixtures("seen_texts")
def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", gguf_file(LLAMA, {"a.weight": floats(VALUES)}))
    with GGUFStorage(path) as storage:
        write(path, gguf_file(LLAMA, {"a.weight": floats(VALUES), "b.weight": floats(VALUES)}))
        with pytest.raises(StorageError) as caught:
            storage.read("a.weight")
    assert caught.value.rule == "file-length"
