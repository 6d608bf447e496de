"""Files outside safetensors: an error with the kind of file and a remedy, for each entry point."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from syrupy.assertion import SnapshotAssertion

from qload.checkpoint import open_checkpoint
from qload.configs import FoundConfig
from qload.detect import read_claims, read_configs
from qload.errors import ConfigError, MissingTensorError, QloadError, StorageError, UnsupportedFormatError
from qload.storage import SafetensorsStorage, files
from qload.storage.unsupported_files import HEAD_BYTES
from qload.verify import inspect, verify
from qload.verify.report import finding_of

ZIP = b"PK\x03\x04" + bytes(60)
TORCHAO = {"quantization_config": {"quant_method": "torchao", "quant_type": "int4_weight_only"}}


class Trap:
    """Object with a side effect when unpickled: it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def write(folder: Path, *names: str, content: bytes = ZIP) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def refused(path: Path) -> Any:
    """Return the loading error; it equals the only finding of `inspect` and of `verify`."""
    with pytest.raises(QloadError) as caught:
        open_checkpoint(path)
    for report in (inspect(path), verify(path)):
        (finding,) = report.findings
        broken = finding.rule in ("not-safetensors", "no-files")
        assert report.verdict == ("unreadable" if broken else "unsupported")
        assert finding == finding_of(caught.value)
        assert finding.remedy
    return caught.value


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        pytest.param("sha256-0a", b"GGUF\x03\0\0\0" + bytes(40), "a GGUF file", id="GGUF"),
        pytest.param("ggml-model.bin", b"tjgg\x03\0\0\0", "a GGML file", id="GGML by its bytes"),
        pytest.param("pytorch_model.bin", ZIP, "a pickle of PyTorch", id="torch.save"),
        pytest.param("consolidated.00.pth", b"\x80\x02\x8a\x0a", "a pickle of PyTorch", id="an old pickle"),
        pytest.param("model.PT", b"", "a pickle of PyTorch", id="an empty file by its name"),
        pytest.param("weights", b"\x80\x04\x95", "a pickle of PyTorch", id="a pickle by its bytes"),
        pytest.param("model.onnx", b"\x08\x07", "an ONNX graph", id="ONNX"),
        pytest.param("rank0.engine", bytes(32), "a TensorRT engine", id="TensorRT"),
        pytest.param("tf_model.h5", b"\x89HDF\r\n\x1a\n", "an HDF5 file", id="HDF5"),
        pytest.param("flax_model.msgpack", b"\x81", "Flax weights", id="Flax"),
        pytest.param("weights.npz", ZIP, "NumPy arrays", id="NumPy"),
        pytest.param("a.safetensors", b"GGUF\x03\0\0\0", "a GGUF file", id="GGUF under another name"),
        pytest.param(
            "a.safetensors",
            b"version https://git-lfs.github.com/spec/v1\n",
            "a Git LFS pointer",
            id="Git LFS",
        ),
        pytest.param("a.safetensors", b"<!DOCTYPE html><html>", "a web page", id="a web page"),
    ],
)
def test_a_file_is_named_for_what_it_is(
    tmp_path: Path, name: str, content: bytes, words: str, golden: SnapshotAssertion
) -> None:
    error = refused(write(tmp_path, name, content=content) / name)

    assert str(error).startswith(f"{name}: is {words}")
    assert str(error) == golden
    fetched_wrongly = words in ("a Git LFS pointer", "a web page")
    assert error.rule == ("not-safetensors" if fetched_wrongly else "unsupported-format")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        pytest.param(["a.onnx", "b.onnx"], "a.onnx is an ONNX graph, and there are 1 ", id="ONNX"),
        pytest.param(["pytorch_model.bin", "config.json"], "pytorch_model.bin is a pickle", id="pickles"),
        pytest.param(["a.bin", "z.onnx"], "a.bin is a pickle", id="a pickle before an ONNX graph"),
        pytest.param(["rank0.engine", "config.json"], "rank0.engine is a TensorRT engine", id="TensorRT"),
    ],
)
def test_a_folder_without_safetensors_is_named_for_what_is_in_it(
    tmp_path: Path, names: list[str], words: str, golden: SnapshotAssertion
) -> None:
    error = refused(write(tmp_path, *names))

    assert f"{tmp_path}: no *.safetensors file in this directory: {words}" in str(error)
    assert str(error).replace(str(tmp_path), "FOLDER") == golden


def test_pickles_of_torchao_are_told_by_the_config_beside_them(tmp_path: Path) -> None:
    write(tmp_path, "pytorch_model.bin")
    write(tmp_path, "config.json", content=json.dumps(TORCHAO).encode())

    assert "with tensors of torchao" in str(refused(tmp_path))


@pytest.mark.parametrize("config", [b"", b"[]", b'{"quantization_config": 3}', b"{" * 5000])
def test_a_hostile_config_beside_a_pickle_changes_nothing(tmp_path: Path, config: bytes) -> None:
    write(write(tmp_path, "pytorch_model.bin"), "config.json", content=config)

    assert "is a pickle of PyTorch" in str(refused(tmp_path))


def test_of_a_pipeline_the_parts_are_named(tmp_path: Path) -> None:
    write(
        tmp_path, "model_index.json", "unet/model.safetensors", "vae/model.safetensors", "tokenizer/vocab.txt"
    )

    error = refused(tmp_path)

    assert "is a diffusers pipeline" in str(error)
    assert error.remedy == f"name one of them: {tmp_path / 'unet'}, {tmp_path / 'vae'}"


def test_nothing_is_unpickled_and_no_more_than_the_first_bytes_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "sprung"
    write(tmp_path / "model", "pytorch_model.bin", content=pickle.dumps(Trap(trap)) + bytes(1 << 16))
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "model" / "second.pt")
    asked: list[int] = []
    real = os.read
    monkeypatch.setattr(files.os, "read", lambda descriptor, n: asked.append(n) or real(descriptor, n))

    for path in (tmp_path / "model", *(tmp_path / "model").iterdir()):
        refused(path)

    assert max(asked) == HEAD_BYTES
    assert not trap.exists()


def test_a_fifo_with_the_name_of_a_pickle_does_not_block(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no FIFOs")
    os.mkfifo(tmp_path / "pytorch_model.bin")

    assert "pytorch_model.bin is a pickle" in str(refused(tmp_path))


def test_safetensors_beside_other_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, "pytorch_model.bin", "q4.gguf", "model.onnx", "model_index.json")
    save_file({"up.weight": torch.ones(4, 2)}, tmp_path / "model.safetensors")

    report = verify(tmp_path)
    assert (report.verdict, len(report.notes)) == ("ok", 3)


@pytest.mark.parametrize(
    ("names", "notes"),
    [
        pytest.param(["q4.gguf"], [("q4.gguf", "it is a GGUF file; open it by its own path")], id="GGUF"),
        pytest.param(["model.onnx"], [("model.onnx", "it is an ONNX graph; ONNX")], id="ONNX"),
        pytest.param(
            ["pytorch_model-1-of-2.bin", "pytorch_model-2-of-2.bin"],
            [("pytorch_model-1-of-2.bin", "as are 1 more files; take the safetensors")],
            id="pickles",
        ),
        pytest.param(
            ["training_args.bin", "optimizer.pt", "rng_state_0.pth", "vocab.txt"], [], id="no models"
        ),
    ],
)
@pytest.mark.parametrize("index", [False, True], ids=["one file", "an index"])
def test_other_models_beside_safetensors_are_named_once(
    tmp_path: Path,
    names: list[str],
    notes: list[tuple[str, str]],
    index: bool,
    golden: SnapshotAssertion,
) -> None:
    write(tmp_path, *names)
    save_file({"up.weight": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    if index:
        content = {"weight_map": {"up.weight": "model.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))

    for report in (verify(tmp_path), inspect(tmp_path)):
        assert report.verdict == "ok"
        assert len(report.notes) == len(notes)
        for note, (begin, words) in zip(report.notes, notes, strict=True):
            assert note.startswith(f"{begin}, in the folder of the safetensors, is not read: by its name ")
            assert words in note
    assert "\n".join(verify(tmp_path).notes) == golden


def mlx(folder: Path) -> Path:
    """Write a layer of MLX: 4 bits, groups of 32."""
    tensors = {
        "up.weight": torch.zeros(8, 8, dtype=torch.uint32),
        "up.scales": torch.ones(8, 2, dtype=torch.bfloat16),
        "up.biases": torch.ones(8, 2, dtype=torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_mlx_without_a_config_is_named_by_its_tensors(tmp_path: Path) -> None:
    mlx(tmp_path)

    error = refused(tmp_path)

    assert isinstance(error, UnsupportedFormatError)
    assert (error.format, "mlx-lm" in error.remedy) == ("MLX", True)


def test_a_plain_model_whose_config_has_a_key_of_mlx_is_plain(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"group_size": 32, "bits": 4}}))
    save_file({"up.weight": torch.ones(4, 2), "up.bias": torch.ones(4)}, tmp_path / "model.safetensors")

    with open_checkpoint(tmp_path) as weights:
        assert weights.get_weights("up").format == "unquantized"


def mistral(folder: Path, quantization: object, **tensors: torch.Tensor) -> Path:
    """Write a linear of four outputs in Mistral's own format."""
    (folder / "params.json").write_text(json.dumps({"dim": 2, "quantization": quantization}))
    tensors = {"weight": torch.tensor([[1.0, 448], [-2, 0], [0.5, 3], [8, -8]]), **tensors}
    tensors["weight"] = tensors["weight"].to(torch.float8_e4m3fn)
    stored = {f"layers.0.attention.wq.{suffix}": tensor for suffix, tensor in tensors.items()}
    save_file(stored, folder / "consolidated.safetensors")
    return folder


QSCALES = {"qscale_weight": torch.tensor(0.5).bfloat16(), "qscale_act": torch.tensor(2.0).bfloat16()}
TENSOR = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}


@pytest.mark.parametrize(("scheme", "dynamic"), [("TENSOR", False), (None, False), ("NO_SCALES", True)])
def test_mistrals_own_fp8_is_read_with_its_scheme_of_inputs(
    tmp_path: Path, scheme: str | None, dynamic: bool
) -> None:
    scales = {"qscale_weight": QSCALES["qscale_weight"]} if dynamic else QSCALES
    mistral(tmp_path, {**TENSOR, "qscheme_act": scheme}, **scales)

    with open_checkpoint(tmp_path) as weights:
        weight = weights.get_weights("layers.0.attention.wq")
        assert weights.report().complete
    assert weight.dequantize().tolist() == [[0.5, 224], [-1, 0], [0.25, 1.5], [4, -4]]
    assert weight.activations is not None
    assert weight.activations.dynamic == dynamic
    report = verify(tmp_path)
    assert (report.verdict, report.claims["file"]) == ("ok", "params.json")
    assert "this is Mistral's own format" in report.notes[0]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        ({**TENSOR, "qformat_weight": "fp4"}, "quantization.qformat_weight"),
        ({**TENSOR, "qscheme_act": "ROWS"}, "quantization.qscheme_act"),
        ([1], "quantization"),
    ],
)
def test_a_quantization_of_params_that_is_no_fp8_is_an_error_of_its_key(
    tmp_path: Path, quantization: object, key: str
) -> None:
    mistral(tmp_path, quantization, **QSCALES)

    with pytest.raises(ConfigError, match=rf"^params\.json: {key}\n"):
        open_checkpoint(tmp_path)


@pytest.mark.usefixtures("seen_texts")
def test_scales_of_inputs_that_params_state_are_required(tmp_path: Path) -> None:
    mistral(tmp_path, TENSOR, qscale_weight=QSCALES["qscale_weight"])

    with open_checkpoint(tmp_path) as weights, pytest.raises(MissingTensorError, match=r"wq\.input_scale"):
        weights.get_weights("layers.0.attention.wq")


def test_params_beside_a_config_do_not_count(tmp_path: Path) -> None:
    mistral(tmp_path, {**TENSOR, "qformat_weight": "fp4"}, **QSCALES)
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))

    with open_checkpoint(tmp_path) as weights:
        assert weights.get_weights("layers.0.attention.wq").format == "fp8"


def test_a_config_of_another_method_precedes_params(tmp_path: Path) -> None:
    mistral(tmp_path, TENSOR, **QSCALES)
    assert [config.file for config in read_configs(tmp_path)[1]] == ["params.json"]

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert read_configs(tmp_path)[1] == []


@pytest.mark.parametrize("scheme", [{}, {"qscheme_act": None}])
def test_mistrals_inputs_have_a_stored_scale_by_default(scheme: dict[str, None]) -> None:
    section = {"quant_method": "mistral", "qformat_weight": "fp8_e4m3", **scheme}
    source = FoundConfig("params.json", "quantization", section)

    (fmt,) = read_claims(source).formats

    assert (fmt.config.input_scale, fmt.activations.dynamic) == (True, False)


def test_a_name_of_5000_letters_is_cut(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        SafetensorsStorage(tmp_path / ("a" * 5000 + ".bin"))

    assert len(str(caught.value)) < 6000
