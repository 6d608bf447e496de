"""Draft models beside their targets: sound pairs, and one damage for each check."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.verify import Finding, inspect, verify
from qload.verify.target import fits_vocabulary
from tests.verify.checkpoints import GPTQ, model, rules
from tests.verify.draft_models import (
    DRAFT,
    IDS,
    ONE,
    SMALL,
    VOCABULARY,
    Case,
    H,
    dflash,
    eagle,
    eagle3,
    gptq_of,
    layer,
    medusa,
    medusa_of_vllm,
    mlp_speculator,
    mtp,
    nextn,
)
from tests.verify.rules.test_architecture import CONFIG, LATENT, whole

pytestmark = pytest.mark.usefixtures("seen_texts")

LLAMA, TAPS = {"architectures": ["LlamaForCausalLM"]}, "eagle_aux_hidden_state_layer_ids"
MEDUSA = {"medusa_num_heads": 2, "hidden_size": H, "vocab_size": VOCABULARY}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": DRAFT,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "transformer_layer_config": ONE,
    "speculators_config": {"verifier": {"name_or_path": "org/target"}},
}
DFLASH = {**ONE, "dflash_config": {"target_layer_ids": [0, 2]}, "num_target_layers": 3}
MLP = {"model_type": "mlp_speculator", "emb_dim": H, "inner_dim": 8, "vocab_size": VOCABULARY}
EXPORTED = {**LATENT, "model_type": "deepseek_mtp"}


def quantized() -> dict[str, Tensor]:
    """Return an EAGLE-3 draft with a quantized `fc` and a quantized layer."""
    tensors = {**eagle3("midlayer."), **gptq_of("fc", H, 3 * H), **gptq_of("midlayer.mlp.up_proj", 24, H)}
    del tensors["fc.weight"], tensors["midlayer.mlp.up_proj.weight"]
    return tensors


SOUND: dict[str, Case] = {
    "EAGLE": (eagle(), {**ONE, **LLAMA}),
    "EAGLE without an embedding": (eagle(embedding=False), {**ONE, **LLAMA}),
    "EAGLE-3": (eagle3("midlayer."), SMALL),
    "EAGLE-3 of speculators": (eagle3("layers.0."), SPECULATORS),
    "EAGLE-3 in GPTQ": (quantized(), {**SMALL, "quantization_config": GPTQ}),
    "DFlash": (dflash(2), DFLASH),
    "MTP": (mtp(), {**CONFIG, **LLAMA}),
    "MTP, exported with its number": (nextn(3), EXPORTED),
    "MTP, exported as layer 0": (nextn(0), {**EXPORTED, "num_hidden_layers": 1}),
    "Medusa": (medusa(), MEDUSA),
    "Medusa of vLLM": (medusa_of_vllm(), {**MEDUSA, "model_type": "medusa"}),
    "MLP speculator": (mlp_speculator(), MLP),
    "draft": (layer("layers.0."), {**ONE, "speculators_model_type": "new"}),
}


def pair(folder: Path, draft: Case, **target: Any) -> tuple[Path, Path]:
    """Write a draft and its target, with changes of the target's config."""
    (folder / "draft").mkdir()
    (folder / "target").mkdir()
    tensors, config = draft
    path = model(folder / "target", whole(), **{**CONFIG, **target})
    return model(folder / "draft", tensors, **config), path


@pytest.mark.parametrize("kind", SOUND)
def test_a_draft_fits_its_target(kind: str, tmp_path: Path) -> None:
    draft, target = pair(tmp_path, SOUND[kind])

    report = verify(draft, target_model=target, tier="headers")

    assert report.findings == ()
    name = kind.split()[0].removesuffix(",") if kind != "MLP speculator" else kind
    (note,) = [note for note in report.notes if "for speculative decoding" in note]
    assert note.startswith("a draft for" if kind == "draft" else f"a draft of the kind {name} for")
    assert note in inspect(draft).notes


def test_layers_and_target_of_a_draft_are_named_and_not_opened(tmp_path: Path) -> None:
    draft, _ = pair(tmp_path, SOUND["EAGLE-3 of speculators"])

    (note,) = [note for note in inspect(draft).notes if "speculative" in note]

    assert "of the hidden states of layers 0, 1, 2" in note
    assert "of the target org/target by speculators_config.verifier.name_or_path, which is not opened" in note


def changed(case: Case, tensors: dict[str, Tensor] | None = None, **config: Any) -> Case:
    return {**case[0], **(tensors or {})}, {**case[1], **config}


def lost(case: Case, *names: str) -> Case:
    return {name: tensor for name, tensor in case[0].items() if not any(map(name.count, names))}, case[1]


E3, SPEC = SOUND["EAGLE-3"], SOUND["EAGLE-3 of speculators"]
TAPPED = {"transformer_layer_config": ONE, "eagle_config": {TAPS: [0, 1, 4]}}
# Draft, changes of the target's config, rule and text.
WRONG: dict[str, tuple[Case, dict[str, Any], str, str]] = {
    "fc of EAGLE": (
        SOUND["EAGLE"],
        {"hidden_size": 32},
        "target-shape",
        "fc.weight: 32 inputs, .* need 2 * 32",
    ),
    "fc of EAGLE-3": (E3, {"hidden_size": 8}, "target-shape", "fc.weight: 48 inputs, .* need 3 * 8"),
    "a quantized fc": (
        SOUND["EAGLE-3 in GPTQ"],
        {"hidden_size": 8},
        "target-shape",
        "fc.qweight: 48 inputs, .* need 3 * 8",
    ),
    "fc of DFlash": (SOUND["DFlash"], {"hidden_size": 32}, "target-shape", "fc.weight: 32 inputs, .* 2 * 32"),
    "fc of DFlash without a list": (
        changed(SOUND["DFlash"], dflash_config={}),
        {"hidden_size": 24},
        "target-shape",
        "a multiple of 24",
    ),
    "eh_proj": (
        SOUND["MTP, exported with its number"],
        {"hidden_size": 32},
        "target-shape",
        "eh_proj.weight: 32 inputs",
    ),
    "heads of Medusa": (
        SOUND["Medusa"],
        {"hidden_size": 32},
        "target-shape",
        "0.0.linear.weight: 16 inputs, .* need 32",
    ),
    "inputs of an MLP speculator": (
        SOUND["MLP speculator"],
        {"hidden_size": 32},
        "target-shape",
        "emb_dim is 16, .* hidden_size 32",
    ),
    "a draft that takes the embedding": (
        changed(lost(E3, "embed_tokens"), {"fc.weight": torch.randn(H, 96)}, target_hidden_size=32),
        {"hidden_size": 32},
        "target-shape",
        "hidden_size is 16; the draft has no embedding, and the target's has 32",
    ),
    "a draft for another size by its config alone": (
        lost(E3, "fc."),
        {"hidden_size": 32},
        "target-shape",
        "hidden_size is 16, the target has hidden_size 32",
    ),
    "tapped layers": (
        changed(SPEC, **{TAPS: [0, 1, 4]}),
        {},
        "target-layer",
        f"{TAPS} has 4, the target has 3 layers",
    ),
    "tapped layers of a section": (
        changed(lost(SPEC), **TAPPED, **{TAPS: None}),
        {},
        "target-layer",
        f"eagle_config.{TAPS} has 4",
    ),
    "a negative layer": (changed(SPEC, **{TAPS: [-1, 1, 2]}), {}, "target-layer", f"{TAPS} has -1"),
    "the output of the last layer": (
        changed(SPEC, **{TAPS: [0, 1, 3]}),
        {},
        "target-layer",
        "has 3, the output of the last of 3 layers",
    ),
    "layers of DFlash": (
        changed(SOUND["DFlash"], dflash_config={"target_layer_ids": [0, 3]}),
        {},
        "target-layer",
        "_ids has 3",
    ),
    "another number of layers": (
        SOUND["DFlash"],
        {"num_hidden_layers": 4},
        "target-layer",
        "num_target_layers is 3, the target has 4",
    ),
    "the number of an MTP layer": (
        SOUND["MTP, exported with its number"],
        {"num_hidden_layers": 5},
        "target-layer",
        "model.layers.3: an MTP layer; the target has 5 layers, and its MTP layers are number 5",
    ),
    "another vocabulary": (
        SOUND["EAGLE"],
        {"vocab_size": 21},
        "target-vocabulary",
        "is 20, the target has 21",
    ),
    "a padded vocabulary": (
        SOUND["EAGLE"],
        {"vocab_size": 24},
        "target-vocabulary",
        "is 20, the target has 24",
    ),
    "ids beyond the target's": (
        E3,
        {"vocab_size": 17},
        "target-vocabulary",
        "d2t: id 11 is the target's id 17, .* 17",
    ),
    "a short embedding": (
        changed(SOUND["EAGLE"], {"embed_tokens.weight": torch.randn(18, H)}),
        {},
        "target-vocabulary",
        "embed_tokens.weight: 18 rows, the target has 20 ids",
    ),
    "outputs of Medusa": (
        changed(SOUND["Medusa"], {"medusa_head.1.1.weight": torch.randn(18, H)}),
        {},
        "target-vocabulary",
        "medusa_head.1.1.weight: 18 rows, the target has 20 ids",
    ),
    "a head of EAGLE": (
        changed(SOUND["EAGLE"], {"lm_head.weight": torch.randn(18, H)}),
        {},
        "target-vocabulary",
        "lm_head.weight: 18",
    ),
    "an independent draft": (
        (whole(), {**CONFIG}),
        {"vocab_size": 50},
        "target-vocabulary",
        "vocab_size is 20, the target has 50",
    ),
}
WARNINGS = ("the output of the last layer", "a padded vocabulary")


def of_target(findings: Any) -> list[Finding]:
    return [finding for finding in findings if finding.rule.startswith("target-")]


@pytest.mark.parametrize("case", WRONG)
def test_a_draft_of_another_target_is_found(case: str, tmp_path: Path) -> None:
    draft_case, config, rule, text = WRONG[case]
    draft, target = pair(tmp_path, draft_case, **config)

    found = of_target(verify(draft, target_model=target, tier="headers").findings)

    assert rule in {finding.rule for finding in found}
    (finding,) = [
        finding
        for finding in found
        if all(part in finding.message for part in text.split(" .* ")) and finding.rule == rule
    ][:1]
    assert finding.severity == ("warning" if case in WARNINGS else "error")
    assert finding.remedy.startswith("take a draft that was trained for this target")


def test_a_target_that_is_a_draft_or_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    draft, target = pair(tmp_path, E3)

    (finding,) = verify(target, target_model=draft, tier="headers").findings
    assert "the target is a draft itself, of the kind EAGLE-3" in finding.message
    (finding,) = verify(draft, target_model=tmp_path / "none", tier="headers").findings
    assert finding.rule == "no-files"


def test_unknown_sizes_of_a_target_are_noted(tmp_path: Path) -> None:
    draft, target = pair(tmp_path, E3)
    (target / "config.json").write_text("{}")

    report = verify(draft, target_model=target, tier="headers")

    assert report.findings == ()
    assert any("has no num_hidden_layers" in note for note in report.notes)
    assert not any("has no hidden_size" in note for note in report.notes)  # by the embedding


def tokenizer(tokens: list[str], added: dict[str, int] | None = None) -> str:
    ids = {token: id for id, token in enumerate(tokens)}
    return json.dumps(
        {
            "model": {"vocab": ids},
            "added_tokens": [{"id": id, "content": token} for token, id in (added or {}).items()],
        }
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(tokenizer(["a", "b", "c"]), "", id="the same"),
        pytest.param(tokenizer(["a", "b"]), "", id="fewer tokens"),
        pytest.param(tokenizer(["a", "b", "d"], {"d": 2}), "", id="another added token"),
        pytest.param(
            tokenizer(["a", "c", "b"]), "id 1 is 'c', in the target's 'b'; 2 ids differ", id="others"
        ),
        pytest.param('{"model": {"vocab": [["a", 0.0], ["x", 0.0]]}}', "id 1 is 'x'", id="unigram"),
        pytest.param("[]", "", id="no object"),
    ],
)
def test_tokens_of_both_tokenizers_are_compared(text: str, found: str, tmp_path: Path) -> None:
    draft, target = pair(tmp_path, E3)
    (draft / "tokenizer.json").write_text(text)
    (target / "tokenizer.json").write_text(tokenizer(["a", "b", "c"]))

    report = verify(draft, target_model=target, tier="headers")

    assert [finding.rule for finding in report.findings] == (["target-vocabulary"] if found else [])
    assert found in "".join(finding.message for finding in report.findings)
    assert any("tokenizers are not compared" in note for note in report.notes) == (text == "[]")


def test_paddings_of_a_vocabulary() -> None:
    assert fits_vocabulary(20, 20)
    assert fits_vocabulary(1024, 20)
    assert not fits_vocabulary(23, 20)


def maps(**changes: Tensor) -> Case:
    """Return an EAGLE-3 draft with other maps."""
    return {**eagle3("midlayer."), **changes}, SMALL


def mask(ids: Tensor, length: int = VOCABULARY) -> Tensor:
    return torch.zeros(length, dtype=torch.bool).index_fill(0, ids, value=True)


OFFSETS, UNUSED = IDS - torch.arange(DRAFT), torch.zeros(VOCABULARY, dtype=torch.int64)
SWAPPED = IDS[[1, 0, *range(2, DRAFT)]] - torch.arange(DRAFT)
BELOW = OFFSETS.index_fill(0, torch.tensor([0]), -1)
WIDE = {**SMALL, "vocab_size": 40}
# Draft, and the findings about its own maps.
MAPS: dict[str, tuple[Case, list[str]]] = {
    "d2t alone": (lost(maps(), "t2d"), []),
    "d2t in int32": (maps(d2t=OFFSETS.int()), []),
    "t2d in bytes": (maps(t2d=mask(IDS).to(torch.uint8)), []),
    "maps that one vocabulary leaves unused": (
        ({**maps(d2t=UNUSED, t2d=UNUSED.bool())[0], "lm_head.weight": torch.randn(VOCABULARY, H)}, ONE),
        [],
    ),
    "d2t of floats": (maps(d2t=OFFSETS.float()), ["d2t: torch.float32 of shape (12,), not an integer"]),
    "a square d2t": (maps(d2t=OFFSETS.reshape(3, 4)), ["d2t: torch.int64 of shape (3, 4), not an integer"]),
    "a long d2t": (
        maps(d2t=torch.cat([OFFSETS, torch.tensor([6])]), t2d=mask(torch.cat([IDS, torch.tensor([18])]))),
        ["d2t: 13 ids, and config.json says that draft_vocab_size is 12"],
    ),
    "a short head": (
        ({**maps()[0], "lm_head.weight": torch.randn(DRAFT - 1, H)}, {**SMALL, "model_type": "new"}),
        ["d2t: 12 ids, and lm_head has 11 outputs"],
    ),
    "an id above the vocabulary": (
        maps(d2t=OFFSETS + 3),
        ["d2t: 9 at 11 is the target's id 20, outside of .* (vocab_size is 20); 1 in all"],
    ),
    "an id below 0": (
        maps(d2t=BELOW),
        ["d2t: -1 at 0 is the target's id -1, outside of the target's vocabulary"],
    ),
    "exchanged ids": (
        maps(d2t=SWAPPED),
        ["d2t: -1 at 1 is the target's id 0, not above the one before it; 1 in all"],
    ),
    "an id twice": (
        maps(d2t=OFFSETS - (torch.arange(DRAFT) == 1).long()),
        ["d2t: -1 at 1 is the target's id 0"],
    ),
    "ids in place of offsets": (
        maps(d2t=IDS),
        ["d2t: 12 at 8 is the target's id 20, .* store offsets in d2t"],
    ),
    "ids of a large vocabulary": (
        ({**maps(d2t=IDS, t2d=mask(IDS, 40))[0]}, WIDE),
        ["t2d: True number 1 is at 1, and d2t has the target's id 2 .* store offsets in d2t"],
    ),
    "a short t2d": (
        maps(t2d=mask(IDS)[:-1]),
        ["t2d: torch.bool of shape (19,), not a boolean .* (vocab_size is 20)"],
    ),
    "an id more in t2d": (
        maps(t2d=mask(torch.arange(13))),
        ["t2d: 13 ids of the target are True, and d2t has 12"],
    ),
    "t2d never filled": (maps(t2d=UNUSED.bool()), ["t2d: 0 ids of the target are True, and d2t has 12"]),
    "another id in t2d": (
        maps(t2d=mask(torch.where(IDS == 17, 18, IDS))),
        ["t2d: True number 11 is at 18, and d2t has the target's id 17"],
    ),
}


@pytest.mark.parametrize("case", MAPS)
def test_maps_of_a_vocabulary_agree(case: str, tmp_path: Path) -> None:
    (tensors, config), texts = MAPS[case]

    found = [
        each
        for each in verify(model(tmp_path, tensors, **config)).findings
        if each.rule == "draft-vocabulary"
    ]

    assert len(found) == len(texts)
    for finding, text in zip(found, texts, strict=True):
        assert all(part in f"{finding.message} {finding.remedy}" for part in text.split(" .* "))


# Draft, and the text of the finding about its own shapes; "" for none.
SHAPES: dict[str, tuple[Case, str]] = {
    "fc of two vectors": (
        changed(E3, {"fc.weight": torch.randn(H, 2 * H)}),
        "fc.weight: (N, K) is (16, 32); for 3 vectors config.json says (16, 48) (hidden_size, 3 * hidden",
    ),
    "fc for a list of layers": (
        changed(SPEC, **{TAPS: [0, 2]}),
        f"for 2 vectors of {TAPS} config.json says (16, 32)",
    ),
    "fc of another hidden size": (
        changed(E3, target_hidden_size=32),
        "(hidden_size, 3 * target_hidden_size)",
    ),
    "fc without hidden states": (
        changed(E3, {"fc.weight": torch.randn(H, H)}, eagle_config={"use_aux_hidden_state": False}),
        "",
    ),
    "a short eh_proj": (
        changed(SOUND["MTP, exported with its number"], {"model.layers.3.eh_proj.weight": torch.randn(H, H)}),
        "for 2 vectors config.json says (16, 32)",
    ),
    "a lost head": (
        lost(SOUND["Medusa"], "medusa_head.0."),
        "medusa_num_heads is 2, and 1 of these heads .*: 0",
    ),
    "a head too many": ((medusa(3), MEDUSA), "medusa_num_heads is 2, and further heads are stored: 2"),
    "a cut block": (
        changed(SOUND["Medusa"], {"medusa_head.1.0.linear.weight": torch.randn(8, H)}),
        "medusa_head.1.0.linear.weight: (N, K) is (8, 16), expected (16, 16) (hidden_size, hidden_size)",
    ),
    "cut outputs": (
        changed(SOUND["Medusa of vLLM"], {"lm_heads.1.weight": torch.randn(18, H)}),
        "lm_heads.1.weight: (N, K) is (18, 16), expected (20, 16) (vocab_size, hidden_size)",
    ),
    "heads without sizes in the config": (lost((medusa(), {"medusa_num_heads": 2})), ""),
}


@pytest.mark.parametrize("case", SHAPES)
def test_matrices_of_a_draft_have_the_shapes_of_its_config(case: str, tmp_path: Path) -> None:
    (tensors, config), text = SHAPES[case]

    report = inspect(model(tmp_path, tensors, **config))

    assert rules(report) == ({"draft-shape"} if text else set())
    assert all(part in "".join(each.message for each in report.findings) for part in text.split(" .*"))
