"""Heads that are tied and stored, neither of both, or said to be both: one sentence with the way out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import architecture_of
from qload.architecture.architecture import tie_of
from qload.verify import verify
from tests.verify.checkpoints import GPTQ, gptq, model, rules
from tests.verify.rules.test_architecture import CONFIG, whole

pytestmark = pytest.mark.usefixtures("seen_texts")

SIZES = {**CONFIG, "vocab_size": 8}
WITH_HEAD = whole(vocab_size=8)
WITHOUT = {name: tensor for name, tensor in WITH_HEAD.items() if "lm_head" not in name}
QUANTIZED = {**WITHOUT, **gptq("lm_head")}
EMBEDDING = "model.embed_tokens"


def tied_notes(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[str, list[str]]:
    """The verdict, and the notes about the tie."""
    report = verify(model(folder, tensors, **config))
    return report.verdict, [note for note in report.notes if "tie_word_embeddings" in note]


@pytest.mark.parametrize(
    ("said", "why", "key"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true", "tie_word_embeddings"),
        (
            {"model_type": "gemma", "head_dim": 4},
            "tie_word_embeddings is not in config.json, and true by default for gemma",
            "tie_word_embeddings",
        ),
    ],
    ids=["said", "by default"],
)
def test_a_quantized_head_beside_the_embedding_it_is_tied_to_is_told(
    said: dict[str, Any], why: str, key: str, tmp_path: Path
) -> None:
    config = {**SIZES, **said, "quantization_config": GPTQ}

    assert tied_notes(tmp_path, QUANTIZED, config) == (
        "ok",
        [
            f"lm_head: stored as gptq (8, 16), and {EMBEDDING} as unquantized (8, 16), while {why}: "
            f"programs that tie the two ignore the stored head; set {key} to false in config.json, "
            "or remove the head"
        ],
    )


def test_a_quantized_embedding_beside_a_plain_head_is_told(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in WITH_HEAD.items() if EMBEDDING not in name} | gptq(EMBEDDING)
    config = {**SIZES, "tie_word_embeddings": True, "quantization_config": GPTQ}

    verdict, (note,) = tied_notes(tmp_path, tensors, config)

    assert verdict == "ok"
    assert note.startswith(f"lm_head: stored as unquantized (8, 16), and {EMBEDDING} as gptq (8, 16), while ")


@pytest.mark.parametrize("said", [{"tie_word_embeddings": False}, {}], ids=["false", "absent"])
def test_a_quantized_head_that_is_not_tied_is_no_note(said: dict[str, Any], tmp_path: Path) -> None:
    assert tied_notes(tmp_path, QUANTIZED, {**SIZES, **said, "quantization_config": GPTQ}) == ("ok", [])


def test_a_head_and_an_embedding_of_the_same_words_are_no_note(tmp_path: Path) -> None:
    tensors = {name: each for name, each in QUANTIZED.items() if EMBEDDING not in name} | gptq(EMBEDDING)
    config = {**SIZES, "tie_word_embeddings": True, "quantization_config": GPTQ}

    assert tied_notes(tmp_path, tensors, config)[1] == []


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings is false"),
        ({}, "tie_word_embeddings is not in config.json, and false by default for llama"),
    ],
    ids=["false", "absent"],
)
def test_a_head_that_is_neither_stored_nor_tied_is_a_finding_with_both_ways_out(
    said: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (finding,) = verify(model(tmp_path, WITHOUT, **{**SIZES, **said})).findings

    assert (finding.rule, finding.tensor) == ("architecture-missing", "lm_head")
    assert finding.remedy == (
        "fetch or write the checkpoint again; or, if the embedding is the head, set tie_word_embeddings to "
        f"true in config.json: {why}"
    )


def inner(kind: str, top: bool | None, text: bool | None) -> dict[str, Any]:
    """A model that sees, around a Mistral; what says nothing is left out."""
    own = {**SIZES, "model_type": "mistral"} | ({} if text is None else {"tie_word_embeddings": text})
    outer: dict[str, Any] = {"model_type": kind, "text_config": own}
    return outer if top is None else {**outer, "tie_word_embeddings": top}


def within(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(("top", "text"), [(True, False), (False, True)])
def test_keys_that_contradict_are_told_where_no_head_is_stored(top: bool, text: bool, tmp_path: Path) -> None:
    keys = ("tie_word_embeddings", "text_config.tie_word_embeddings")
    true, false = keys if top else keys[::-1]

    assert tied_notes(tmp_path, within(WITHOUT), inner("llava", top, text)) == (
        "ok",
        [
            f"config.json: {true} is true, and {false} is not: programs differ in the key that they read; "
            "no head is stored: set both to true"
        ],
    )


@pytest.mark.parametrize(("top", "text"), [(True, False), (False, True)])
def test_keys_that_contradict_beside_another_head_are_one_finding(
    top: bool, text: bool, tmp_path: Path
) -> None:
    report = verify(model(tmp_path, within(WITH_HEAD), **inner("llava", top, text)))

    (finding,) = report.findings
    assert (finding.rule, finding.severity, report.notes) == ("tied-head", "warning", ())
    assert "tie_word_embeddings is true, and " in finding.message
    assert "tie_word_embeddings is not)" in finding.message
    assert finding.remedy.count("tie_word_embeddings") == 2


@pytest.mark.parametrize(
    ("top", "text", "found"),
    [
        (None, None, {"architecture-missing"}),
        (None, True, set()),
        (True, None, set()),
        (True, True, set()),
        (None, False, {"architecture-missing"}),
        (False, None, {"architecture-missing"}),
    ],
)
def test_a_tie_may_be_said_at_the_top_or_for_the_text_model(
    top: bool | None, text: bool | None, found: set[str], tmp_path: Path
) -> None:
    assert rules(verify(model(tmp_path, within(WITHOUT), **inner("llava", top, text)))) == found


def test_the_default_of_the_model_around_a_text_model_counts_for_what_is_missing(tmp_path: Path) -> None:
    """transformers ties Mistral 3 where its config says nothing, and Mistral alone it does not."""
    (tmp_path / "with").mkdir()
    config = inner("mistral3", None, None)

    assert tied_notes(tmp_path, within(WITHOUT), config) == ("ok", [])
    verdict, (note,) = tied_notes(tmp_path / "with", within(WITH_HEAD), config)
    assert verdict == "ok"
    assert note.startswith("lm_head: stored as unquantized (8, 16), and model.language_model.embed_tokens")
    assert "tie_word_embeddings is not in config.json, and true by default for mistral3" in note


UNKNOWN = {**SIZES, "model_type": "llama9", "architectures": ["Llama9ForCausalLM"]}


def test_a_model_of_no_table_that_says_it_is_not_tied_has_a_head(tmp_path: Path) -> None:
    assert tied_notes(tmp_path, WITHOUT, {**UNKNOWN, "tie_word_embeddings": False}) == (
        "ok",
        [
            "config.json: tie_word_embeddings is false, and no head is stored: programs start from a random "
            "one or fail; set it to true, if the embedding is the head"
        ],
    )


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (WITH_HEAD["lm_head.weight"], True),
        (WITH_HEAD[f"{EMBEDDING}.weight"], False),
        (torch.randn(6, 16), True),
    ],
    ids=["other values", "equal", "another shape"],
)
def test_a_model_of_no_table_that_says_it_is_tied_has_no_other_head(
    head: Tensor, told: bool, tmp_path: Path
) -> None:
    tensors = {**WITHOUT, "lm_head.weight": head.clone()}

    verdict, found = tied_notes(tmp_path, tensors, {**UNKNOWN, "tie_word_embeddings": True})

    assert (verdict, len(found)) == ("ok", int(told))


@pytest.mark.parametrize("config", [{**UNKNOWN}, {**UNKNOWN, "tie_word_embeddings": True}, {"vocab_size": 8}])
def test_nothing_is_told_of_a_tie_that_is_not_known(config: dict[str, Any], tmp_path: Path) -> None:
    assert tied_notes(tmp_path, WITHOUT, config) == ("ok", [])


def test_a_value_that_is_no_boolean_says_nothing() -> None:
    assert str(tie_of({"model_type": "llama", "tie_word_embeddings": "true"})).startswith(
        "tie_word_embeddings is not"
    )
    assert tie_of({"model_type": ["mistral3"], "text_config": {"model_type": "mistral"}}).tied is False
    known = architecture_of({"model_type": "mistral3", "text_config": {"model_type": "mistral"}})
    assert known is not None
    assert known.tied


def test_a_head_that_a_known_type_misses_is_a_finding_and_no_note(tmp_path: Path) -> None:
    config = {**SIZES, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}

    assert tied_notes(tmp_path, WITHOUT, config) == ("findings", [])


def test_plain_tensors_that_nobody_has_compared_are_not_told_apart(tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "unheard_of", "tie_word_embeddings": True}
    path = model(tmp_path, WITH_HEAD, **config)

    headers, values = (verify(path, tier=tier) for tier in ("headers", "values"))

    assert [note for note in headers.notes if note.startswith("lm_head")] == []
    assert [note for note in values.notes if note.startswith("lm_head")] != []


@pytest.mark.parametrize("name", ["lm_head", EMBEDDING])
def test_bytes_of_integers_say_nothing_of_a_tie(name: str, tmp_path: Path) -> None:
    tensors = {**WITH_HEAD, "lm_head.weight": WITH_HEAD[f"{EMBEDDING}.weight"].clone()}
    config = {**SIZES, "tie_word_embeddings": True}
    (tmp_path / "equal").mkdir()
    assert "tied-head" not in rules(verify(model(tmp_path / "equal", tensors, **config)))

    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.int8) + 1
    assert "tied-head" not in rules(verify(model(tmp_path, tensors, **config)))
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float()
    assert "tied-head" in rules(verify(model(tmp_path, tensors, **config)))


@pytest.mark.parametrize(("top", "inner"), [(True, False), (False, True)])
def test_two_keys_that_contradict_each_other_are_told_with_the_head(
    top: bool, inner: bool, tmp_path: Path
) -> None:
    """The rule `tied-head` reports a plain head; of an unknown type the note tells of the keys."""
    sizes = {key: value for key, value in SIZES.items() if key != "model_type"}
    config = {"tie_word_embeddings": top, "text_config": {**sizes, "tie_word_embeddings": inner}}
    stored = {}
    for case, tensors in (("with", WITH_HEAD), ("without", WITHOUT)):
        (tmp_path / case).mkdir()
        (stored[case],) = tied_notes(tmp_path / case, tensors, config)[1]

    keys = ["tie_word_embeddings", "text_config.tie_word_embeddings"]
    true, false = keys if top else keys[::-1]
    start = f"config.json: {true} is true, and {false} is not: programs differ in the key that they read; "
    assert stored == {
        "with": f"{start}lm_head is stored: set both to false, if the model uses it",
        "without": f"{start}no head is stored: set both to true",
    }


def test_a_tie_by_default_is_undone_by_its_usual_key(tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "gemma", "head_dim": 4}
    tensors = {**WITH_HEAD, "lm_head.weight": 2 + WITH_HEAD[f"{EMBEDDING}.weight"]}

    (finding,) = (
        one for one in verify(model(tmp_path, tensors, **config)).findings if one.rule == "tied-head"
    )

    assert finding.remedy == "set tie_word_embeddings to false in config.json, if the model uses the head"
