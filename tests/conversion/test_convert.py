"""Conversion of a checkpoint to another format: the same bits for every path, or no output."""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qload import convert, open_checkpoint, verify
from qload.checkpoint import layers
from qload.conversion import Conversion, new_checkpoint
from qload.conversion.quantization_config import NO_ACT_ORDER
from qload.conversion.targets import INTEGERS
from qload.errors import ArgumentError
from qload.errors.rules import rule_texts
from qload.formats import MarlinWeight
from qload.testing import make_checkpoint
from qload.verify import blocks, run_rules
from qload.verify.rules import Rule
from tests.cli.test_several import run
from tests.paths import FIXTURES
from tests.verify.checkpoints import GPTQ, gptq, model

pytestmark = pytest.mark.usefixtures("seen_texts")

OTHERS = {
    "awq": FIXTURES / "awq" / "model_gemm_g64",
    "desc_act": FIXTURES / "gptq" / "model_g32_desc_act",
    "experts": FIXTURES / "models" / "gptq_mixtral",
}
NO_INDEX = "the rows of its groups are not in order along K (act order), and"
UP = "model.layers.0.mlp.up_proj"


PART = ["layer-count", "architecture-missing", "architecture-shape"]  # errors of an incomplete model
FORMAT_OF = {"gptq_v2": "gptq", "compressed-tensors": "ct_pack", "marlin_checkpoint": "marlin"}  # in JSON


def made(format: str, folder: Path, **said: Any) -> Path:
    make_checkpoint(format, folder, config={"num_hidden_layers": 1, **said})
    return folder


def meant(folder: Path) -> dict[str, torch.Tensor]:
    """Return the values of each layer, by the loader of its config."""
    with open_checkpoint(folder) as weights:
        return {
            each.prefix: weights.get_weights(each.prefix).dequantize()
            for each in layers(folder)
            if each.bits is not None
        }


def same(one: Path, other: Path) -> bool:
    ours, theirs = meant(one), meant(other)
    return bool(ours) and ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def formats(folder: Path) -> set[str]:
    return {each.format for each in layers(folder) if each.format not in (None, "unquantized")}


def refused(found: Conversion) -> set[str]:
    return {layer.detail for layer in found.layers if layer.outcome == "refused"}


@pytest.mark.parametrize(
    ("source", "ways"),
    [
        ("gptq", ["awq", "gptq"]),
        ("gptq", ["marlin_checkpoint", "compressed-tensors", "gptq_v2"]),
        ("gptq-8bit", ["compressed-tensors", "awq", "gptq"]),
        ("gptq-act-order", ["gptq_v2", "gptq"]),
        ("awq", ["compressed-tensors", "gptq_v2", "awq"]),
        ("compressed-tensors", ["marlin_checkpoint", "awq", "compressed-tensors"]),
    ],
)
def test_whatever_the_way_the_weights_are_the_same(source: str, ways: list[str], tmp_path: Path) -> None:
    first = last = made(source, tmp_path / "first")
    for to in ways:
        found = convert(last, tmp_path / to, to=to)

        assert (found.verdict, set(found.counts)) == ("ok", {"bits"})
        last = tmp_path / to
        assert same(first, last)
        assert formats(last) == {FORMAT_OF.get(to, to)}


@pytest.mark.parametrize("source", OTHERS)
@pytest.mark.parametrize("to", ["gptq", "gptq_v2", "compressed-tensors", "float32"])
def test_checkpoints_of_other_tools_keep_their_bits(source: str, to: str, tmp_path: Path) -> None:
    found = convert(OTHERS[source], tmp_path / "out", to=to)
    if (source, to) == ("desc_act", "compressed-tensors"):
        assert refused(found) == {NO_ACT_ORDER}
        return

    assert (found.verdict, set(found.counts)) == ("ok", {"bits"})
    assert verify(tmp_path / "out").verdict == "ok"


def test_back_in_its_own_format_each_tensor_is_what_it_was(tmp_path: Path) -> None:
    convert(OTHERS["experts"], tmp_path / "awq", to="awq")
    convert(tmp_path / "awq", tmp_path / "gptq", to="gptq")
    was, now = (load_file(folder / "model.safetensors") for folder in (OTHERS["experts"], tmp_path / "gptq"))

    assert was.keys() == now.keys()
    assert all(torch.equal(was[name], now[name]) for name in was)


@pytest.mark.parametrize(
    ("source", "to", "reason"),
    [
        ("gptq-act-order", "awq", f"{NO_INDEX} awq has no g_idx"),
        ("gptq-act-order", "marlin_checkpoint", f"{NO_INDEX} a Marlin checkpoint has no g_idx"),
        ("gptq-act-order", "compressed-tensors", NO_ACT_ORDER),
        ("awq", "marlin_checkpoint", "a zero point is not 8, and a Marlin checkpoint stores no zero points"),
        (
            "awq",
            "gptq",
            "kernels read a zero point of 0, stored minus one, as 2**bits; gptq_v2 stores it unchanged",
        ),
        ("gptq", "marlin_24", "more than two of four neighbouring rows have a nonzero value"),
        (
            "fp8-block",
            "gptq",
            "its inputs are quantized (float8 group of 128 dynamic), which gptq cannot express",
        ),
    ],
)
def test_what_one_layer_cannot_be_no_layer_becomes(source: str, to: str, reason: str, tmp_path: Path) -> None:
    found = convert(made(source, tmp_path / "in"), tmp_path / "out", to=to)

    assert (found.verdict, refused(found), found.counts) == ("findings", {reason}, {"refused": 7})
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("source", "to", "ways"),
    [
        ("gptq-act-order", "awq", "write gptq_v2 or float32 instead"),
        ("awq", "gptq", "write gptq_v2 or compressed-tensors or quark or float32 instead"),
        (
            "gptq",
            "bfloat16",
            "write float32 instead, round the values by rounding=True (--round)",
        ),
    ],
)
def test_a_refusal_names_what_can_be_written_instead(source: str, to: str, ways: str, tmp_path: Path) -> None:
    checkpoint = made(source, tmp_path / "in")
    found = convert(checkpoint, tmp_path / "out", to=to)

    (note,) = [note for note in found.notes if "(--keep)" in note]
    assert note.startswith(f"{found.layers[0].name} and 6 layers like it: ")
    assert ways in note
    named = ways.removeprefix("write ").partition(" instead")[0].split(" or ")
    for way in named:
        assert convert(checkpoint, tmp_path / way, to=way).verdict == "ok"
    own = source.partition("-")[0]
    others = {*INTEGERS} - {own, to, "marlin_24", *named} if to in INTEGERS else set()
    assert all(convert(checkpoint, tmp_path / other, to=other).verdict != "ok" for other in sorted(others))


def test_layers_with_scales_that_are_nan_are_sent_to_no_other_target(tmp_path: Path) -> None:
    checkpoint = made("gptq-act-order", tmp_path / "in")
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"):
        tensors[f"{name}.scales"][0, 0] = torch.nan
    save_file(tensors, file)

    found = convert(checkpoint, tmp_path / "out", to="gptq_v2")

    assert {layer.name for layer in found.layers if layer.outcome == "refused"} == {
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
    }
    assert not [note for note in found.notes if "instead" in note or "(--keep)" in note]


def test_a_refusal_of_alike_layers_is_one_line_of_the_table(tmp_path: Path) -> None:
    checkpoint = made("gptq-act-order", tmp_path / "in")

    shown = run("convert", checkpoint, "--to", "awq", "-o", tmp_path / "out", "--table").stdout

    assert "refused  7 layers" in shown
    assert " ".join(shown.split()).count("awq has no g_idx") == 1
    assert "    model.layers.0.mlp.down_proj\n" in shown
    assert "findings  7 refused: nothing was written" in shown


def test_what_is_sparse_fits_marlin_24_and_comes_back(tmp_path: Path) -> None:
    stored = {name: tensor.repeat(16, 16) for name, tensor in gptq("up").items() if name != "up.g_idx"}
    word = 0x88998899  # from the low bits: two codes of 9 and two of 8, the code of zero
    stored["up.qweight"] = torch.full((32, 128), word - 2**32, dtype=torch.int32)
    stored["up.g_idx"] = torch.arange(256, dtype=torch.int32) // 8
    source = tmp_path / "in"
    source.mkdir()
    model(source, stored, quantization_config=GPTQ)

    assert convert(source, tmp_path / "sparse", to="marlin_24").verdict == "ok"
    assert formats(tmp_path / "sparse") == {"marlin_24"}
    assert convert(tmp_path / "sparse", tmp_path / "out", to="gptq").verdict == "ok"
    assert same(source, tmp_path / "out")


def test_floats_are_rounded_only_where_that_is_asked_for(tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in")
    found = convert(source, tmp_path / "out", to="bfloat16")

    assert "is not a bfloat16; the nearest is" in refused(found).pop()
    assert convert(source, tmp_path / "out", to="bfloat16", rounding=True).counts["rounded"] == 7
    with open_checkpoint(tmp_path / "out") as weights:
        assert torch.equal(weights.get_weights(UP).dequantize(), meant(source)[UP].bfloat16().float())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_what_float16_has_no_number_for_is_refused_all_the_same(tmp_path: Path) -> None:
    stored = gptq("up") | {"up.scales": torch.full((2, 8), 65504.0).half()}
    stored["up.qweight"] = torch.full((2, 8), 0x0A0A0A0A, dtype=torch.int32)
    (tmp_path / "in").mkdir()
    source = model(tmp_path / "in", stored, quantization_config=GPTQ)

    assert (
        "is not a float16; the nearest is"
        in refused(convert(source, tmp_path / "out", to="float16", rounding=True)).pop()
    )


@pytest.mark.parametrize(
    ("to", "rounding", "scale", "reason"),
    [
        ("bfloat16", False, 1 + 2**-8, "-8.03125 at (20, 8) is not a bfloat16; the nearest is -8"),
        ("float16", True, 65504.0, "-524032 at (20, 8) is not a float16; the nearest is -inf"),
    ],
    ids=["not rounded", "rounded"],
)
def test_the_first_lost_value_of_a_later_block_is_named(
    to: str, rounding: bool, scale: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MAX_ELEMENTS", 8 * 16)
    stored = {name: tensor.repeat(1, 4) for name, tensor in gptq("up").items() if name != "up.g_idx"}
    stored["up.scales"][1, 20] = scale
    (tmp_path / "in").mkdir()
    source = model(tmp_path / "in", stored, quantization_config=GPTQ)

    assert refused(convert(source, tmp_path / "out", to=to, rounding=rounding)) == {reason}


def test_a_scale_that_is_not_finite_is_refused_or_written_and_noted(tmp_path: Path) -> None:
    stored = gptq("up")
    stored["up.scales"][1, 3] = float("inf")
    (tmp_path / "in").mkdir()
    source = model(tmp_path / "in", stored, quantization_config=GPTQ)

    assert convert(source, tmp_path / "out", to="gptq_v2").counts == {"refused": 1}
    found = convert(source, tmp_path / "out", to="gptq_v2", nonfinite="allow")

    assert found.counts == {"bits": 1}
    assert found.notes == ["up.scales: written as stored: inf at (1, 3); 1 of 16 are not finite"]


def test_a_config_speaks_for_each_kind_of_layer(tmp_path: Path) -> None:
    """Layers with other group sizes: representable in configs of gptq and compressed-tensors, not of awq."""
    wide = {
        "c.scales": torch.ones(1, 8).half(),
        "c.qzeros": torch.full((1, 1), 0x77777777, dtype=torch.int32),
    }
    wide |= {"c.g_idx": torch.zeros(16, dtype=torch.int32)}
    eight = {
        "d.qweight": torch.zeros(4, 8, dtype=torch.int32),
        "d.qzeros": torch.full((2, 2), 0x7F7F7F7F, dtype=torch.int32),
        "d.scales": torch.ones(2, 8).half(),
        "d.g_idx": torch.arange(16, dtype=torch.int32) // 8,
    }
    rules = {r"+:^c$": {"group_size": 16}, r"+:^d$": {"bits": 8}, r"-:^e$": {}}
    stored = {**gptq("a"), **gptq("b"), **gptq("c"), **wide, **eight, "e.weight": torch.ones(8, 16)}
    (tmp_path / "in").mkdir()
    source = model(tmp_path / "in", stored, quantization_config={**GPTQ, "dynamic": rules})

    for to in ("gptq_v2", "compressed-tensors"):
        assert convert(source, tmp_path / to, to=to).verdict == "ok"
        assert same(source, tmp_path / to)
        assert verify(tmp_path / to).verdict == "ok"
    said = json.loads((tmp_path / "gptq_v2" / "config.json").read_text())["quantization_config"]
    assert said["dynamic"] == {
        "-:^e$": {},
        "+:^c$": {"bits": 4, "group_size": 16},
        "+:^d$": {"bits": 8, "group_size": 8},
    }
    found = convert(source, tmp_path / "awq", to="awq")
    assert {layer.name for layer in found.layers} == {"c", "d"}


def test_awq_leaves_out_by_parts_of_names_and_is_refused_where_that_is_a_layer_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    stored = {**gptq("mlp.gate_proj"), "mlp.gate.weight": torch.ones(8, 16)}
    source = model(tmp_path / "in", stored, quantization_config=GPTQ)

    assert (
        "the plain layer mlp.gate is part of this one"
        in refused(convert(source, tmp_path / "out", to="awq")).pop()
    )
    assert convert(source, tmp_path / "out", to="gptq").verdict == "ok"
    assert verify(tmp_path / "out").verdict == "ok"


def test_layers_that_are_kept_stay_as_they_are(tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in")
    found = convert(source, tmp_path / "out", to="float32", keep=["*.q_proj", "*.k_proj"])
    was, now = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    kept = {name for name in was if ".q_proj." in name or ".k_proj." in name}

    assert found.verdict == "ok"
    assert all(torch.equal(was[name], now[name]) for name in kept)
    assert {each.prefix for each in layers(tmp_path / "out") if each.format == "gptq"} == {
        name.rpartition(".")[0] for name in kept
    }
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert rf"-:^{UP.replace('.', chr(92) + '.')}$" in said["dynamic"]


def test_kept_layers_of_a_format_that_the_config_cannot_say_too_are_refused(tmp_path: Path) -> None:
    found = convert(made("gptq", tmp_path / "in"), tmp_path / "out", to="awq", keep=["*.q_proj"])

    assert refused(found) == {"convert writes no quantization_config for awq, gptq"}


@pytest.mark.parametrize(
    ("asked", "argument"),
    [
        ({"to": "ggml"}, "to"),
        ({"to": "awq", "keep": ["nothing.*"]}, "keep"),
        ({"to": "awq", "shard_size": 0}, "shard"),
    ],
)
def test_what_cannot_be_asked_is_an_error(asked: dict[str, Any], argument: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=argument):
        convert(OTHERS["experts"], tmp_path / "out", **asked)


def test_nothing_is_quantized(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="only plain or kept layers"):
        convert(made("plain", tmp_path / "in"), tmp_path / "out", to="awq")


def test_files_are_split_and_each_tensor_begins_where_its_type_may(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    odd = {"a.bias": torch.ones(3).bfloat16(), "b.bias": torch.ones(1), "c": torch.ones(3, dtype=torch.uint8)}
    stored = {**odd, **gptq("up"), **gptq("down")}
    source = model(tmp_path / "in", stored, quantization_config=GPTQ)
    found = convert(source, tmp_path / "out", to="compressed-tensors", shard_size=200)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))

    assert found.verdict == "ok"
    assert {file.name for file in files} == {*index["weight_map"].values()}
    assert len(files) > 1
    total = 0
    for file in files:
        header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                size = (end - start) // max(1, torch.Size(entry["shape"]).numel())
                assert start % size == 0
                assert index["weight_map"][name] == file.name
                total += end - start
        with safe_open(file, "pt") as opened:  # read by the library of the format
            assert {*opened.keys()} == {*header} - {"__metadata__"}
    assert total == index["metadata"]["total_size"]


def test_what_stands_beside_the_tensors_is_copied_but_for_other_configs(tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in")
    (source / "quantize_config.json").write_text(json.dumps(GPTQ | {"group_size": 32}))
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    (source / ".hidden").write_text("")
    (source / "loop").symlink_to(source / "nowhere")
    convert(source, tmp_path / "out", to="awq")

    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "qload-certificate.json",
        "tokenizer.json",
    }
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert now.pop("quantization_config")["quant_method"] == "awq"
    assert now == {key: value for key, value in was.items() if key != "quantization_config"}


@pytest.mark.parametrize("to", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_layer_that_multiplies_its_inputs_becomes_no_plain_weight(
    scaled: bool, to: str, tmp_path: Path
) -> None:
    tensors = {
        "a.weight": torch.full((4, 16), 0x21, dtype=torch.uint8),
        "a.weight_scale": torch.ones(8, 1),
        **({"a.pre_quant_scale": torch.full((16,), 2.0).half()} if scaled else {}),
    }
    (tmp_path / "in").mkdir()
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 16}
    found = convert(model(tmp_path / "in", tensors, quantization_config=config), tmp_path / "out", to=to)

    reason = "its inputs are multiplied by factors, which a plain weight cannot hold"
    assert [(layer.outcome, layer.detail) for layer in found.layers] == [
        ("refused", reason) if scaled else ("bits", "")
    ]
    assert (tmp_path / "out").exists() != scaled


def test_files_up_to_a_size_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_checkpoint, "MAX_COPIED_FILE_BYTES", 10)
    for name, size in {"b.model": 10, "c.model": 11, "a.json": 0, "d.safetensors": 1}.items():
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "folder").mkdir()

    assert [path.name for path in new_checkpoint.copied_files(tmp_path)] == ["a.json", "b.model"]


def test_a_certificate_has_the_hash_of_each_file_and_the_outcome_of_each_layer(tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in")
    found = convert(source, tmp_path / "out", to="awq")
    said = json.loads((tmp_path / "out" / "qload-certificate.json").read_text())

    assert said["files"] == {
        path.name: sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "out").iterdir()
        if path.name != "qload-certificate.json"
    }
    read = sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert said["source"] == {"model.safetensors": read}
    assert said["counts"] == {"bits": len(found.layers)}
    assert {"name": UP, "source": "gptq", "format": "awq", "outcome": "bits", "detail": ""} in said["layers"]


def test_a_checkpoint_that_cannot_be_read_is_a_report(tmp_path: Path) -> None:
    found = convert(tmp_path / "nothing", tmp_path / "out", to="awq")

    assert (found.verdict, found.to_json()["verdict"]) == ("unreadable", "unreadable")
    assert found.unreadable


def test_a_layer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    stored = {**gptq("a"), **gptq("b")}
    del stored["b.scales"]
    source = model(tmp_path / "in", stored, quantization_config=GPTQ)
    found = convert(source, tmp_path / "out", to="awq")

    assert [(each.rule, each.tensor) for each in found.findings] == [("missing-tensor", "b.scales")]
    assert (found.verdict, found.layers) == ("findings", ())
    found = convert(source, tmp_path / "out", to="awq", accept=["missing-tensor"])
    assert [(layer.name, layer.outcome) for layer in found.layers] == [("b", "refused")]
    assert not (tmp_path / "out").exists()


def damaged(folder: Path) -> Path:
    """Return two GPTQ layers; each scales tensor lacks a row."""
    folder.mkdir()
    stored = {**gptq("q_proj"), **gptq("up_proj"), **gptq("down_proj")}
    stored |= {name: torch.ones(1, 8).half() for name in ("q_proj.scales", "up_proj.scales")}
    return model(folder, stored, quantization_config=GPTQ)


def test_errors_of_the_header_tier_refuse_what_verify_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = damaged(tmp_path / "in")
    monkeypatch.setattr(
        "qload.conversion.targets.ConversionRequest.convert_layers", None
    )  # no layer may be converted
    found = convert(source, tmp_path / "out", to="awq")

    assert found.findings == list(verify(source, tier="headers").findings)
    assert [each.rule for each in found.findings] == ["tensor-shape"] * 2
    assert (found.verdict, found.folder, found.layers, found.exit_code) == ("findings", "", (), 1)
    assert [each["rule"] for each in found.to_json()["findings"]] == ["tensor-shape"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_accepted_errors_are_notes_and_unreadable_layers_stay_refused(tmp_path: Path) -> None:
    found = convert(damaged(tmp_path / "in"), tmp_path / "out", to="awq", accept=["tensor-shape"])

    assert [layer.name for layer in found.layers if layer.outcome == "refused"] == ["q_proj", "up_proj"]
    (note,) = found.notes
    assert note.startswith("error of the rule tensor-shape, not refused: q_proj.scales: ")
    assert note.endswith("(1 more of this cause)")
    assert not (tmp_path / "out").exists()


def test_an_accepted_error_is_a_note_of_the_certificate(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    config = {"quantization_config": GPTQ, "num_hidden_layers": 2}
    source = model(tmp_path / "in", gptq("model.layers.0.q_proj"), **config)

    assert [each.rule for each in convert(source, tmp_path / "out", to="awq").findings] == ["layer-count"]
    found = convert(source, tmp_path / "out", to="awq", accept=["layer-count"])
    assert found.verdict == "ok"
    said = json.loads((tmp_path / "out" / "qload-certificate.json").read_text())
    assert said["notes"] == list(found.notes)
    assert found.notes[0].startswith("error of the rule layer-count, not refused: num_hidden_layers is 2")


def test_warnings_of_headers_refuse_nothing(tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in", num_hidden_layers=2)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))

    assert {each.severity for each in verify(source, tier="headers").findings} == {"warning"}
    assert convert(source, tmp_path / "out", to="awq").verdict == "ok"


def test_one_file_of_several_does_not_lack_what_the_others_hold(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    model(tmp_path / "in", gptq("model.layers.0.q_proj"), quantization_config=GPTQ, num_hidden_layers=2)
    file = tmp_path / "in" / "model-00001-of-00002.safetensors"
    (tmp_path / "in" / "model.safetensors").rename(file)

    assert convert(file, tmp_path / "out", to="awq").verdict == "ok"


def test_a_bug_of_a_rule_refuses_nothing_and_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise KeyError("slip")

    monkeypatch.setattr(run_rules, "RULES", (Rule(rule_texts()["missing-sibling"], bug),))  # type: ignore[arg-type]
    found = convert(made("gptq", tmp_path / "in"), tmp_path / "out", to="awq")

    assert found.verdict == "ok"
    assert "rule internal, not refused: missing-sibling: internal error, KeyError" in found.notes[0]


@pytest.mark.parametrize("accept", [["nothing"], ["layer-count", ""]])
def test_what_is_no_rule_is_an_argument_error(accept: list[str], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="accept"):
        convert(OTHERS["awq"], tmp_path / "out", to="gptq_v2", accept=accept)


def test_the_older_name_of_marlin_checkpoints_means_them(tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in")
    found = [convert(source, tmp_path / to, to=to) for to in ("marlin", "marlin_checkpoint")]
    written = [json.loads(Path(each.folder, "qload-certificate.json").read_text()) for each in found]

    assert [each.to for each in found] == ["marlin_checkpoint"] * 2
    assert written[0] == written[1]
    assert written[0]["to"] == "marlin_checkpoint"
    assert formats(tmp_path / "marlin") == {MarlinWeight.format}  # not GPTQMarlinWeight, the kernel's


def test_experts_of_one_tensor_that_are_plain_are_copied(
    tmp_path: Path,
) -> None:
    sizes = {"model_type": "gpt_oss", "num_local_experts": 2, "hidden_size": 16, "intermediate_size": 8}
    stack = torch.arange(2 * 16 * 16.0).reshape(2, 16, 16)
    stored = {"model.layers.0.mlp.experts.gate_up_proj": stack, **gptq("model.layers.0.self_attn.q_proj")}
    (tmp_path / "in").mkdir()
    source = model(tmp_path / "in", stored, quantization_config=GPTQ, **sizes)

    assert convert(source, tmp_path / "out", to="gptq_v2", accept=PART).verdict == "ok"
    now = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(now["model.layers.0.mlp.experts.gate_up_proj"], stack)


def test_no_expert_is_taken_out_of_a_tensor_of_all(tmp_path: Path) -> None:
    """The order of experts in memory is unknown for an unknown model type."""
    source = Path(shutil.copytree(FIXTURES / "models" / "mxfp4_gpt_oss", tmp_path / "in"))
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**said, "model_type": "unknown"}))
    found = convert(source, tmp_path / "out", to="float32")

    assert refused(found) == {"it holds all experts, in an order that is not known for this model type"}
    assert not (tmp_path / "out").exists()


def test_settings_in_tensors_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    settings = {"gptq_bits": torch.tensor(4), "gptq_groupsize": torch.tensor(8)}
    save_file({**gptq("a"), **settings}, tmp_path / "in" / "model.safetensors")
    found = convert(tmp_path / "in", tmp_path / "out", to="awq")

    assert found.verdict == "ok"
    assert found.notes == ["left out, as the config states their values: gptq_bits, gptq_groupsize"]
    assert not settings.keys() & load_file(tmp_path / "out" / "model.safetensors").keys()


def test_every_target_is_tried_here() -> None:
    others = {"quark"}  # in test_float4.py
    assert {*INTEGERS} - others == {
        "gptq", "gptq_v2", "awq", "marlin_checkpoint", "marlin_24", "compressed-tensors",
    }  # fmt: skip
