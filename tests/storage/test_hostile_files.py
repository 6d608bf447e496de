"""Special files, files above the size limit, and changes during a read: an immediate error of qload."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qload.checkpoint import open_checkpoint
from qload.errors import ConfigError, QloadError, StorageError
from qload.storage import SafetensorsStorage
from qload.storage import file_reads as module
from qload.verify import inspect, verify

NAMES = ("model.safetensors", "model.safetensors.index.json", "config.json", "quantize_config.json")
unix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs and devices")


def checkpoint(folder: Path) -> Path:
    save_file({"a.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    return folder


def fifo(place: Path) -> str:
    os.mkfifo(place)
    return "a FIFO"


def linked_fifo(place: Path) -> str:
    os.mkfifo(place.parent / "blob")
    place.symlink_to("blob")
    return "a FIFO"


def zeros(place: Path) -> str:
    place.symlink_to("/dev/zero")
    return "a device"


def bound_socket(place: Path) -> str:
    here = Path.cwd()
    os.chdir(place.parent)  # the path of a socket has at most about a hundred bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(place.name)
    finally:
        os.chdir(here)
    return "a socket"


@unix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [fifo, linked_fifo, zeros, bound_socket])
def test_what_is_no_regular_file_is_never_read(
    make: Callable[[Path], str], name: str, tmp_path: Path
) -> None:
    place = checkpoint(tmp_path) / name
    place.unlink(missing_ok=True)
    words = make(place)

    with pytest.raises((StorageError, ConfigError), match=f"(?s)^{name}: .*{words}") as caught:
        open_checkpoint(tmp_path)

    assert words in verify(tmp_path).findings[0].message
    assert caught.value.rule == verify(tmp_path).findings[0].rule


@unix
def test_a_path_to_a_device_is_refused(tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), tmp_path / "zero.safetensors"):
        if not path.exists():
            path.symlink_to("/dev/zero")

        with pytest.raises(StorageError, match="is a device, not a regular file"):
            SafetensorsStorage(path)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("x" * 5000, id="a name"),
        pytest.param("/".join(["x" * 100] * 50), id="a path"),
        pytest.param("x" * 5000 + ".safetensors", id="a file"),
        pytest.param("x" * 5000 + ".safetensors.index.json", id="an index"),
    ],
)
def test_a_path_of_5000_letters_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot be read: File name too long|no such file"):
        open_checkpoint(tmp_path / path)

    assert verify(tmp_path / path).verdict == "unreadable"


def test_an_index_may_not_name_a_file_of_5000_letters(tmp_path: Path) -> None:
    weight_map = {"a.weight": "x" * 5000 + ".safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(StorageError) as caught:
        open_checkpoint(tmp_path)

    assert len(str(caught.value)) < 400


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")

    with pytest.raises(StorageError, match=r"model\.safetensors: cannot be read: "):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("function", ["scandir", "stat", "open", "read", "preadv", "lstat"])
@pytest.mark.parametrize("number", [5, 13, 24, 116])  # EIO, EACCES, EMFILE, ESTALE
def test_every_error_of_the_system_is_one_of_storage(
    function: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, function):
        pytest.skip(f"this system has no os.{function}")
    checkpoint(tmp_path)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    def load() -> None:
        with open_checkpoint(tmp_path) as weights:
            weights.get_tensor("a.weight")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, refuse)
        with pytest.raises(StorageError, match=os.strerror(number)):
            load()
        report = inspect(tmp_path)

    assert report.verdict == ("ok" if function == "preadv" else "unreadable")


def header(name: str, shape: list[int]) -> bytes:
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, 0 if 0 in shape else 1]}
    return json.dumps({name: entry}, ensure_ascii=True).encode()


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        pytest.param("", [1], '"": is not a tensor name', id="no name"),
        pytest.param("....", [1], "....: is not a tensor name", id="dots alone"),
        pytest.param("a.", [1], "a.: is not a tensor name", id="a dot at the end"),
        pytest.param("a." + "x" * 5000, [1], "(5002 letters): is not a tensor name", id="5000 letters"),
        pytest.param("a\ud800", [1], "surrogates not allowed", id="half of a surrogate pair"),
        pytest.param("a", [2**61, 0], "has no elements and a dimension of", id="nothing, 2**61 times"),
        pytest.param("a", [0, 2**61], "has no elements and a dimension of", id="2**61 of nothing"),
        pytest.param("a", [1] * 64, "is not a list of at most 25 non-neg", id="64 dimensions"),
        pytest.param("a", [0] * 64, "is not a list of at most 25 non-neg", id="64 dimensions of nothing"),
    ],
)
def test_names_and_shapes_that_no_tensor_has_are_refused(
    name: str, shape: list[int], text: str, tmp_path: Path
) -> None:
    head = header(name, shape)
    (tmp_path / "model.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head + bytes(0 not in shape)
    )

    with pytest.raises(StorageError) as caught:
        open_checkpoint(tmp_path)

    assert text in str(caught.value)
    assert len(str(caught.value)) < 400
    assert verify(tmp_path).findings[0].message == str(caught.value)


# Changes during a read


LARGE = torch.arange(512 * 512, dtype=torch.int32).reshape(512, 512)
INDICES = [(), (slice(0, 512), slice(0, 1))]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    save_file({"a": LARGE}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("index", INDICES, ids=["whole", "rectangle"])
@pytest.mark.parametrize("by", ["rename", "write"])
@pytest.mark.parametrize("read_before", [False, True])
def test_a_file_replaced_by_one_of_the_same_length_is_an_error(
    read_before: bool, by: str, index: tuple[slice, ...], large: Path
) -> None:
    storage = SafetensorsStorage(large)
    if read_before:
        storage.read("a", index)

    save_file({"a": LARGE + 1}, large.with_name("new"))
    os.utime(large.with_name("new"), ns=(1, 1))
    if by == "rename":
        large.with_name("new").replace(large)
    else:
        large.write_bytes(large.with_name("new").read_bytes())
        os.utime(large, ns=(1, 1))

    with pytest.raises(StorageError, match="replaced by another file, since it was opened") as caught:
        storage.read("a", index)
    assert caught.value.rule == "file-replaced"


@pytest.mark.parametrize("change", ["cut short", "written to", "removed"])
def test_a_file_that_changes_between_two_of_its_runs_is_an_error(
    change: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change the file between two reads of one tensor."""
    storage, runs = SafetensorsStorage(large), count()
    fill = module.OpenFile.read_into

    def changing(self: module.OpenFile, buffer: memoryview, at: int) -> None:
        if next(runs) == 2:
            if change == "removed":
                large.unlink()
            elif change == "cut short":
                os.truncate(large, 2000)
            else:
                os.utime(large, ns=(1, 1))
        fill(self, buffer, at)

    monkeypatch.setattr(module.OpenFile, "read_into", changing)
    monkeypatch.setattr("qload.storage.file_reads.GAP", 0)

    with pytest.raises(StorageError, match=r"had 1048\d+ bytes when opened|was written to|is gone"):
        storage.read("a", (slice(0, 512), slice(0, 8)))


def test_a_file_that_is_gone_is_told_by_its_name_alone(large: Path) -> None:
    storage = SafetensorsStorage(large)
    storage.read("a")
    large.unlink()

    with pytest.raises(StorageError) as caught:
        storage.read("a")

    text = f"model.safetensors: is gone: {os.strerror(2)}"
    assert (str(caught.value), caught.value.rule) == (text, "no-files")


def test_a_file_that_ends_before_its_tensor_does_is_an_error(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network drive shows the old length of a shortened file."""
    storage = SafetensorsStorage(large)
    monkeypatch.setattr(module.OpenFiles, "_check_unchanged", lambda self, file: None)
    monkeypatch.setattr(module.OpenFiles, "_compare", lambda self, file, stats: None)
    os.truncate(large, 2000)

    with pytest.raises(StorageError, match="ended before 1048576 bytes of a tensor were read"):
        storage.read("a")


def test_verify_reports_a_file_that_is_replaced_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path)
    fill, times = module.OpenFile.read_into, count(1)

    def changing(self: module.OpenFile, buffer: memoryview, at: int) -> None:
        fill(self, buffer, at)
        os.utime(tmp_path / "model.safetensors", ns=(1, next(times)))

    monkeypatch.setattr(module.OpenFile, "read_into", changing)

    for report in (verify(tmp_path), verify(path=str(tmp_path))):
        assert (report.verdict, report.path) == ("unreadable", str(tmp_path))
        assert [finding.rule for finding in report.findings] == ["file-replaced"]


def test_closing_while_threads_read_ends_them_with_a_tensor_or_an_error(large: Path) -> None:
    for _ in range(20):
        storage, wrong = SafetensorsStorage(large), []
        started = threading.Barrier(5)

        def read(storage: SafetensorsStorage, started: threading.Barrier, wrong: list[object]) -> None:
            started.wait()
            try:
                while True:
                    if not torch.equal(storage.read("a", (slice(0, 512), slice(0, 99))), LARGE[:, :99]):
                        wrong.append("another tensor")
            except StorageError as error:
                wrong.extend([error] * (error.rule != "closed"))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=read, args=(storage, started, wrong)) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        storage.close()
        for thread in threads:
            thread.join()

        assert not wrong
        assert not storage._open._open


SHARDS = """
import resource, sys
from qload.storage import SafetensorsStorage
from qload.verify import verify
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with SafetensorsStorage(sys.argv[1]) as storage:
    for _ in range(2):
        for name in storage.keys():
            assert storage.read(name, (slice(0, 2), slice(1, 2))).tolist() == [[int(name)], [int(name)]]
print(verify(sys.argv[1]).verdict)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="this system has no limits of descriptors")
def test_a_checkpoint_may_have_more_shards_than_a_process_may_open(tmp_path: Path) -> None:
    for i in range(200):
        save_file({str(i): torch.full((2, 2), i)}, tmp_path / f"model-{i:05}-of-00200.safetensors")

    done = subprocess.run([sys.executable, "-c", SHARDS, str(tmp_path)], capture_output=True, text=True)

    assert (done.stdout.strip(), done.returncode) == ("ok", 0), done.stderr


def test_what_a_storage_leaves_open_is_closed_with_it(large: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(50):
        SafetensorsStorage(large).read("a")
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    assert after <= before + 2


def test_inspect_of_what_cannot_be_opened_raises_nothing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "a\0b", tmp_path / "x.bin"):
        assert inspect(path).verdict == "unreadable"
        with pytest.raises(QloadError):
            open_checkpoint(path)
