"""Many loads onto a device: bits, ledger and notes of the same loads one by one, and no thread that fails."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload import devices, native
from qload.kernel_formats import alike
from qload.listing import layers, load_layers
from qload.spec import Weight
from qload.testing import assert_same_bits
from qload.weights import ahead, open_checkpoint

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
    monkeypatch.setattr(ahead.ReaderAhead.__init__, "__defaults__", (run,))
    with caplog.at_level(logging.WARNING, "qload"):
        made = compare(written(tmp_path, kind), target)

    assert "reading ahead failed" not in caplog.text
    assert all(tensor.is_cuda for weight in made for tensor in weight.fields().values())


def test_layers_that_are_alike_follow_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []
    inner = alike.AlikeLayers.repack

    def told(self: alike.AlikeLayers, weight: Weight, layout: str) -> Weight | None:
        made = inner(self, weight, layout)
        followed.extend([] if made is None else [weight.layer.name])
        return made

    monkeypatch.setattr(alike.AlikeLayers, "repack", told)
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
