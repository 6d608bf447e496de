"""Manual changes of valid models without a finding, and similar damage with a finding."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.verify import Report, verify
from tests.example_counts import some
from tests.verify.damage.model import Model, bytes_of
from tests.verify.damage.sound import HIDDEN, MODELS, SHAPES, Quantize, modelled
from tests.verify.damage.sound_floats import MORE
from tests.verify.test_drawn_models import config_of, of_type

FORMATS = sorted(MORE)
ADDED = "model.layers.2"
OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
PAGE = 4096


def report_of(model: Model, folder: Path) -> Report:
    return verify(model.write(folder / "model"))


def rules_of(model: Model, folder: Path) -> set[str]:
    return {finding.rule for finding in report_of(model, folder).findings}


def repeated(form: str, zeros: tuple[str, ...] = ()) -> Model:
    """Return two layers and a copy of the second; the projections `zeros` of the copy are quantized zeros."""

    def make(quantize: Quantize, said: dict[str, Any] | None) -> Model:
        model = modelled(quantize, said)
        for name in [name for name in model.tensors if name.startswith("model.layers.1.")]:
            if not any(f".{zero}." in name for zero in zeros):
                model.tensors[name.replace(".1.", ".2.", 1)] = model.tensors[name].clone()
        for zero in zeros:
            made = quantize(torch.zeros(SHAPES[zero]))
            model.tensors |= {f"{ADDED}.{zero}.{field}": tensor for field, tensor in made.items()}
        model.config["num_hidden_layers"] = 3
        return model

    return MORE[form](make=make)


# Copies of other layers


@pytest.mark.parametrize("form", some(FORMATS, 4, 0))
def test_one_layer_that_repeats_another_is_a_note(form: str, tmp_path: Path) -> None:
    report = report_of(repeated(form), tmp_path)

    assert report.findings == ()
    assert [note for note in report.notes if note.startswith(f"{ADDED}: every tensor is equal")]


@pytest.mark.parametrize("form", some(FORMATS, 4, 1))
def test_a_layer_of_another_with_norms_of_its_own_is_a_copy(form: str, tmp_path: Path) -> None:
    model = repeated(form)
    model.tensors[f"{ADDED}.input_layernorm.weight"][3] = 2
    report = report_of(model, tmp_path)

    assert {finding.rule for finding in report.findings} == {"copied-layer"}
    assert len(report.findings) == len(SHAPES)
    assert not any("equal to that of" in note for note in report.notes)


def test_all_but_one_matrix_of_a_layer_are_copies(tmp_path: Path) -> None:
    model = repeated("plain")
    name = f"{ADDED}.mlp.up_proj.weight"
    model.tensors[name] = model.tensors[name].flip(0)
    report = report_of(model, tmp_path)

    assert {finding.rule for finding in report.findings} == {"copied-layer"}
    assert len(report.findings) == len(SHAPES) - 1


def test_several_layers_of_others_with_norms_of_their_own_are_made_so(tmp_path: Path) -> None:
    model = repeated("plain")
    for name in [name for name in model.tensors if name.startswith("model.layers.0.")]:
        model.tensors[name.replace(".0.", ".3.", 1)] = model.tensors[name].clone()
    for layer in (2, 3):
        model.tensors[f"model.layers.{layer}.input_layernorm.weight"][layer] = 2
    model.config["num_hidden_layers"] = 4

    assert report_of(model, tmp_path).findings == ()


def test_an_expert_over_another_of_one_layer_is_a_copy(tmp_path: Path) -> None:
    model = MORE["packed"](make=of_type(config_of("mixtral", 2), 0))
    lead = "model.layers.1.block_sparse_moe.experts"
    for name in [name for name in model.tensors if name.startswith(f"{lead}.0.")]:
        model.tensors[name.replace("experts.0.", "experts.1.")] = model.tensors[name].clone()
    report = report_of(model, tmp_path)

    assert {finding.rule for finding in report.findings} == {"copied-layer"}
    assert len(report.findings) == 3


# Additional layers with zero output


@pytest.mark.parametrize("form", some(FORMATS, 4, 2))
def test_a_layer_that_was_added_and_gives_out_zeros_is_sound(form: str, tmp_path: Path) -> None:
    report = report_of(repeated(form, OUTPUTS), tmp_path)

    assert report.findings == ()
    assert [note for note in report.notes if note.startswith(ADDED)]


@pytest.mark.parametrize("zero", [("self_attn.o_proj",), ("mlp.down_proj",), ("mlp.up_proj",)], ids="-".join)
@pytest.mark.parametrize("form", ["plain", "packed", "asymmetric", "fp8"])
def test_a_layer_with_one_projection_of_zeros_was_never_filled(
    form: str, zero: tuple[str, ...], tmp_path: Path
) -> None:
    assert "constant-values" in rules_of(repeated(form, zero), tmp_path)


def test_outputs_that_repeat_a_value_are_none_that_were_added(tmp_path: Path) -> None:
    model = repeated("packed", OUTPUTS)
    for output in OUTPUTS:
        bytes_of(model.tensors[f"{ADDED}.{output}.weight_packed"]).zero_()  # the lowest weight

    assert "constant-values" in rules_of(model, tmp_path)


# Rows and columns of zeros


def zero_rows(projection: str, rows: slice) -> Model:
    model = MODELS["plain"]()
    model.tensors[f"model.layers.1.{projection}.weight"][rows] = 0
    return model


def pruned_vocabulary() -> Model:
    """Return a model with zero rows of unused tokens and their outputs, in two places."""
    model = MODELS["plain"]()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        model.tensors[name][64:200] = 0
        model.tensors[name][230:260] = 0
    return model


def padded_within_fused() -> Model:
    """Return a model with gate and up as one matrix, each padded: zeros in the middle and at the end."""
    model = MODELS["plain"]()
    for layer in range(2):
        lead = f"model.layers.{layer}.mlp"
        gate, up = (model.tensors.pop(f"{lead}.{name}_proj.weight") for name in ("gate", "up"))
        pad = torch.zeros(100, HIDDEN).bfloat16()
        model.tensors[f"{lead}.gate_up_proj.weight"] = torch.cat([gate, pad, up, pad])
        down = model.tensors[f"{lead}.down_proj.weight"]
        model.tensors[f"{lead}.down_proj.weight"] = torch.cat([down, pad.T], 1)
    return model


def pruned_neurons() -> Model:
    """Return a model with 256 zero inputs in the middle of each row of down_proj."""
    model = MODELS["plain"]()
    for layer in range(2):
        model.tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, 64:320] = 0
    return model


def dead_outputs_of_fp8() -> Model:
    model = MODELS["fp8"]()
    for name in [name for name in model.tensors if name.endswith("mlp.up_proj.weight")]:
        model.tensors[name].view(torch.uint8)[150:300] = 0
    return model


def pruned_outputs_of_words() -> Model:
    """Return a model with zero outputs in the middle of words along K: each code is the zero point."""
    model = MODELS["packed"]()
    model.tensors["model.layers.1.mlp.up_proj.weight_packed"][100:200] = -0x77777778
    return model


def untrained_outputs() -> Model:
    """Return a model with equal rows of the head for untrained tokens, and repeated position embeddings."""
    model = MODELS["plain"]()
    head = model.tensors["lm_head.weight"]
    head[200:260] = head[7].clone()
    model.tensors["model.embed_positions.weight"] = head[:64].repeat(2, 1)
    return model


SOUND: tuple[Callable[[], Model], ...] = (
    pruned_vocabulary, padded_within_fused, pruned_neurons, dead_outputs_of_fp8, pruned_outputs_of_words,
    untrained_outputs, lambda: zero_rows("mlp.up_proj", slice(7, 250)),
    lambda: zero_rows("self_attn.q_proj", slice(0, 100)),
)  # fmt: skip


@pytest.mark.parametrize("make", SOUND, ids=[*(make.__name__ for make in SOUND[:-2]), "up rows", "q rows"])
def test_rows_and_columns_of_zeros_are_no_hole(make: Callable[[], Model], tmp_path: Path) -> None:
    assert report_of(make(), tmp_path).findings == ()


def data_of(file: Path) -> dict[str, tuple[int, int]]:
    """Return the begin and the end of each tensor in the file."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in header.items()
    }


@pytest.mark.parametrize("pages", [1, 2, 5])
@pytest.mark.parametrize("form", ["plain", "packed", "asymmetric", "fp8", "nf4"])
def test_pages_of_the_file_that_were_never_written_are_a_hole(form: str, pages: int, tmp_path: Path) -> None:
    file = MORE[form]().write(tmp_path / "model") / "model.safetensors"
    codes = "weight_packed" if form in ("packed", "asymmetric") else "weight"
    first, stop = data_of(file)[f"model.layers.1.mlp.up_proj.{codes}"]
    page = -(-first // PAGE) * PAGE
    data = bytearray(file.read_bytes())
    data[page : page + pages * PAGE] = bytes(pages * PAGE)
    file.write_bytes(data)

    assert page + pages * PAGE <= stop
    assert "hole" in {finding.rule for finding in verify(file.parent).findings}


def test_half_of_a_matrix_in_one_place_is_a_hole(tmp_path: Path) -> None:
    rows = SHAPES["mlp.up_proj"][0]

    assert rules_of(zero_rows("mlp.up_proj", slice(rows // 2, None)), tmp_path / "half") == {"hole"}
    assert rules_of(zero_rows("mlp.up_proj", slice(rows // 2 + 1, None)), tmp_path / "less") == set()


def test_a_hole_beside_pruned_neurons_is_one(tmp_path: Path) -> None:
    model = pruned_neurons()
    bytes_of(model.tensors["model.layers.0.mlp.down_proj.weight"])[1000 : 1000 + PAGE] = 0

    assert rules_of(model, tmp_path) == {"hole"}


@pytest.mark.parametrize("distance", [512, 768, 4096])
@pytest.mark.parametrize("first", [0, 1, 100, 255, 1000])
def test_a_block_stored_again_is_told_wherever_it_begins(first: int, distance: int, tmp_path: Path) -> None:
    model = MODELS["packed"]()
    data = bytes_of(model.tensors["model.layers.1.mlp.up_proj.weight_packed"])
    block = data[first : first + 512].clone()
    data[first + distance : first + distance + 512] = block

    assert rules_of(model, tmp_path) == {"repeated-block"}


# Buffers


def causal(size: int = 64) -> Tensor:
    return torch.full((size, size), -torch.inf).triu(1)


MASKS = {
    "model.mask": causal(), "model.attn_mask": causal().half(), "visual.attention_mask": causal()[None],
    "model.causal_mask": causal().bfloat16(), "transformer.masked_bias": torch.tensor(-torch.inf),
    "transformer.attn.bias": causal()[None, None],
}  # fmt: skip


def test_masks_may_hold_minus_infinity(tmp_path: Path) -> None:
    model = MODELS["plain"]()
    model.tensors |= MASKS
    report = report_of(model, tmp_path)

    assert report.findings == ()
    assert report.coverage is not None
    assert sum(report.coverage.exempt.values()) == sum(mask.nbytes for mask in MASKS.values())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", sorted(MASKS))
def test_masks_hold_nothing_else_that_is_not_finite(name: str, value: float, tmp_path: Path) -> None:
    model = MODELS["plain"]()
    model.tensors[name] = MASKS[name].clone()
    model.tensors[name].view(-1)[0] = value

    assert rules_of(model, tmp_path) == {"float-value"}


def test_minus_infinity_is_no_weight(tmp_path: Path) -> None:
    model = MODELS["plain"]()
    model.tensors["model.norm.weight"][7] = -torch.inf

    assert rules_of(model, tmp_path) == {"float-value"}


def test_rotations_are_exempt_and_other_complex_numbers_are_not(tmp_path: Path) -> None:
    model = MODELS["plain"]()
    model.tensors["freqs_cis"] = torch.polar(torch.ones(64, 32), torch.randn(64, 32))
    exempt = report_of(model, tmp_path)
    model.tensors["model.spectrum"] = model.tensors["freqs_cis"].clone()

    assert exempt.findings == ()
    assert exempt.coverage is not None
    assert exempt.coverage.explained == exempt.coverage.total
    assert rules_of(model, tmp_path) == {"unexplained-tensor"}


# Layers for multi-token prediction


def predicting(kind: str, layers: int, announced: int | None) -> Model:
    """Return a model with one layer more, and the projection for its two inputs."""
    config = config_of(kind, layers)
    model = MORE["plain"](make=of_type(config, 0))
    last, added = f"model.layers.{layers - 1}.", f"model.layers.{layers}"
    for name in [name for name in model.tensors if name.startswith(last)]:
        model.tensors[name.replace(last, f"{added}.")] = (model.tensors[name] * 0.9).roll(1, 0)
    size = config["hidden_size"]
    model.tensors[f"{added}.eh_proj.weight"] = torch.randn(size, 2 * size).bfloat16() * 0.05
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        model.tensors[f"{added}.{norm}.weight"] = torch.ones(size).bfloat16()
    if announced is not None:
        model.config["num_nextn_predict_layers"] = announced
    return model


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("announced", [None, 0])
@pytest.mark.parametrize("kind", ["deepseek_v2", "llama", "qwen3_moe"])
def test_layers_for_multi_token_prediction_need_no_announcement(
    kind: str, announced: int | None, layers: int, tmp_path: Path
) -> None:
    report = report_of(predicting(kind, layers, announced), tmp_path)

    assert report.findings == ()
    pattern = f"model.layers.{layers}: .*multi-token prediction"
    assert [note for note in report.notes if re.match(pattern, note)]


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "llama"])
def test_a_layer_beyond_the_count_that_joins_no_inputs_is_told(kind: str, tmp_path: Path) -> None:
    model = predicting(kind, 3, 0)
    for name in [name for name in model.tensors if re.search("eh_proj|enorm|hnorm|shared_head", name)]:
        del model.tensors[name]

    assert "layer-count" in rules_of(model, tmp_path)
