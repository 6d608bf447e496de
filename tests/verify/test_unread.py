"""Tensors without a format: counted and reported, without a check of their values or shapes by any rule.

They count as present for rules on missing tensors. A known format without a reader is not damage.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload.checkpoint import LayerIndex, account, open_checkpoint
from qload.cli.main import is_json_requested
from qload.cli.sarif import sarif_log
from qload.errors import UnsupportedFormatError
from qload.loader import FormatLoader
from qload.testing import make_checkpoint
from qload.verify import Report, inspect, verify
from tests.support.unread import EXPERTS, KINDS, LAYER, UnreadCheckpoint
from tests.verify.checkpoints import GPTQ, gptq, model, plain, rules

pytestmark = pytest.mark.usefixtures("seen_texts")

KIND = pytest.mark.parametrize("kind", KINDS)
MLX = {
    f"a.{at}.{name}": tensor
    for at in range(2)
    for name, tensor in (
        ("weight", torch.zeros(8, 4).to(torch.uint32)),
        ("scales", torch.ones(8, 1)),
        ("biases", torch.ones(8, 1)),
    )
}


def rewritten(given: UnreadCheckpoint, change: Callable[[str, Tensor], Tensor]) -> None:
    """Change the unread tensors."""
    file = given.folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, **{name: change(name, tensors[name]) for name in given.unread}}, file)


def filled(byte: int) -> Callable[[str, Tensor], Tensor]:
    def fill(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("weight_format"):  # it marks the layer as unreadable
            return tensor
        flat = tensor.clone().reshape(-1).view(torch.uint8)
        flat.fill_(byte)
        return flat.view(tensor.dtype).reshape(tensor.shape)

    return fill


def repeating(name: str, tensor: Tensor) -> Tensor:
    """Store the first half twice, with a range of zeros in it."""
    flat = tensor.clone().reshape(-1).view(torch.uint8)
    half = len(flat) // 2
    if half > 1024:
        flat[half : 2 * half] = flat[:half].clone()
        flat[512:1024] = 0
    return flat.view(tensor.dtype).reshape(tensor.shape)


CHANGES: dict[str, Callable[[str, Tensor], Tensor]] = {
    "as written": lambda _, tensor: tensor,
    "zeros": filled(0),
    "NaN": filled(0x7F),
    "infinite": filled(0xFF),
    "the same byte": filled(0x3C),
    "repeated, with a hole": repeating,
}


@KIND
@pytest.mark.parametrize("change", CHANGES)
def test_no_rule_judges_what_is_not_read(kind: str, change: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path / "checkpoint")
    rewritten(given, CHANGES[change])

    for report in (inspect(given.folder), verify(given.folder), verify(given.folder, against=given.folder)):
        assert report.findings == ()
        assert report.verdict == "incomplete"
        assert report.coverage is not None
        assert report.coverage.unread == given.nbytes


@KIND
def test_one_note_tells_number_first_tensor_reason_and_bytes(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path / "checkpoint")
    for report in (inspect(given.folder), verify(given.folder)):
        assert report.coverage is not None
        (note,) = (note for note in report.notes if "not read" in note)
        assert note.startswith(f"{len(given.unread)} tensors, such as {min(given.unread)}, are not read: ")
        assert given.reason in note
        assert note.endswith(f"they hold {given.nbytes} of {report.coverage.total} bytes")


def test_layers_of_one_dialect_have_one_note(tmp_path: Path) -> None:
    """The reason names each layer."""
    tensors = {}
    for at in range(3):
        lead = f"model.layers.{at}.v_proj"
        tensors[f"{lead}.weight"] = torch.ones(16, 128, dtype=torch.int8)
        tensors[f"{lead}.SCB"] = torch.ones(16)
        tensors[f"{lead}.weight_format"] = torch.tensor(1, dtype=torch.uint8)
    folder = model(
        tmp_path, tensors, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}
    )

    report = verify(folder)

    assert report.verdict == "incomplete"
    assert len([note for note in report.notes if "9 tensors" in note and "col32" in note]) == 1


@KIND
def test_the_ledger_names_the_tensors_with_their_reasons(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path / "checkpoint")
    with open_checkpoint(given.folder) as weights:
        found = account(LayerIndex(weights))

    assert found.report.unread.keys() == given.unread.keys()
    assert all(given.reason in reason for reason in found.report.unread.values())
    parts = found.coverage
    exempt = sum(parts.exempt.values())
    assert parts.read + exempt + parts.unread + parts.refused + parts.unexplained == parts.total
    assert (parts.refused, parts.unexplained) == (0, 0)


@KIND
def test_a_finding_elsewhere_comes_first(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path / "checkpoint")
    file = given.folder / "model.safetensors"
    save_file({**load_file(file), "model.norm.weight": torch.full((64,), torch.nan)}, file)

    report = verify(given.folder)

    assert (report.verdict, report.exit_code) == ("findings", 1)
    assert {finding.tensor for finding in report.findings if finding.rule == "float-value"} == {
        "model.norm.weight"
    }


def test_a_layer_that_its_siblings_have_otherwise_is_not_said_to_lack_what_they_have(tmp_path: Path) -> None:
    """One of three layers is in an unread dialect, with fewer tensors."""
    tensors = {}
    for at in range(3):
        lead = f"model.layers.{at}.v_proj"
        tensors[f"{lead}.weight"] = torch.randint(-127, 127, (16, 128)).to(torch.int8)
        tensors[f"{lead}.SCB"] = torch.ones(16)
        tensors[f"{lead}.weight_format"] = torch.tensor(int(at == 1), dtype=torch.uint8)
        if at != 1:
            tensors[f"{lead}.bias"] = torch.ones(16)
    folder = model(
        tmp_path, tensors, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}
    )

    report = verify(folder)

    assert (report.verdict, rules(report)) == ("incomplete", set())


def test_a_method_of_which_only_unread_stacks_are_left_is_not_said_to_be_missing(tmp_path: Path) -> None:
    stack = {
        "model.layers.0.mlp.experts.up_proj": torch.ones(2, 3, 8, 16).to(torch.float8_e4m3fn),
        "model.layers.0.mlp.experts.up_proj_scale_rate": torch.ones(2),
    }
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    folder = model(tmp_path, {**stack, **plain("lm_head.weight")}, quantization_config=config)

    assert (verify(folder).verdict, verify(folder).findings) == ("incomplete", ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_stacks_without_scales_are_parameters_as_any_other(dtype: torch.dtype, tmp_path: Path) -> None:
    stack = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    folder = model(tmp_path, {f"{EXPERTS}.up_proj": stack, "lm_head.weight": torch.rand(4, 8)})
    report = verify(folder)

    assert report.verdict == "ok"
    assert report.coverage is not None
    assert report.coverage.read == report.coverage.total

    stack[1, 2, 3] = torch.nan
    save_file({f"{EXPERTS}.up_proj": stack, "lm_head.weight": torch.rand(4, 8)}, folder / "model.safetensors")
    assert rules(verify(folder)) == {"float-value"}


@KIND
def test_a_reference_that_is_not_read_whole_makes_it_incomplete(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path / "checkpoint")
    layers = {"model.norm.weight": load_file(given.folder / "model.safetensors")["model.norm.weight"]}
    for prefix in (LAYER, f"{EXPERTS}.0.gate_proj"):
        layers[f"{prefix}.weight"] = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    mine = tmp_path / "mine"
    mine.mkdir()
    model(mine, layers)

    report = verify(mine, against=given.folder)

    hidden = {prefix for prefix in (LAYER, f"{EXPERTS}.0.gate_proj") if prefix in given.prefixes}
    missed = {finding.tensor for finding in report.findings if finding.rule == "against-missing"}
    assert missed.isdisjoint(hidden)
    assert report.reference_coverage is not None
    assert report.reference_coverage.unread == given.nbytes
    assert any(note.startswith("the reference: ") and given.reason in note for note in report.notes)
    assert report.to_json()["reference_coverage"]["unread"] == given.nbytes
    alone = Report(report.path, coverage=report.coverage, reference_coverage=report.reference_coverage)
    assert alone.verdict == "incomplete"


def test_a_checkpoint_of_a_foreign_dialect_is_unsupported_with_its_way_out(tmp_path: Path) -> None:
    folder = model(tmp_path, MLX)

    for report in (inspect(folder), verify(folder)):
        (finding,) = report.findings
        assert (report.verdict, report.exit_code, finding.rule) == ("unsupported", 4, "unsupported-format")
        assert "MLX" in finding.message
        assert "mlx-lm loads it" in finding.remedy
        assert report.coverage is None


def test_what_else_is_wrong_with_the_files_of_a_foreign_dialect_is_unreadable(tmp_path: Path) -> None:
    folder = model(tmp_path, MLX)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])

    assert verify(folder).verdict == "unreadable"


def test_a_second_config_of_a_method_that_is_not_read_is_a_finding_of_that_config(tmp_path: Path) -> None:
    folder = model(tmp_path, gptq("a"), quantization_config=GPTQ)
    (folder / "quantize_config.json").write_text(json.dumps({"quant_method": "of nobody"}))

    report = verify(folder)

    assert (report.verdict, rules(report)) == ("findings", {"config-side-file"})


@pytest.mark.parametrize("kind", ["stacks of a known type"])
def test_logits_are_not_compared_of_a_model_that_is_not_read_whole(kind: str, tmp_path: Path) -> None:
    from qload.verify import Prompt

    given = KINDS[kind](tmp_path / "checkpoint")

    report = verify(given.folder, logits=Prompt((1, 2, 3)))

    assert (report.verdict, report.logits) == ("incomplete", None)
    assert any("logits were not compared" in note for note in report.notes)


def test_logits_are_not_compared_either_where_what_is_read_is_damaged(tmp_path: Path) -> None:
    from qload.verify import Prompt

    given = KINDS["stacks of a known type"](tmp_path / "given")
    file = given.folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, file)

    report = verify(given.folder, logits=Prompt((1, 2, 3)))

    assert (report.verdict, report.logits) == ("findings", None)
    assert {finding.tensor for finding in report.findings} == {"model.norm.weight"}
    assert any("logits were not compared" in note for note in report.notes)


def test_causes_are_in_json_and_sarif(tmp_path: Path) -> None:
    tensors = {f"model.layers.{at}.up_proj.weight": torch.full((4, 4), torch.nan) for at in range(3)}
    report = verify(model(tmp_path, tensors))

    told: dict[str, Any] = report.to_json()
    assert told["schema"] == 2
    assert [finding["tensor"] for finding in told["findings"]] == sorted(tensors)
    (cause,) = {finding["cause"] for finding in told["findings"]}
    assert cause.startswith("float-value: ")
    results = sarif_log([report])["runs"][0]["results"]
    assert {result["properties"]["cause"] for result in results} == {cause}
    assert is_json_requested(["verify", "--json"])


def test_a_head_that_is_not_read_is_not_compared_with_its_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dialect of either layer may be unread; a loader rejects the head in this test."""
    make_checkpoint("plain", tmp_path / "made", config={"tie_word_embeddings": True})
    file = tmp_path / "made" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    assert rules(verify(file.parent)) == {"tied-head"}
    describe = FormatLoader.describe

    def describing(loader: FormatLoader, weights: Any, prefix: str) -> Any:
        if prefix == "lm_head":
            raise UnsupportedFormatError("a dialect", f"{prefix}.weight says so", remedy="its owner reads it")
        return describe(loader, weights, prefix)

    monkeypatch.setattr(FormatLoader, "describe", describing)

    report = verify(file.parent)

    assert (report.verdict, report.findings) == ("incomplete", ())
    assert any("a dialect: lm_head.weight says so; its owner reads it" in note for note in report.notes)
