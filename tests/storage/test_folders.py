"""Complete and incomplete folders: errors of loading equal the findings of `verify`, word for word."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from syrupy.assertion import SnapshotAssertion

from qload.checkpoint import open_checkpoint
from qload.errors import StorageError
from qload.verify import inspect, verify
from qload.verify.report import finding_of

pytestmark = pytest.mark.usefixtures("seen_texts")

INDEX = "model.safetensors.index.json"


def fill(folder: Path, files: dict[str, list[str]], index: dict[str, Any] | None = None) -> Path:
    """Write files by name, each with tensors of these names, and an index with this content."""
    for file, names in files.items():
        save_file({name: torch.ones(2, 2) for name in names}, folder / file)
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    return folder


def shards(*numbers: int, count: int = 3) -> dict[str, list[str]]:
    return {f"model-{k:05}-of-{count:05}.safetensors": [f"layers.{k}.weight"] for k in numbers}


def indexed(files: dict[str, list[str]], **more: Any) -> dict[str, Any]:
    return {"weight_map": {name: file for file, names in files.items() for name in names}, **more}


REFUSED = [
    pytest.param(
        shards(1, 2),
        {"weight_map": {}},
        "no-tensors",
        "names no tensor, and its folder has model-00001",
        id="an index that is empty",
    ),
    pytest.param(
        {}, {"weight_map": {}}, "no-tensors", f"{INDEX}: names no tensor", id="nothing but an index"
    ),
    pytest.param(
        {"model.safetensors": []}, None, "no-tensors", "holds no tensor", id="nothing stored at all"
    ),
    pytest.param(
        {"a.safetensors": [], "b.safetensors": []},
        None,
        "no-tensors",
        "a.safetensors, b.safetensors: holds no",
        id="nothing stored in two files",
    ),
    pytest.param(
        shards(1, 2, 3),
        indexed(shards(1, 2)),
        "index-mismatch",
        f"model-00003-of-00003.safetensors: exists, and {INDEX} names no tensor of it",
        id="an index that forgets a shard",
    ),
    pytest.param(
        shards(1, 2, count=2),
        indexed(shards(1, count=2)),
        "index-mismatch",
        "model-00002-of-00002",
        id="an index that forgets the last of two",
    ),
    pytest.param(
        shards(1, 3),
        None,
        "shard-gap",
        "model-00002-of-00003.safetensors not found: 1 of 3 files are missing",
        id="a gap without an index",
    ),
    pytest.param(
        shards(1, 2),
        indexed(shards(1, 2)),
        "shard-gap",
        f"{INDEX}: model-00003-of-00003.safetensors not found",
        id="a gap in an index",
    ),
    pytest.param(
        shards(1, 2, count=2) | {"z-00002-of-00002.safetensors": ["b"]},
        indexed(shards(1, 2, count=2) | {"z-00002-of-00002.safetensors": ["b"]}),
        "shard-gap",
        f"{INDEX}: z-00001-of-00002.safetensors not found: 1 of 2 files are missing",
        id="a gap in the second of two sets",
    ),
    pytest.param(
        shards(1, count=999999),
        None,
        "shard-gap",
        "999998 of 999999 files are missing",
        id="a million missing",
    ),
    pytest.param(
        {**shards(1, 2, 3), "model.safetensors": ["layers.1.weight", "layers.2.weight"]},
        indexed(shards(1, 2, 3)),
        "duplicate-tensor",
        f"model-00001-of-00003.safetensors, as in {INDEX}, and so are 1 more; programs differ",
        id="a newer file beside an old index",
    ),
    pytest.param(
        {**shards(1, 2, 3), **shards(1, 2, count=2)},
        None,
        "duplicate-tensor",
        "model-00001-of-00002.safetensors: numbered files of another division are in the folder, and no "
        "index: model-00001-of-00003.safetensors",
        id="two divisions without an index",
    ),
    pytest.param(
        shards(1, 2, count=2),
        indexed(shards(1, 2, 3)),
        "index-missing-file",
        f"{INDEX}: model-00001-of-00003.safetensors, model-00002-of-00003.safetensors, "
        "model-00003-of-00003.safetensors not found, with 3 tensors",
        id="an older index beside newer files",
    ),
    pytest.param(
        {"one.safetensors": ["a"], "two.safetensors": ["a"]},
        None,
        "duplicate-tensor",
        "is also in",
        id="two sources without an index",
    ),
    pytest.param(
        {**shards(1, 2, 3), "model.safetensors": ["layers.1.weight"]},
        None,
        "duplicate-tensor",
        "is also in",
        id="one file and numbered ones without an index",
    ),
]


@pytest.mark.parametrize(("files", "index", "rule", "text"), REFUSED)
def test_what_makes_tensors_ambiguous_or_incomplete_is_refused(
    files: dict[str, list[str]],
    index: dict[str, Any] | None,
    rule: str,
    text: str,
    tmp_path: Path,
    golden: SnapshotAssertion,
) -> None:
    fill(tmp_path, files, index)

    with pytest.raises(StorageError) as caught:
        open_checkpoint(tmp_path)

    assert caught.value.rule == rule
    assert text in str(caught.value)
    assert str(caught.value) == golden
    assert verify(tmp_path).verdict == "unreadable"
    assert finding_of(caught.value) in verify(tmp_path).findings
    assert finding_of(caught.value) in inspect(tmp_path).findings


def test_a_broken_rival_hides_no_other_one(tmp_path: Path) -> None:
    fill(tmp_path, {**shards(1, 2, 3), "model.safetensors": ["layers.1.weight"]}, indexed(shards(1, 2, 3)))
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"no header")

    with pytest.raises(StorageError) as caught:
        open_checkpoint(tmp_path)

    assert (caught.value.rule, caught.value.tensor) == ("duplicate-tensor", "layers.1.weight")


LAWFUL = [
    pytest.param(shards(1, 2, 3), None, "", id="numbered from one"),
    pytest.param(shards(0, 1, 2), None, "", id="numbered from nought"),
    pytest.param(shards(0, 1, 2, 3), None, "", id="numbered from nought to the count"),
    pytest.param(
        {"a.safetensors": ["layers.1.weight"], "b.safetensors": []}, None, "", id="an empty file among others"
    ),
    pytest.param(
        {"a.safetensors": ["layers.1.weight"], "b.safetensors": ["b"]}, None, "", id="no usual name"
    ),
    pytest.param(
        {**shards(1, 2, 3), "a.safetensors": ["layers.1.weight"]},
        None,
        "1 files in the folder of model-00001-of-00003.safetensors are not read: a.safetensors",
        id="another file beside those that are numbered",
    ),
    pytest.param(
        {
            "model.safetensors": ["layers.1.weight"],
            "consolidated.safetensors": ["wq"],
            "model.fp16.safetensors": ["layers.1.weight"],
        },
        None,
        "1 files in the folder of model.safetensors are not read: model.fp16.safetensors\n"
        "consolidated.safetensors: not read: the model under Mistral's or Meta's own names",
        id="other names and a variant, without an index",
    ),
    pytest.param(
        shards(1, 2, 3), indexed(shards(1, 2, 3), metadata={"total_size": 48}), "", id="a total that is one"
    ),
    pytest.param(
        shards(1, 2, 3),
        indexed(shards(1, 2, 3), metadata={"total_size": 48 + 3 * 80}),
        "",
        id="a total that counts headers",
    ),
    pytest.param(
        shards(1, 2, 3),
        indexed(shards(1, 2, 3), metadata={"total_size": 4800}),
        f"{INDEX} says total_size 4800; its tensors take 48 bytes",
        id="a total of what is not there",
    ),
    pytest.param(
        shards(1, 2, 3),
        indexed(shards(1, 2, 3), metadata={"total_size": 7}),
        f"{INDEX} says total_size 7; its tensors take 48 bytes",
        id="a total that is none",
    ),
    pytest.param(shards(1, 2, 3), indexed(shards(1, 2, 3), metadata=[{}]), "", id="metadata of another kind"),
    pytest.param(
        {**shards(1, 2, 3), "consolidated.safetensors": ["wq"]},
        indexed(shards(1, 2, 3)),
        "consolidated.safetensors: not read: the model under Mistral's or Meta's own names",
        id="the same, by other names",
    ),
    pytest.param(
        {
            **shards(1, 2, 3),
            "adapter_model.safetensors": ["lora_A"],
            "model.fp16.safetensors": ["layers.1.weight"],
        },
        indexed(shards(1, 2, 3)),
        f"{INDEX} names no tensor of 1 files in its folder: model.fp16.safetensors\n"
        "adapter_model.safetensors: not read: an adapter of PEFT, which is not applied",
        id="an adapter and a variant",
    ),
    pytest.param(
        {**shards(1, 2, 3), **shards(1, 2, count=2)},
        indexed(shards(1, 2, 3)),
        "model-00001-of-00002.safetensors and 1 more: not read: numbered files of another upload, which some "
        "programs read too (mlx-lm, TGI); remove them",
        id="all shards of another division",
    ),
    pytest.param(
        {**shards(1, 2, 3), "model-00001-of-00001.safetensors": ["layers.3.weight"]},
        indexed(shards(1, 2, 3)),
        "model-00001-of-00001.safetensors: not read: numbered files of another upload, which some programs "
        "read too (mlx-lm, TGI); remove them",
        id="a shard of another division",
    ),
    pytest.param(
        {"a.safetensors": ["layers.1.weight"], "._a.safetensors": ["layers.1.weight"]},
        None,
        "._a.safetensors: not read: hidden, as macOS leaves beside a copy",
        id="a hidden file",
    ),
    pytest.param(
        {**shards(1, 2, 3), "model.safetensors": ["other"]},
        indexed(shards(1, 2, 3)),
        f"{INDEX} names no tensor of 1 files in its folder: model.safetensors",
        id="names that the index has not",
    ),
]


@pytest.mark.parametrize(("files", "index", "note"), LAWFUL)
def test_what_differs_elsewhere_is_a_note(
    files: dict[str, list[str]], index: dict[str, Any] | None, note: str, tmp_path: Path
) -> None:
    fill(tmp_path, files, index)

    with open_checkpoint(tmp_path) as weights:
        assert weights.get_tensor("layers.1.weight").tolist() == [[1, 1], [1, 1]]
    assert verify(tmp_path).notes == tuple(note.splitlines())
    assert verify(tmp_path).verdict == inspect(tmp_path).verdict == "ok"


SUBFOLDER = "subfolders with models are not read: {}; name one of them to read it"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"
LFS = ".safetensors: not read: a pointer of Git LFS in the place of the file"
# Path of a file beside a model, its text, and the note on it.
STRAYS = {
    "original/consolidated.00.pth": SUBFOLDER.format("original"),
    "fp8/model.safetensors": SUBFOLDER.format("fp8"),
    "onnx/model.onnx": SUBFOLDER.format("onnx"),
    "assets/a.png": "",
    ".x/model.safetensors": "",
    "._a.safetensors.index.json": "",
    "consolidated.safetensors": f"consolidated{LFS}",
    "model.safetensors.incomplete":
        "model.safetensors.incomplete: not read: the rest of a download that did not end",
    "model.safetensors.aria2": "model.safetensors.aria2: not read: the rest of a download that did not end",
    ".cache/huggingface/download/1.incomplete":
        ".cache/huggingface/download/1.incomplete: not read: the rest of a download that did not end",
}  # fmt: skip


@pytest.mark.parametrize("index", [False, True], ids=["one file", "an index"])
@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_file_is_named_and_not_accused(stray: str, index: bool, tmp_path: Path) -> None:
    files = {"model.safetensors": ["layers.1.weight"]}
    fill(tmp_path, files, indexed(files) if index else None)
    (tmp_path / stray).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / stray).write_text(POINTER)

    report = verify(tmp_path)

    assert (report.verdict, report.findings) == ("ok", ())
    assert report.notes == ((STRAYS[stray],) if STRAYS[stray] else ())


def test_subfolders_are_listed_up_to_the_eighth(tmp_path: Path) -> None:
    fill(tmp_path, {"model.safetensors": ["layers.1.weight"]})
    for number in range(9):
        (tmp_path / f"q{number}").mkdir()
        (tmp_path / f"q{number}/model.gguf").touch()

    (note,) = verify(tmp_path).notes

    assert "q0, q1, q2, q3, q4, q5, q6, q7, ...; name one" in note


@pytest.mark.parametrize(
    ("files", "index", "remedy"),
    [
        (
            shards(1),
            indexed(shards(1, 2, 3)),
            "fetch the missing files: the download a.incomplete did not end",
        ),
        (shards(1, 3), None, "fetch the missing files: the download a.incomplete did not end"),
        ({}, None, "fetch the missing files: the download a.incomplete did not end"),
        (
            shards(1, 2, count=2),
            indexed(shards(1, 2, 3)),
            "fetch the missing files: the download a.incomplete did not end; or fetch the index again, if "
            "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors belong to a newer upload",
        ),
    ],
)
def test_a_download_that_did_not_end_is_named_with_what_is_missing(
    files: dict[str, list[str]], index: dict[str, Any] | None, remedy: str, tmp_path: Path
) -> None:
    fill(tmp_path, files, index)
    (tmp_path / "a.incomplete").touch()

    (finding,) = verify(tmp_path).findings

    assert finding.remedy == remedy


def test_models_in_subfolders_alone_are_named(tmp_path: Path) -> None:
    (tmp_path / "int4").mkdir()
    fill(tmp_path / "int4", {"model.safetensors": ["a"]})

    (finding,) = verify(tmp_path).findings

    assert (finding.rule, finding.remedy) == ("no-files", f"name one of its subfolders: {tmp_path / 'int4'}")


@pytest.mark.parametrize(("base", "words"), [("org/base", " of org/base"), (7, ""), (None, "")])
def test_an_adapter_without_its_model_is_named(base: Any, words: str, tmp_path: Path) -> None:
    fill(tmp_path, {"adapter_model.safetensors": ["base_model.model.up.lora_A.weight"]})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    note = f"this is an adapter of PEFT{words}, and no model (adapter_config.json): only PEFT applies it"

    assert note in verify(tmp_path).notes
    (tmp_path / "config.json").write_text("{}")
    assert note not in verify(tmp_path).notes


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_pointer_in_the_place_of_json_is_named(name: str, tmp_path: Path) -> None:
    fill(tmp_path, {"model.safetensors": ["a"]}, indexed({"model.safetensors": ["a"]}))
    (tmp_path / name).write_text(POINTER)

    (finding,) = verify(tmp_path).findings

    assert finding.message == f"{name}: is a Git LFS pointer in the place of the file"
    assert finding.remedy == "fetch the file: git lfs pull"


def test_a_damaged_file_that_is_not_read_does_no_harm(tmp_path: Path) -> None:
    fill(tmp_path, shards(1, 2, 3), indexed(shards(1, 2, 3)))
    (tmp_path / "model.safetensors").write_bytes(b"cut")

    assert verify(tmp_path).verdict == "ok"


@pytest.mark.parametrize("name", ["config.json", "quantize_config.json", "hf_quant_config.json", INDEX])
@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"b": [{"a": 1, "c": 2, "a": 3}]}'])
def test_a_key_that_stands_twice_in_any_json_is_refused(name: str, text: str, tmp_path: Path) -> None:
    fill(tmp_path, {"model.safetensors": ["x"]})
    (tmp_path / name).write_text(text)

    with pytest.raises(StorageError, match=f"^{name}: a: occurs twice in one JSON object") as caught:
        open_checkpoint(tmp_path)

    assert verify(tmp_path).findings == (finding_of(caught.value),)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_text_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    fill(tmp_path, {"model.safetensors": ["x"]})
    (tmp_path / name).write_text('{"quantization_config": {"quant_method": "\\ud800"}, "weight_map": {}}')

    report = verify(tmp_path)

    assert report.verdict == "unreadable"
    assert "surrogates not allowed" in report.findings[0].message
    report.findings[0].message.encode()
