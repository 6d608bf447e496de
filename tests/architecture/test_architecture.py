"""What a config tells of a model's tensors, and what it cannot make the tables do."""

import re
from functools import partial
from itertools import islice
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from qload import Heads, architecture_of
from qload.architecture import Architecture, Inventory
from qload.architecture.architecture import read_flag, read_sizes
from qload.architecture.generated_tables import read_file
from qload.architecture.model_tables import TABLES
from qload.architecture.table import (
    Flag,
    Row,
    Size,
    Table,
    evaluate_predicate,
    evaluate_size,
    find_row,
    parse_predicate,
    parse_terms,
    read_list,
    row_keys,
)

pytestmark = pytest.mark.usefixtures("seen_texts")

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 90,
}
HUGE = 10**18


def known(**config: Any) -> Architecture:
    architecture = architecture_of({**LLAMA, **config})
    assert architecture is not None
    return architecture


@pytest.mark.parametrize(
    ("text", "result"),
    [("heads*head+2*kv*head", 4 * 8 + 2 * 2 * 8), ("hidden/heads", 16), ("1", 1), ("hidden/none", None)],
)
def test_expressions_are_sums_of_products(text: str, result: int | None) -> None:
    assert evaluate_size(text, {"heads": 4, "head": 8, "kv": 2, "hidden": 64, "none": None}) == result


@pytest.mark.parametrize("text", ["", "a+", "a b", "A", "a**b", "a-b"])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a sum of products"):
        parse_terms(text)


KINDS = {"kinds": ["a", "b", "a"], "marks": [0, 1, 1], "listed": [2], "section": {"listed": [0]}}


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("kinds[i] == a", [0, 2]),
        ("not kinds[i] == a", [1]),
        ("marks[i] == 1", [1, 2]),
        ("i in listed", [2]),
        ("i in section.listed", [0]),
        ("i in absent", []),
        ("not i in absent", [0, 1, 2]),
        ("i in absent else i < two", [0, 1]),
        ("i in listed else i < two", [2]),
        ("not i < two", [2]),
        ("(i + 1) % two == 0", [1]),
        ("(i + 0) % two == 1", [1]),
        ("(i + 0) % two == one", [1]),
        ("(i + 0) % two == unknown", None),
        ("(i + 1) % none == 0", []),
        ("i < 1", [0]),
        ("two > 0", [0, 1, 2]),
        ("two > 1", [0, 1, 2]),
        ("one > 1", []),
        ("none > 0", []),
        ("marks[i] == 1 and not i in listed", [1]),
        ("i < unknown", None),
        ("kinds[i] == a and unknown > 0", None),
        ("i in two", None),
        ("two[i] == a", None),
        ("absent[i] == a", None),
    ],
)
def test_predicates_of_layers_are_read_from_the_config(text: str, layers: list[int] | None) -> None:
    lists = partial(read_list, {**KINDS, "two": 2})
    values = [
        evaluate_predicate(text, lists, {"one": 1, "two": 2, "none": 0, "unknown": None}, layer)
        for layer in range(3)
    ]

    assert values == ([None] * 3 if layers is None else [layer in layers for layer in range(3)])


@pytest.mark.parametrize("text", ["", "i", "i > two", "i < two or i < one", "i < two and ", "a[j] == b"])
def test_what_is_no_predicate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a predicate of layers"):
        parse_predicate(text)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        (Flag("yes"), True),
        (Flag("no", given=True), True),
        (Flag("null", default=True, given=True), False),
        (Flag("text", equals="a"), True),
        (Flag("text", equals="b"), False),
        (Flag("absent", default=True, equals="b"), True),
        (Flag("section.yes"), True),
        (Flag("text"), None),
    ],
)
def test_flags_are_booleans_texts_and_whether_a_value_is_given(flag: Flag, value: bool | None) -> None:
    config = {"yes": True, "no": 0, "null": None, "text": "a", "section": {"yes": True}}

    assert read_flag(flag, config, {}) is value


def test_sizes_are_read_from_sections_and_from_the_length_of_lists() -> None:
    sizes = {
        "depth": Size(("vision.depth",), 3),
        "kinds": Size(("count", "kinds[]"), 4),
        "wrong": Size(("count[]",), 5),
    }
    table = Table(sizes, ())

    assert read_sizes(table, {"vision": {"depth": 2}, "kinds": ["a", "b"]})[0] == {
        "depth": 2, "kinds": 2, "wrong": 5
    }  # fmt: skip
    assert read_sizes(table, {"vision": [], "count": 1})[0] == {"depth": 3, "kinds": 1, "wrong": 5}


@pytest.mark.parametrize(("size", "needed"), [(0, False), (None, False), (8, True)])
def test_tensors_with_a_size_that_the_config_sets_to_nothing_are_not_required(
    size: int | None, needed: bool
) -> None:
    gemma = architecture_of({**LLAMA, "model_type": "gemma4_text", "hidden_size_per_layer_input": size})
    lora = architecture_of({**LLAMA, "model_type": "glm4_moe_lite", "q_lora_rank": 8, "kv_lora_rank": size})
    assert gemma is not None
    assert lora is not None

    assert any("per_layer" in name for name in gemma.required()) is needed
    assert any("kv_a_layernorm" in name for name in lora.required()) is needed


@pytest.mark.parametrize(("head", "missing"), [("lm_head", False), ("other_head", True)])
def test_the_head_of_a_whole_model_is_that_of_its_text_model(head: str, missing: bool) -> None:
    config = {"model_type": "mllama", "text_config": {**LLAMA, "model_type": "mllama_text_model"}}
    architecture = architecture_of({**config, "tie_word_embeddings": False})
    assert architecture is not None

    lost = [each.name for each in Inventory(architecture, {head}).missing()]

    assert architecture.table.head == "language_model.lm_head"
    assert any(name.endswith("lm_head") for name in lost) is missing


def test_towers_are_never_required() -> None:
    rows = [line for entry in read_file()["types"].values() for line in entry["rows"] if "vision" in line[0]]

    assert len(rows) > 500
    assert {"optional" in line[4] for line in rows} == {True}


def test_numbers_of_other_lists_are_no_layers() -> None:
    row = Row("vision.blocks.{number}.proj", "8 8")
    match = find_row("vision.blocks.7.proj", dict.fromkeys(row_keys(row.name), row), "model")

    assert match is not None
    assert (match.row, match.layer, match.expert) == (row, None, None)


@pytest.mark.parametrize(
    ("prefix", "shape"),
    [
        ("model.layers.1.self_attn.q_proj", (64, 64)),
        ("model.layers.1.self_attn.v_proj", (32, 64)),
        ("model.layers.0.self_attn.qkv_proj", (128, 64)),
        ("model.layers.0.mlp.gate_up_proj", (192, 64)),
        ("model.layers.0.mlp.down_proj", (64, 96)),
        ("layers.0.mlp.down_proj", (64, 96)),
        ("language_model.model.layers.0.mlp.down_proj", (64, 96)),
        ("model.language_model.layers.0.mlp.down_proj", (64, 96)),
        ("language_model.lm_head", (90, 64)),
        ("model.embed_tokens", (90, 64)),
        ("model.norm.weight", None),
        ("vision_tower.encoder.layers.0.self_attn.q_proj", None),
        ("model.layers.00.mlp.down_proj", None),
        ("model.layers.x.mlp.down_proj", None),
        ("", None),
    ],
)
def test_the_matrix_under_a_prefix_is_known_in_every_spelling(
    prefix: str, shape: tuple[int, int] | None
) -> None:
    assert known().expected(prefix) == shape


def test_the_text_model_inside_of_another_config_counts() -> None:
    outer = architecture_of({"model_type": "llava", "text_config": LLAMA, "tie_word_embeddings": True})
    inner = architecture_of({"model_type": "gemma3", "text_config": {"hidden_size": 8}})

    assert outer is not None
    assert inner is not None
    assert (outer.type, outer.sizes["hidden"], outer.tied) == ("llama", 64, True)
    assert (inner.type, inner.sizes["hidden"], inner.sizes["head"]) == ("gemma3_text", 8, 256)


@pytest.mark.parametrize("config", [{}, {"model_type": "new"}, {"model_type": ["llama"]}, {"text_config": 3}])
def test_a_type_of_no_table_is_none(config: dict[str, Any]) -> None:
    assert architecture_of(config) is None


@pytest.mark.parametrize("wrong", ["64", 64.0, True, -1, 2**70, [64], {"a": 1}], ids=repr)
def test_what_is_no_size_is_not_known_and_said(wrong: Any) -> None:
    architecture = known(hidden_size=wrong)

    assert architecture.expected("model.layers.0.mlp.down_proj") is None
    assert architecture.expected("model.layers.0.self_attn.q_proj") is None
    assert len(architecture.notes) == 1
    assert architecture.notes[0].startswith("config.json: hidden_size is ")


def test_a_null_is_what_follows_from_other_sizes() -> None:
    sizes = known(model_type="mistral", num_key_value_heads=None, head_dim=None).sizes

    assert (sizes["kv"], sizes["head"]) == (4, 16)
    assert known(num_attention_heads=0).expected("model.layers.0.self_attn.q_proj") is None


@pytest.mark.parametrize("kind", TABLES)
def test_huge_numbers_are_never_counted_out(kind: str) -> None:
    sizes = {key: HUGE for size in TABLES[kind].sizes.values() for key in size.keys}
    architecture = architecture_of({"model_type": kind, **sizes, "q_lora_rank": HUGE})
    assert architecture is not None
    base = TABLES[kind].base
    inventory = Inventory(
        architecture, [f"{base}.layers.7.input_layernorm.weight", f"{base}.h.7.input_layernorm.weight"]
    )
    lost = list(inventory.missing())

    assert inventory.lost_layers() == ((0, 1, 2, 3, 4, 5, 6, 8), HUGE - 1)
    assert 0 < len(lost) < 60
    assert len(list(islice(architecture.required(), 1000))) == 1000


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_what_is_required_lacks_nothing_and_each_of_it_is_needed(layers: int) -> None:
    for kind in TABLES:
        small = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 3)
        architecture = architecture_of({"model_type": kind, "num_hidden_layers": layers, **small})
        assert architecture is not None
        required = list(architecture.required())

        assert len(required) == len(set(required))
        assert list(Inventory(architecture, required).missing()) == []
        for lost in required:
            held = Inventory(architecture, [name for name in required if name != lost])
            assert any(held.missing()), lost


def test_layers_with_experts_follow_the_config() -> None:
    qwen = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 9,
        "num_local_experts": 2,
        "decoder_sparse_step": 3,
    }
    architecture = known(**qwen, mlp_only_layers=[5])
    experts = {name.split(".")[2] for name in architecture.required() if ".experts." in name}

    assert experts == {"2", "8"}
    assert not any(".experts." in name for name in known(**qwen, mlp_only_layers="all").required())


@pytest.mark.parametrize(
    ("listed", "sparse"),
    [([0, 3], [0, 3]), ([], []), (None, [2, 5]), ("all", []), ([True], [])],
    ids=str,
)
def test_layers_of_llama_4_with_experts_are_listed_or_follow_a_step(
    listed: object, sparse: list[int]
) -> None:
    sizes = {"num_hidden_layers": 6, "num_local_experts": 2, "interleave_moe_layer_step": 3}

    names = known(model_type="llama4_text", **sizes, moe_layers=listed).required()

    assert sorted({int(name.split(".")[2]) for name in names if ".experts." in name}) == sparse


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, [2, 3]),
        ({"first_k_dense_replace": 0}, [0, 1, 2, 3]),
        ({"first_k_dense_replace": 4}, []),
        ({"first_k_dense_replace": "x"}, []),
        ({"n_routed_experts": 0}, []),
        ({"n_routed_experts": "x"}, []),
    ],
    ids=str,
)
def test_layers_of_deepseek_with_experts_follow_the_dense_ones(
    change: dict[str, Any], sparse: list[int]
) -> None:
    sizes = {"num_hidden_layers": 4, "n_routed_experts": 2, "first_k_dense_replace": 2}

    names = known(model_type="deepseek_v3", **{**sizes, **change}).required()

    layers = {int(name.split(".")[2]) for name in names if re.search(r"\.mlp\.(gate|experts)\.", name)}
    assert sorted(layers) == sparse


def test_experts_may_be_stacked_or_of_any_of_three_namings() -> None:
    for lead, names in (
        ("block_sparse_moe", ("w1", "w3", "w2")),
        ("block_sparse_moe", ("gate_proj", "up_proj", "down_proj")),
        ("mlp", ("gate_proj", "up_proj", "down_proj")),
    ):
        architecture = known(model_type="mixtral", num_local_experts=2)
        shapes = [architecture.expected(f"model.layers.0.{lead}.experts.1.{name}") for name in names]
        assert shapes == [(96, 64), (96, 64), (64, 96)]
    gpt = known(model_type="gpt_oss", num_local_experts=2)
    rest = [name for name in gpt.required() if ".experts." not in name]
    stacks = [
        f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")
    ]

    assert list(Inventory(gpt, [*rest, *stacks]).missing()) == []
    assert [lost.name for lost in Inventory(gpt, [*rest, *stacks[:-1]]).missing()]


def test_a_lost_expert_is_named_once() -> None:
    architecture = known(model_type="mixtral", num_local_experts=4)
    held = [name for name in architecture.required() if ".experts.2." not in name]
    lost = list(Inventory(architecture, held).missing())

    assert [(each.name, each.numbers, each.count) for each in lost] == [
        (f"model.layers.{layer}.block_sparse_moe.experts.2", (2,), 1) for layer in (0, 1)
    ]


def test_tied_models_need_one_of_the_two() -> None:
    tied = known(tie_word_embeddings=True)
    rest = [name for name in tied.required() if name != "model.embed_tokens"]

    assert "lm_head" not in list(tied.required())
    assert list(Inventory(tied, [*rest, "lm_head"]).missing()) == []
    assert [lost.name for lost in Inventory(tied, rest).missing()] == ["model.embed_tokens"]
    assert "lm_head" in list(known().required())
    assert "lm_head" not in list(known(architectures=["LlamaModel"]).required())


def test_layers_that_predict_further_words_are_exempt() -> None:
    deepseek = known(model_type="deepseek_v3", num_nextn_predict_layers=1)

    assert "num_nextn_predict_layers" in (deepseek.exempt("model.layers.2.eh_proj.weight") or "")
    assert "num_nextn_predict_layers" in (deepseek.exempt("model.layers.2.mlp.gate.weight") or "")
    assert deepseek.exempt("model.layers.1.mlp.gate.weight") is None
    assert deepseek.exempt("model.layers.3.mlp.gate.weight") is None
    assert "rotary" in (deepseek.exempt("model.layers.1.self_attn.rotary_emb.inv_freq") or "")
    assert deepseek.expected("model.layers.2.self_attn.o_proj") is None


def test_matrices_of_one_input_are_siblings() -> None:
    architecture, lead = known(), "language_model.model.layers.1."

    assert architecture.siblings(f"{lead}self_attn.k_proj") == tuple(
        f"{lead}self_attn.{name}_proj" for name in "qkv"
    )
    assert architecture.siblings(f"{lead}self_attn.o_proj") == ()
    assert architecture.siblings("elsewhere.q_proj") == ()
    assert known(model_type="deepseek_v2", q_lora_rank=8).siblings("model.layers.0.self_attn.q_a_proj") == (
        "model.layers.0.self_attn.q_a_proj",
        "model.layers.0.self_attn.kv_a_proj_with_mqa",
    )


def test_heads_are_those_of_the_outputs() -> None:
    architecture, lead = known(), "model.layers.0.self_attn."

    assert architecture.heads(f"{lead}q_proj") == Heads(queries=4)
    assert architecture.heads(f"{lead}v_proj") == Heads(keys=2)
    assert architecture.heads(f"{lead}qkv_proj") == Heads(4, 2)
    assert architecture.heads(f"{lead}o_proj") is None
    assert architecture.heads("lm_head") is None


def test_what_a_padded_vocabulary_may_have_and_nothing_else() -> None:
    padded = frozenset(
        {96, 128, 256, 512, 1024}
    )  # 90 to multiples of 8 or 16 or 32, of 64 or 128, of 256 ...

    assert known().paddings("lm_head") == known().paddings("model.embed_tokens") == padded
    assert known().paddings("model.layers.0.mlp.down_proj") == known().paddings("stranger") == frozenset()
    assert known(vocab_size=None).paddings("lm_head") == frozenset()


@pytest.mark.parametrize("kind", TABLES)
def test_what_a_table_says_where_the_config_says_nothing(kind: str, golden: SnapshotAssertion) -> None:
    """All of it was found in transformers' own model of the type by `nox -s transformers`."""
    architecture, table = architecture_of({"model_type": kind}), TABLES[kind]
    assert architecture is not None

    sizes = [
        f"{name} = {size}, under {', '.join(table.sizes[name].keys)}"
        for name, size in architecture.sizes.items()
    ]
    rows = [
        " ".join(
            [
                row.name,
                f"({row.shape})" if row.tensor else row.shape,
                *filter(None, [row.where, row.when and f"when {row.when}", "optional" * row.optional]),
                *[f"within {name}" for name in row.within],
            ]
        )
        for row in table.rows
    ]
    assert "\n".join([*sizes, *rows]) == golden
