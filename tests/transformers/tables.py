"""The tables against transformers' own models: only `nox -s transformers` collects this file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from qload import architecture_of, verify
from qload.architecture import Architecture, Inventory
from qload.architecture.generated_tables import read_file
from qload.architecture.model_tables import TABLES
from tests.model_tables.build import build_sample
from tests.model_tables.draw import fields_of
from tests.model_tables.generate import class_of_type, forget_constants
from tests.model_tables.prove import differences
from tests.model_tables.tiny import tiny_changes, write_tiny
from tests.transformers.models import stored, tiny, written

GENERATED = read_file()["types"]
# Types with one kind of layers, several, experts, states in place of attention; `every_type.py` has all.
CHOSEN = ("bamba", "exaone_moe", "gpt2", "granitemoe", "lfm2_moe", "mamba2", "nemotron_h", "qwen3_next")
SEEDS = 3
STACKED = 3  # dimensions of experts that are one tensor


def known(folder: Path) -> Architecture:
    architecture = architecture_of(json.loads((folder / "config.json").read_text()))
    assert architecture is not None
    return architecture


def lawful(architecture: Architecture, name: str) -> list[tuple[int, ...]]:
    """What the table says that a tensor's shape may be; nothing for a name that it does not know."""
    shape = architecture.shape(name)
    if shape is not None:
        return [shape]
    matrix = architecture.expected(name.removesuffix(".weight"))
    if matrix is None:
        return []
    experts = architecture.sizes.get("experts")
    if name.endswith(".weight") or experts is None:
        return [matrix]
    return [(experts, *matrix), (experts, *reversed(matrix))]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_says_what_transformers_writes(kind: str, seed: int, tmp_path: Path) -> None:
    shapes = written(tiny(kind, seed), tmp_path)
    architecture = known(tmp_path)

    assert architecture.type == kind
    assert {
        name: lawful(architecture, name)
        for name, shape in shapes.items()
        if shape not in lawful(architecture, name)
    } == {}
    assert verify(tmp_path).findings == ()
    notes = verify(tmp_path).notes
    assert [note for note in notes if "hold something of all experts" not in note] == []


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", TABLES)
def test_no_tensor_can_be_lost_unseen(kind: str, seed: int, tmp_path: Path) -> None:
    shapes = written(tiny(kind, seed), tmp_path)
    architecture = known(tmp_path)
    held = {name: {name, name.removesuffix(".weight")} for name in shapes}

    def lacks(lost: str | None) -> bool:
        inventory = Inventory(architecture, {each for name in shapes if name != lost for each in held[name]})
        return any(inventory.missing()) or bool(inventory.lost_layers()[1])

    assert not lacks(None)
    assert [name for name in shapes if not lacks(name) and not name.endswith("_proj_bias")] == []


@pytest.mark.parametrize("kind", TABLES)
def test_what_a_config_leaves_out_is_as_transformers_has_it(kind: str) -> None:
    bare = architecture_of({"model_type": kind})
    full = architecture_of(AutoConfig.for_model(kind).to_dict())

    assert bare is not None
    assert full is not None
    assert bare.sizes == full.sizes
    assert bare.flags == full.flags
    assert bare.tied == full.tied


@pytest.mark.parametrize("kind", TABLES)
def test_a_model_of_all_defaults_has_these_shapes_in_memory(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    architecture = architecture_of({"model_type": kind})
    assert architecture is not None
    config.num_hidden_layers = min(config.num_hidden_layers, 4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = {
        name: (shape, lawful(architecture, name))
        for name, shape in shapes.items()
        if shape not in lawful(architecture, name) and not architecture.exempt(name)
    }
    assert differing == {}


TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


@pytest.mark.parametrize(
    ("kind", "text", "more"),
    [
        pytest.param(
            "gemma3", {"model_type": "gemma3_text", "head_dim": 8}, {"mm_tokens_per_image": 4}, id="gemma3"
        ),
        pytest.param("llava", {"model_type": "llama"}, {}, id="llava"),
        pytest.param("mistral3", {"model_type": "mistral", "head_dim": 8}, {}, id="mistral3"),
    ],
)
def test_the_text_model_inside_of_another_is_known(
    kind: str, text: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": 28,
        "patch_size": 14,
    }
    sizes = {**TEXT, "intermediate_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, text_config={**sizes, **text}, vision_config=vision, **more)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    architecture = known(tmp_path)
    names = stored(tmp_path)

    assert architecture.type == text["model_type"]
    assert sum(architecture.find(name.removesuffix(".weight")) is not None for name in names) >= 2 * 7
    report = verify(tmp_path)
    assert report.findings == ()
    # transformers writes that Mistral 3 is tied, and that its text model is not
    assert [note for note in report.notes if "tie_word_embeddings" not in note] == []


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_generated_table_explains_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    assert_explained(kind, 0, tmp_path)


def assert_explained(kind: str, seed: int, tmp_path: Path) -> None:
    """The generated table of a type has every tensor of a tiny model, and verify finds nothing."""
    model_class = class_of_type(kind, [GENERATED[kind]["class"]])
    try:
        write_tiny(model_class, seed, tmp_path)
    except (ValueError, ArithmeticError):  # no small one exists: compare without a file
        assert differences(GENERATED[kind], build_sample(model_class, tiny_changes(model_class, seed))) == {}
        return
    architecture, report = known(tmp_path), verify(tmp_path)

    assert architecture.type in (kind, model_class.config_class.model_type) or "text" in GENERATED[kind]
    assert {
        name
        for name in stored(tmp_path)
        if not (architecture.find(name) or architecture.find(name.removesuffix(".weight")))
    } == set()
    assert report.findings == ()
    assert report.coverage is not None
    assert report.coverage.explained == report.coverage.total


def test_a_size_that_a_model_tests_is_drawn_as_none() -> None:
    by_name = {field.name: field.values for field in fields_of(CONFIG_MAPPING["gemma4_text"])}

    assert 0 in by_name["hidden_size_per_layer_input"]
    assert 0 not in by_name["hidden_size"]


def test_sizes_that_no_draw_changed_are_unknown() -> None:
    rows = [["a.weight", "hidden 3"], ["b.weight", "16 hidden 14 14"], ["c.weight", "2 hidden", "", "rank"]]
    rows.append(["d.weight", "a/2+b/2 hidden/2"])
    entry = {"flags": {"rank": {"given": True}}, "rows": rows}

    forget_constants(entry)

    shapes = ["hidden 3", "unknown hidden unknown unknown", "unknown hidden", "unknown hidden/2"]
    assert [row[1] for row in rows] == shapes


def test_no_table_has_the_sizes_of_a_default_config() -> None:
    for entry in GENERATED.values():
        rows = [[*line] for line in entry["rows"]]
        forget_constants({**entry, "rows": rows})

        assert rows == entry["rows"]
