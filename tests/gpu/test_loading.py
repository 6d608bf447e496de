"""Many loads onto a device: bits, ledger and notes of the same loads one by one, and no thread that fails."""

import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload import SafetensorsStorage, devices, native
from qload.checkpoint import layers, load_layers, open_checkpoint
from qload.devices import CudaFileReader, cuda
from qload.errors import StorageError
from qload.kernel_formats import repack_cache
from qload.spec import Weight
from qload.testing import assert_same_bits
from qload.weights import prefetch, stream

pytestmark = pytest.mark.gpu
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def gptq_layer(K: int, N: int, order: Tensor | None = None, middle: bool = True) -> dict[str, Tensor]:
    groups = torch.arange(K, dtype=torch.int32) // 128
    return {
        "qweight": words(K // 8, N),
        "qzeros": torch.full((K // 128, N // 8), 0x77777777 if middle else 0x12345671, dtype=torch.int32),
        "scales": torch.rand(K // 128, N).half(),
        "g_idx": groups if order is None else groups[order],
    }


def awq_layer(K: int, N: int) -> dict[str, Tensor]:
    return {
        "qweight": words(K, N // 8),
        "qzeros": words(K // 128, N // 8),
        "scales": torch.rand(K // 128, N).half(),
    }


def written(folder: Path, kind: str) -> Path:
    """A checkpoint of layers that are alike and of some that are not."""
    if kind == "awq":
        held = {f"{i}.proj": awq_layer(256, 512) for i in range(4)}
    else:
        held = {f"{i}.proj": gptq_layer(256, 512) for i in range(6)}
        held |= {f"{i}.down": gptq_layer(512, 256) for i in range(3)}
        held |= {
            "6.proj": gptq_layer(256, 512, torch.randperm(256)),
            "7.proj": gptq_layer(256, 512, middle=False),
        }
    tensors = {
        f"model.{layer}.{name}": tensor for layer, each in held.items() for name, tensor in each.items()
    }
    tensors |= {f"model.{i}.norm.weight": torch.rand(256).half() for i in range(8)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": AWQ if kind == "awq" else GPTQ}))
    return folder


def assert_same(made: Weight, want: Weight) -> None:
    assert (type(made), made.config, made.layer) == (type(want), want.config, want.layer)
    assert made.fields().keys() == want.fields().keys()
    for name, tensor in want.fields().items():
        assert_same_bits(made.fields()[name], tensor)


def compare(folder: Path, target: Any, device: str = "cuda") -> list[Weight]:
    prefixes = [layer.prefix for layer in layers(folder)]
    with (
        open_checkpoint(folder, device=device, target=target) as one,
        open_checkpoint(folder, device=device, target=target) as other,
    ):
        want = {prefix: one.get_weights(prefix) for prefix in prefixes}
        made = dict(load_layers(other))
        assert sorted(made) == sorted(want)
        for prefix, weight in made.items():
            assert_same(weight, want[prefix])
        assert other.report().used == one.report().used
        assert sorted(other.report().notes) == sorted(one.report().notes)
    return list(made.values())


@pytest.mark.parametrize("kind", ["gptq", "awq"])
@pytest.mark.parametrize("target", [None, "auto", "marlin", "strips", "exllama"])
@pytest.mark.parametrize("run", [1 << 12, 1 << 20])
def test_loads_are_those_of_one_by_one(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    target: Any,
    run: int,
) -> None:
    monkeypatch.setattr(prefetch.Prefetcher.__init__, "__defaults__", (run,))
    monkeypatch.setattr(cuda, "READ_BYTES", run)
    with caplog.at_level(logging.WARNING, "qload"):
        made = compare(written(tmp_path, kind), target)

    assert "reading ahead failed" not in caplog.text
    assert all(tensor.is_cuda for weight in made for tensor in weight.fields().values())


def test_layers_that_are_alike_follow_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []
    inner = repack_cache.RepackCache.repack

    def told(self: repack_cache.RepackCache, weight: Weight, *asked: Any) -> Weight | None:
        made = inner(self, weight, *asked)
        followed.extend([] if made is None else [weight.layer.name])
        return made

    monkeypatch.setattr(repack_cache.RepackCache, "repack", told)
    with open_checkpoint(written(tmp_path, "gptq"), device="cuda", target="marlin") as weights:
        list(load_layers(weights))

    assert followed == [f"model.{name}" for name in ("1.down", "1.proj", "2.down", "2.proj", *_rest())]


def _rest() -> list[str]:
    return [f"{i}.proj" for i in (3, 4, 5)]


def test_loads_on_another_stream(tmp_path: Path) -> None:
    folder = written(tmp_path, "gptq")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compare(folder, "auto")
    torch.cuda.synchronize()


def test_without_the_module_loads_are_the_same(tmp_path: Path) -> None:
    folder = written(tmp_path, "gptq")
    with open_checkpoint(folder, device="cuda", target="marlin") as one:
        want = dict(load_layers(one))
    with native.reference(), open_checkpoint(folder, device="cuda", target="marlin") as other:
        made = dict(load_layers(other))

    for prefix, weight in want.items():
        assert_same(made[prefix], weight)


@pytest.mark.parametrize("with_module", [True, False])
def test_copies_from_the_host(with_module: bool) -> None:
    memory = torch.randint(256, (1 << 12,), dtype=torch.uint8).pin_memory()
    places = [slice(0, 1), slice(64, 64 + 130), slice(256, 256), slice(1024, 1024 + 96), slice(2048, 4096)]
    targets = [
        torch.empty((), dtype=torch.int8, device="cuda"),
        torch.empty(13, 5, dtype=torch.float16, device="cuda"),
        torch.empty(0, 4, dtype=torch.int32, device="cuda"),
        torch.empty(2, 3, 4, dtype=torch.float32, device="cuda"),
        torch.empty(2, 1024, dtype=torch.uint8, device="cuda"),
    ]
    stream = torch.cuda.Stream()

    def copied() -> None:
        devices.copy_from_host(memory, places, targets, stream)
        stream.synchronize()

    if with_module:
        copied()
    else:
        with native.reference():
            copied()

    for place, target in zip(places, targets, strict=True):
        assert_same_bits(target.cpu(), memory[place].view(target.dtype).view(target.shape))


# Files that threads of the module read


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaFileReader]:
    """With buffers of a page."""
    monkeypatch.setattr(cuda, "READ_BYTES", 1 << 12)
    found = devices.file_reader(here())
    assert found is not None
    yield found
    found.close()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A checkpoint of 40 layers of a MiB."""
    save_file({f"{i:02}.weight": torch.rand(512, 512) for i in range(40)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_reader_says_which_of_its_tickets_failed(reader: CudaFileReader, tmp_path: Path) -> None:
    data = torch.randint(256, (100_000,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(data.numpy().tobytes())
    good, bad = (os.open(tmp_path / "file", flags) for flags in (os.O_RDONLY, os.O_WRONLY))
    asked = [
        [(good, 3, 99_000)],
        [(good, 0, 5), (good, 90_000, 10_001)],
        [(bad, 0, 1)],
        [(good, 7, 9), (good, 99_999, 1)],
    ]
    outs = [[torch.zeros(count, dtype=torch.uint8, device="cuda") for *_, count in each] for each in asked]
    home = torch.cuda.current_stream()

    tickets = [
        reader.begin([(*one, out.data_ptr(), 1, 0) for one, out in zip(each, into, strict=True)], home)
        for each, into in zip(asked, outs, strict=True)
    ]

    assert [reader.wait(ticket) for ticket in tickets] == [True, False, False, True]
    for i in (0, 3):
        for (_, begin, count), out in zip(asked[i], outs[i], strict=True):
            assert_same_bits(out.cpu(), data[begin : begin + count])
    for descriptor in (good, bad):
        os.close(descriptor)


def test_a_reader_that_is_closed_says_that_nothing_was_read(reader: CudaFileReader, plain: Path) -> None:
    out = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    with (plain / "model.safetensors").open("rb") as file:
        ranges = [(file.fileno(), 0, out.nbytes, out.data_ptr(), 1, 0)]
        tickets = [reader.begin(ranges, torch.cuda.current_stream()) for _ in range(40)]
        reader.close()

        assert not reader.wait(tickets[-1])
        assert not reader.wait(reader.begin(ranges, torch.cuda.current_stream()))


def test_tiny_tensors_and_those_larger_than_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "READ_BYTES", 1 << 12)
    tensors = {f"{i}": torch.rand(i % 7, 1 + i % 3).half() for i in range(500)}
    tensors |= {"large": torch.rand(1000, 777), "none": torch.tensor(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsStorage(tmp_path) as storage, prefetch.Prefetcher(storage, here()) as reader:
        begun = reader.begin([(name, ()) for name in tensors], storage)

        for name, want in tensors.items():
            got = begun.take(name, ())
            assert (got is None) == (want.numel() == 0)
            if got is not None:
                assert_same_bits(got.cpu(), want)


@pytest.mark.parametrize("change", ["cut short", "replaced"])
def test_a_file_that_changes_during_a_load_says_what_it_says_one_by_one(
    plain: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "WINDOW_BYTES", 3 << 20)
    file = plain / "model.safetensors"
    with open_checkpoint(plain) as one, open_checkpoint(plain, device="cuda") as other:
        found = load_layers(other)
        first = next(found)
        assert_same_bits(first[1].fields()["weight"].cpu(), one.get_weights("00").fields()["weight"])
        if change == "cut short":
            os.truncate(file, file.stat().st_size // 2)
        else:
            os.utime(file, ns=(1, 1))
        with pytest.raises(StorageError) as want:
            one.get_weights("01")

        with pytest.raises(StorageError) as caught:
            list(found)

    assert str(caught.value) == str(want.value)


def test_a_stream_that_is_left_writes_to_no_memory_of_others(plain: Path) -> None:
    with open_checkpoint(plain, device="cuda") as weights:
        found = load_layers(weights)
        next(found)
        found.close()  # type: ignore[attr-defined]
        others = [torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(40)]
        torch.cuda.synchronize()

    assert all(bool((other == 7).all()) for other in others)


def test_two_streams_at_once(tmp_path: Path) -> None:
    folder = written(tmp_path, "gptq")

    def load(own: torch.cuda.Stream) -> None:
        with torch.cuda.stream(own):
            for _ in range(3):
                compare(folder, "auto")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(load, [torch.cuda.Stream(), torch.cuda.Stream()]))
    torch.cuda.synchronize()


def test_what_is_read_by_the_module_is_asked_of_it_once_a_layer(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    begin = CudaFileReader.begin

    def told(self: CudaFileReader, ranges: Any, home: Any) -> int:
        asked.append(len(ranges))
        return begin(self, ranges, home)

    monkeypatch.setattr(CudaFileReader, "begin", told)
    with open_checkpoint(plain, device="cuda") as weights:
        list(load_layers(weights))

    assert asked == [1] * 40
