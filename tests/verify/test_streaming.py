"""Large checkpoints: few bytes read, and little memory."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qload.storage import MemoryStorage
from qload.verify import inspect, verify
from qload.verify.blocks import pieces

MEBI = 1 << 20

WATCH = """
import re, sys, threading
peak, done = 0, threading.Event()

def anonymous():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+)", status.read())[1]) * 1024

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
from qload.verify import verify
report = verify(sys.argv[1], against=sys.argv[1])
done.set()
watcher.join()
assert report.verdict == "ok", report
sys.stdout.write(str(peak))
"""


def large_layer(folder: Path, K: int, N: int) -> int:
    """Write a layer of noise; return its bytes."""
    tensors = {
        "a.qweight": torch.randint(-(2**31), 2**31, (K // 8, N), dtype=torch.int32),
        "a.qzeros": torch.full((K // 128, N // 8), 0x77777777, dtype=torch.int32),
        "a.scales": torch.ones(K // 128, N, dtype=torch.float16),
        "a.g_idx": (torch.arange(K) // 128).to(torch.int32),
    }
    save_file(tensors, folder / "model.safetensors")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from Linux' /proc")
def test_verify_holds_no_more_than_four_layers_and_256_mebibytes(tmp_path: Path) -> None:
    size = large_layer(tmp_path, 4096, 4096)

    done = subprocess.run(
        [sys.executable, "-c", WATCH, str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 4 * size + 256 * MEBI


def watch(monkeypatch: pytest.MonkeyPatch, storage: type, method: str, names: list[str]) -> None:
    """Add the name of each tensor that a method of a storage reads to `names`."""
    read = getattr(storage, method)

    def watched(self: object, name: str, *rest: object, **options: object) -> object:
        names.append(name)
        return read(self, name, *rest, **options)

    monkeypatch.setattr(storage, method, watched)


def test_inspect_reads_headers_indices_and_zero_points_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qload.storage import SafetensorsStorage

    large_layer(tmp_path, 512, 256)
    names: list[str] = []
    for method in ("read", "read_array", "read_into", "read_rows"):
        watch(monkeypatch, SafetensorsStorage, method, names)

    report = inspect(tmp_path)

    assert report.layers[0].sym is True
    assert set(names) == {"a.g_idx", "a.qzeros"}


def test_a_sparse_checkpoint_of_100_gigabytes_is_inspected_by_a_few_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qload.storage import SafetensorsStorage

    sparse_model(tmp_path, layers=205, K=16384, N=57344)
    sizes = []
    read = SafetensorsStorage.read

    def counted(self: SafetensorsStorage, *arguments: object) -> torch.Tensor:
        got = read(self, *arguments)  # type: ignore[arg-type]
        sizes.append(got.nbytes)
        return got

    monkeypatch.setattr(SafetensorsStorage, "read", counted)

    report = inspect(tmp_path)

    assert (report.verdict, len(report.layers)) == ("ok", 205)
    assert sum(layer.bytes for layer in report.layers) > 100 * 10**9
    assert sum(sizes) < 205 * MEBI


def sparse_model(folder: Path, layers: int, K: int, N: int) -> None:
    header, at = {}, 0
    shapes = {"qweight": ("I32", [K // 8, N]), "qzeros": ("I32", [K // 128, N // 8]),
              "scales": ("F16", [K // 128, N]), "g_idx": ("I32", [K])}  # fmt: skip
    for layer in range(layers):
        for name, (dtype, shape) in shapes.items():
            size = torch.Size(shape).numel() * (2 if dtype == "F16" else 4)
            header[f"model.layers.{layer}.up_proj.{name}"] = {
                "dtype": dtype, "shape": shape, "data_offsets": [at, at + size],
            }  # fmt: skip
            at += size
    head = json.dumps(header).encode()
    index = struct.pack(f"<{K}i", *(k // 128 for k in range(K)))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        try:
            file.truncate(8 + len(head) + at)
        except OSError:
            pytest.skip("this file system has no sparse files of 100 GB")
        for name, entry in header.items():
            if name.endswith("g_idx"):
                file.seek(8 + len(head) + entry["data_offsets"][0])
                file.write(index)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


def test_rows_that_fill_no_piece_in_whole_blocks_are_read_a_few_at_once() -> None:
    width = MEBI // 3 - 1  # three fit into a piece, and a block ends after 256 of them
    rows = torch.arange(7 * width, dtype=torch.int32).to(torch.uint8).reshape(7, width)

    got = list(pieces(MemoryStorage({"a": rows}), "a"))

    assert [len(piece) // width for piece in got] == [3, 3, 1]
    assert torch.cat(got).equal(rows.reshape(-1))


def test_matrices_that_fill_more_than_a_piece_are_read_one_after_another() -> None:
    width = MEBI // 2
    rows = torch.arange(2 * 3 * width, dtype=torch.int32).to(torch.uint8).reshape(2, 3, width)

    got = list(pieces(MemoryStorage({"a": rows}), "a"))

    assert [len(piece) // width for piece in got] == [2, 1, 2, 1]
    assert torch.cat(got).equal(rows.reshape(-1))


def test_progress_is_told_stage_by_stage(fixtures: Path) -> None:
    told: list[tuple[str, int, int]] = []

    verify(
        fixtures / "gptq" / "model_g32_desc_act", against=fixtures / "gptq" / "model_g32_desc_act",
        progress=lambda *step: told.append(step),
    )  # fmt: skip

    assert {stage for stage, _, _ in told} == {"headers", "values", "meaning", "against"}
    assert told[-1][1] == told[-1][2]
    assert all(done <= total for _, done, total in told)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_a_tensor_of_no_bytes_has_no_pieces(shape: tuple[int, ...]) -> None:
    assert list(pieces(MemoryStorage({"a": torch.empty(shape)}), "a")) == []
