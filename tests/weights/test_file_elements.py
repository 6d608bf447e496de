"""Elements that native code reads from their file: the place, and files that cannot be read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qload.errors import StorageError
from qload.storage import MemoryStorage, SafetensorsStorage
from qload.weights.prefetch import find_file_elements

pytestmark = pytest.mark.usefixtures("seen_texts")

CPU = torch.device("cpu")
ROWS = slice(1, 3), slice(None)


@pytest.fixture
def stored(tmp_path: Path) -> SafetensorsStorage:
    save_file({"a": torch.arange(12, dtype=torch.int32).view(3, 4)}, tmp_path / "model.safetensors")
    return SafetensorsStorage(tmp_path)


def test_rows_have_a_place_in_their_file(stored: SafetensorsStorage) -> None:
    found = find_file_elements(stored, "a", ROWS, CPU)

    assert found is not None
    assert (found.nbytes, found.dtype) == (2 * 4 * 4, torch.int32)
    content = (Path(stored.files["model.safetensors"]).read_bytes())[found.place.begin :]
    assert content[: found.nbytes] == torch.arange(4, 12, dtype=torch.int32).numpy().tobytes()


@pytest.mark.parametrize("index", [(slice(None), slice(1, 3))], ids=["columns"])
def test_elements_with_gaps_have_none(stored: SafetensorsStorage, index: tuple[slice, ...]) -> None:
    assert find_file_elements(stored, "a", index, CPU) is None


def test_other_storages_and_devices_have_none(stored: SafetensorsStorage) -> None:
    class Other(SafetensorsStorage):
        """May read otherwise."""

    memory = MemoryStorage({"a": torch.zeros(3, 4)})

    assert find_file_elements(memory, "a", ROWS, CPU) is None
    assert find_file_elements(Other(Path(stored.files["model.safetensors"])), "a", ROWS, CPU) is None
    assert find_file_elements(stored, "a", ROWS, torch.device("cuda")) is None


def test_a_closed_file_leaves_the_target_to_another_read(stored: SafetensorsStorage) -> None:
    found = find_file_elements(stored, "a", ROWS, CPU)
    stored.close()

    assert found is not None
    assert not found.move(torch.empty(2, 4, dtype=torch.int32), 32, ())
    with pytest.raises(StorageError):
        stored.read("a")
