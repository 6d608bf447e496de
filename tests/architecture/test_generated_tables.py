"""The file of generated tables: every entry is a sound table, and counts for its own models only."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import qload.architecture
from qload import Heads, architecture_of
from qload.architecture import Architecture, Inventory
from qload.architecture.generated_tables import generated_table, read_file, table_of
from qload.architecture.model_tables import TABLES
from qload.architecture.table import parse_predicate, row_keys, rows_by_key, size_names

MAX_BYTES = 1_500_000
ALL = read_file()["types"]
TYPES = tuple(kind for kind in ALL if "text" not in ALL[kind])
OUTER = tuple(kind for kind in ALL if "text" in ALL[kind])  # tables around a text model with its own
HUGE = 10**18


@cache
def known(kind: str, layers: int = 3) -> Architecture:
    stored = read_file()["types"][kind]
    config: dict[str, Any] = {"model_type": kind, "architectures": [stored["class"]]}
    for key in (*stored["sizes"]["layers"][0], *stored["sizes"].get("experts", [[]])[0]):
        *sections, leaf = key.removesuffix("[]").split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = ["a"] * layers if key.endswith("[]") else layers
    architecture = architecture_of(config)
    assert architecture is not None
    assert architecture.type == kind
    return architecture


def test_the_file_is_small_and_names_its_version() -> None:
    file = Path(qload.architecture.__file__ or "").parent / "model_tables.json"

    assert read_file()["transformers"] == "5.23.0"
    assert file.stat().st_size < MAX_BYTES
    assert not TABLES.keys() & set(ALL)
    assert list(ALL) == sorted(ALL)


def test_every_name_in_an_entry_is_defined() -> None:
    for kind in ALL:
        table = generated_table(kind)
        assert table is not None
        keys = [key for row in table.rows for key in row_keys(row.name)]
        used = {name for row in table.rows for part in row.shape.split() for name in size_names(part)}
        terms = [term for text in table.predicates.values() for term in parse_predicate(text)]
        named = (term[key] or "0" for term in terms for key in ("first", "period", "size"))
        used |= {size for size in named if not size.isdecimal()}
        flags = {flag.removeprefix("!") for row in table.rows for flag in row.when.split()}
        names = {row.name for row in table.rows}

        assert len(keys) == len(set(keys)), kind
        assert used <= table.sizes.keys(), kind
        assert flags <= table.flags.keys(), kind
        assert {row.where.removeprefix("!") for row in table.rows} - {""} <= table.predicates.keys(), kind
        assert {table.head, table.embedding} <= names or table.text, kind


def test_what_an_entry_requires_lacks_nothing_and_each_of_it_is_needed() -> None:
    for kind in TYPES:
        architecture = known(kind)
        required = list(architecture.required())

        assert required, kind
        assert list(Inventory(architecture, required).missing()) == [], kind
        for lost in (required[0], required[len(required) // 2], required[-1]):
            rest = Inventory(architecture, [name for name in required if name != lost])
            assert any(rest.missing()) or rest.lost_layers()[1], (kind, lost)


def test_tables_around_a_text_model_have_names_of_their_own() -> None:
    assert len(OUTER) > 20
    for kind in OUTER:
        table = generated_table(kind)
        assert table is not None
        for text in TABLES.values():
            assert not table.flags.keys() & text.flags.keys(), kind
            assert not rows_by_key(table).keys() & rows_by_key(text).keys(), kind


TEXT = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {"model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 80}
PROJECTOR = "multi_modal_projector.linear_1"
EYE = "vision_tower.encoder.layers.1.mlp.fc1"


def test_towers_and_projectors_join_the_table_of_the_text_model() -> None:
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": TEXT,
        "vision_config": VISION,
    }
    architecture = architecture_of(config)

    assert architecture is not None
    assert architecture.type == "llama"
    assert architecture.expected("language_model.model.layers.1.self_attn.o_proj") == (64, 64)
    assert architecture.expected(PROJECTOR) == (64, 48)
    assert architecture.said(PROJECTOR) == "text_config.hidden_size, vision_config.hidden_size"
    assert architecture.expected(EYE) == (80, 48)
    assert architecture.shape(f"{EYE}.bias") == (80,)
    assert not any(name.startswith(("vision", "multi")) for name in architecture.required())


@pytest.mark.parametrize(
    "change",
    [
        {"vision_config": {**VISION, "model_type": "pixtral"}},
        {"architectures": ["LlavaForSequenceClassification"]},
        {"model_type": "unknown"},
        {"text_config": TEXT, "llm_config": None, "model_type": 3},
    ],
    ids=str,
)
def test_towers_of_another_class_or_kind_are_unknown(change: dict[str, Any]) -> None:
    config = {"model_type": "llava", "text_config": TEXT, "vision_config": VISION, **change}
    architecture = architecture_of(config)

    assert architecture is not None
    assert architecture.find(EYE) is None
    assert architecture.find(PROJECTOR) is None


def test_huge_numbers_are_never_counted_out() -> None:
    for kind in TYPES:
        architecture = known(kind)
        sizes = dict.fromkeys(architecture.sizes, HUGE)
        huge = Architecture(
            kind, architecture.table, architecture.config, sizes, tied=False, headed=True, notes=()
        )

        inventory = Inventory(huge, architecture.required())

        assert inventory.lost_layers()[1] > HUGE // 2, kind
        assert len(list(inventory.missing())) < 200, kind


ENTRY = {
    "class": "NewForCausalLM",
    "base": "model",
    "head": "lm_head",
    "embedding": "model.embed_tokens",
    "tied": False,
    "sections": {"vision_config": "eye"},
    "sizes": {
        "layers": [["num_hidden_layers"], 2, None],
        "vocab": [["vocab_size"], 90, None],
        "hidden": [["hidden_size"], 64, None],
        "kv": [["num_key_value_heads"], 2, None],
        "experts": [["num_experts"], 4, None],
        "moe": [["moe_intermediate_size"], 24, None],
    },
    "flags": {"bias": {"key": "attention_bias"}},
    "rows": [
        ["lm_head.weight", "vocab hidden"],
        ["model.embed_tokens.weight", "vocab hidden"],
        ["model.layers.{layer}.attn.q_proj.weight", "hidden hidden"],
        ["model.layers.{layer}.attn.k_proj.weight", "kv*8 hidden"],
        ["model.layers.{layer}.attn.v_proj.weight", "kv*8 hidden"],
        ["model.layers.{layer}.attn.q_proj.bias", "hidden", "", "bias"],
        ["model.layers.{layer}.attn.c_proj.weight", "hidden 3*hidden", "", "", "optional tensor"],
        ["model.layers.{layer}.mlp.input.weight", "2*moe hidden", "", "", "optional stack"],
        ["model.layers.{layer}.mlp.experts.{expert}.w1.weight", "moe hidden"],
        ["model.layers.{layer}.mlp.experts.{expert}.w2.weight", "hidden moe"],
        ["model.scale", "", "", "", "optional"],
    ],
}
EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.attn.k_proj", (16, 64)),
        ("model.layers.0.attn.qkv_proj", (96, 64)),
        ("model.layers.0.attn.q_proj.bias", (64,)),
        ("model.layers.0.attn.c_proj", None),
        ("model.layers.0.attn.c_proj.weight", (64, 192)),
        ("model.layers.0.mlp.input", (48, 64)),
        (f"{EXPERTS}.3.w1", (24, 64)),
        (f"{EXPERTS}.gate_up_proj", (48, 64)),
        (f"{EXPERTS}.gate_proj", (24, 64)),
        (f"{EXPERTS}.down_proj", (64, 24)),
        ("model.scale", ()),
    ],
)
def test_an_entry_has_the_spellings_of_engines(name: str, shape: tuple[int, ...] | None) -> None:
    table = table_of(ENTRY)
    sizes = {"unknown": None, "predict": 0} | {
        size: default
        for size, (_, default, _) in ENTRY["sizes"].items()  # type: ignore[attr-defined]
    }
    architecture = Architecture("new", table, {}, sizes, tied=False, headed=True, notes=())
    place = architecture.find(name)

    assert (architecture.shape(name) if place and place.row.tensor else architecture.expected(name)) == shape


def test_engines_may_store_projections_fused_and_experts_stacked() -> None:
    sizes = dict.fromkeys(table_of(ENTRY).sizes, 2)
    architecture = Architecture("new", table_of(ENTRY), {}, sizes, tied=False, headed=True, notes=())
    layers = [
        f"model.layers.{layer}.{name}"
        for layer in (0, 1)
        for name in ("attn.qkv_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    ]
    names = ["lm_head", "model.embed_tokens", *layers]

    assert list(Inventory(architecture, names).missing()) == []
    assert [lost.name for lost in Inventory(architecture, names[:-1]).missing()] != []


def test_heads_that_divide_are_no_heads_of_the_outputs() -> None:
    rows = [["model.layers.{layer}.k_proj.weight", "hidden/heads*kv hidden"]]
    sizes = {"layers": 1, "hidden": 64, "heads": 4, "kv": 2}
    table = table_of({**ENTRY, "rows": rows})
    architecture = Architecture("new", table, {}, sizes, tied=False, headed=True, notes=())

    assert architecture.heads("model.layers.0.k_proj") == Heads(keys=2)


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({}, True),
        ({"architectures": ["NewForCausalLM"]}, True),
        ({"architectures": ["Other", "NewForCausalLM"]}, True),
        ({"architectures": ["NewForTokenClassification"]}, False),
        ({"architectures": [3]}, False),
        ({"architectures": "NewForCausalLM"}, True),
        ({"vision_config": {"model_type": "eye"}}, True),
        ({"vision_config": {}}, True),
        ({"vision_config": {"model_type": "ear"}}, False),
    ],
    ids=str,
)
def test_an_entry_counts_for_its_own_class_and_sections(
    config: dict[str, Any], counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qload.architecture.architecture.generated_table", {"new": table_of(ENTRY)}.get)

    assert (architecture_of({"model_type": "new", **config}) is not None) == counts
    assert architecture_of({"model_type": "outer", "text_config": {"model_type": "new", **config}}) is None


def test_a_hand_written_table_of_the_text_model_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qload.architecture.architecture.generated_table", {"new": table_of(ENTRY)}.get)
    text = architecture_of({"model_type": "new", "text_config": {"model_type": "llama"}})

    assert text is not None
    assert text.type == "llama"


@pytest.mark.parametrize("ties", [True, False])
def test_a_class_without_ties_has_none(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of({**ENTRY, "ties": ties})
    monkeypatch.setattr("qload.architecture.architecture.generated_table", {"new": table}.get)
    architecture = architecture_of({"model_type": "new", "tie_word_embeddings": True})

    assert architecture is not None
    assert architecture.tied == ties


def test_layers_of_kinds_in_another_spelling_may_lack_what_they_have_by_the_table() -> None:
    spelled = {"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"]}
    named = "model.layers.0.mamba.A_log"

    answers = []
    for kinds in (["linear_attention", "full_attention"], ["full_attention"] * 2, ["mamba", "attention"]):
        architecture = architecture_of({**spelled, "num_hidden_layers": 2, "layer_types": kinds})
        assert architecture is not None
        answers.append(architecture.is_promised(architecture.find(named)))

    assert answers == [True, False, None]
