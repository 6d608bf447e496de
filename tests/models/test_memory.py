"""Bytes that a model takes, worked by hand: each dtype, each kind of tensor, one rank and several."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

from qload import (
    MemoryStorage,
    NotEnoughMemoryError,
    Weights,
    inspect,
    layers,
    loader_from_config,
    open_checkpoint,
    plan,
)
from qload.cli.main import main
from qload.errors import QloadError
from qload.models import PagedCache, memory
from qload.models.config import text_config
from qload.models.memory import check_memory, stored_bytes, tensor_bytes
from qload.testing import make_checkpoint

pytestmark = pytest.mark.usefixtures("seen_texts")

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 32, "rms_norm_eps": 1e-5, "head_dim": 16,
}  # fmt: skip
STORED = {
    "up.weight": torch.ones(6, 4, dtype=HALF),  # 24 plain floats
    "up.bias": torch.ones(6, dtype=BRAIN),  # 6 more, and 5 in a stack without a suffix
    "experts.gate_up_proj": torch.ones(1, 5, 1, dtype=SINGLE),
    "down.qweight": torch.ones(3, 8, dtype=torch.int32),  # 96 bytes of words
    "down.scales": torch.ones(2, 8, dtype=HALF),  # 32 bytes of scales, which no load casts
    "gate.weight": torch.ones(7, 2).to(torch.float8_e4m3fn),  # 14 bytes of FP8
    "gate.weight_scale": torch.ones(3, dtype=SINGLE),  # 12 bytes
}
KEPT = 96 + 32 + 14 + 12


@pytest.mark.parametrize(
    ("dtype", "floats"),
    [
        (None, 24 * 2 + 6 * 2 + 5 * 4),
        (HALF, 35 * 2),
        (BRAIN, 35 * 2),
        (SINGLE, 35 * 4),
    ],
)
def test_plain_floats_count_in_the_dtype_of_the_load(dtype: torch.dtype | None, floats: int) -> None:
    assert stored_bytes(MemoryStorage(STORED), dtype) == floats + KEPT


@pytest.mark.parametrize(("dtype", "size"), [(HALF, 2), (BRAIN, 2), (SINGLE, 4)])
@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_keys_and_values_of_a_cache(dtype: torch.dtype, size: int, ranks: int, heads: int) -> None:
    """3 layers, 5 pages of 8 tokens, heads of 16 numbers, once for keys and once for values."""
    cache = PagedCache.of(text_config(CONFIG), pages=5, page_size=8, ranks=ranks, dtype=dtype, device="meta")

    assert cache.bytes == 3 * 5 * 8 * heads * 16 * 2 * size


def test_keys_and_values_of_two_widths() -> None:
    cache = PagedCache(2, 3, 4, 1, k_dim=24, v_dim=16, dtype=HALF)

    assert (cache.pages, cache.bytes) == (3, 2 * 3 * 4 * (24 + 16) * 2)
    assert "960 bytes" not in cache.extra_repr()
    assert f"{2 * 3 * 4 * 40 * 2} bytes" in cache.extra_repr()
    assert cache.state_dict() == {}  # contents are no weights


def test_a_tensor_of_two_modules_counts_once_and_buffers_count() -> None:
    first, second = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False).half()
    first.register_buffer("table", torch.zeros(3, dtype=torch.int8))
    tied = nn.Linear(4, 8, bias=False)
    tied.weight = first.weight

    assert tensor_bytes(first) == 4 * 8 * 4 + 3
    assert tensor_bytes(first, tied) == 4 * 8 * 4 + 3
    assert tensor_bytes(first, second, tied) == 4 * 8 * 4 + 3 + 4 * 8 * 2


@pytest.mark.parametrize(("free", "enough"), [(99, False), (100, True), (101, True), (None, True)])
def test_as_many_bytes_as_are_free_are_enough(free: int | None, enough: bool) -> None:
    if enough:
        check_memory(torch.device("cpu"), 100, free)
        return
    with pytest.raises(NotEnoughMemoryError) as caught:
        check_memory(torch.device("cpu"), 100, free)
    assert (caught.value.needed, caught.value.free) == (100, 99)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "checkpoint"
    make_checkpoint("gptq", folder, model="llama")
    return folder


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_run_needs_weights_and_cache_in_the_dtype_that_it_computes_in(
    dtype: str, size: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with one byte less than both need: 2 + 17 tokens fill two pages of 16, and one is spare."""
    tensors = load_file(checkpoint / "model.safetensors")
    plain = [each for name, each in tensors.items() if name.endswith((".weight", ".bias"))]
    kept = sum(each.nbytes for name, each in tensors.items() if not name.endswith((".weight", ".bias")))
    config = json.loads((checkpoint / "config.json").read_text())
    heads = config["num_key_value_heads"] * (
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    )
    cache = config["num_hidden_layers"] * 3 * 16 * heads * 2 * size
    needed = sum(each.numel() for each in plain) * size + kept + cache
    words = ["run", str(checkpoint), "--prompt-ids", "1,2", "--tokens", "17", "--dtype", dtype]

    monkeypatch.setattr("qload.models.memory.free_bytes", lambda device: needed - 1)
    refused = CliRunner().invoke(main, words)
    monkeypatch.setattr("qload.models.memory.free_bytes", lambda device: needed)
    enough = CliRunner().invoke(main, words)

    assert refused.exit_code == 2, refused.output
    assert enough.exit_code == 0, enough.output


# A layer of 8 outputs and 64 inputs: format, config, tensors, bytes by hand.
LAYERS: dict[str, tuple[dict[str, Any] | None, dict[str, torch.Tensor], int]] = {
    "plain float16": (None, {"weight": torch.ones(8, 64, dtype=HALF)}, 8 * 64 * 2),
    "plain float32": (None, {"weight": torch.ones(8, 64)}, 8 * 64 * 4),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {
            "qweight": torch.ones(8, 8, dtype=torch.int32),
            "qzeros": torch.full((2, 1), 0x77777777, dtype=torch.int32),
            "scales": torch.ones(2, 8, dtype=HALF),
        },
        8 * 8 * 4 + 2 * 4 + 2 * 8 * 2,
    ),
    "fp8": (
        {"quant_method": "fp8"},
        {"weight": torch.ones(8, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1)},
        8 * 64 + 4,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_inspect_and_plan_count_the_bytes_of_a_layer(name: str, tmp_path: Path) -> None:
    config, tensors, expected = LAYERS[name]
    named = {f"model.layers.0.mlp.up_proj.{key}": tensor for key, tensor in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    weights = Weights(MemoryStorage(named), loader=loader_from_config(config))

    (layer,) = inspect(tmp_path).layers
    assert layer.bytes == expected
    assert plan(weights, tp=1).worlds[1].bytes == (expected,)
    halves = plan(weights, tp=2).worlds[2]
    assert not halves.fits or halves.bytes in ((expected // 2,) * 2, ((expected - 4) // 2 + 4,) * 2)


def test_the_layers_of_a_checkpoint_that_cannot_be_loaded_count_as_they_are_stored(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    save_file(
        {"up.qweight": torch.ones(8, 8, dtype=torch.int32), "up.scales": torch.ones(2, 8, dtype=HALF)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(config))

    with open_checkpoint(tmp_path) as weights:
        (layer,) = layers(weights)

    assert isinstance(layer.error, QloadError)
    assert layer.bytes == 8 * 8 * 4 + 2 * 8 * 2


@pytest.mark.parametrize(
    ("text", "free"),
    [
        ("MemTotal: 9 kB\nMemAvailable:   7 kB\nMemFree: 5 kB\n", 7 * 1024),
        ("MemTotal: 9 kB\n", None),
        (None, None),
    ],
    ids=["stated", "not stated", "no such file"],
)
def test_the_free_memory_is_what_the_system_calls_available(
    text: str | None, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    monkeypatch.setattr(memory, "MEMINFO_FILE", tmp_path / "meminfo")

    assert memory.free_bytes(torch.device("cpu")) == free
