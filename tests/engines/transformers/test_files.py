"""Files of other names, experts whose class tells nothing, and scales that are not finite, in transformers.

Collected where transformers is installed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.lfm2_moe import modeling_lfm2_moe as lfm2

from qload import ExpertFacts, Fp8Quantizer, GatedActivation
from qload.engines.transformers import QloadConfig, TypedExperts, install, load, uninstall
from qload.engines.transformers.operands import ClassExperts
from qload.errors import ArgumentError, NonfiniteScaleError, QloadError, StorageError
from tests.engines.transformers.models import EAGER, RANGE, Stored, logits, of_kind, shared
from tests.models.recorded import off

FLOAT: dict[str, Any] = {"dtype": torch.float32, **EAGER}
INDEX = "safetensors.index.json"


def from_pretrained(path: Path) -> Any:
    config = AutoConfig.from_pretrained(path)
    config.quantization_config = QloadConfig(activations="unquantized").as_section()
    return AutoModelForCausalLM.from_pretrained(path, config=config, **FLOAT)


def installed(path: Path) -> Any:
    install(activations="unquantized")
    try:
        return AutoModelForCausalLM.from_pretrained(path, **FLOAT)
    finally:
        uninstall()


DOORS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: load(path, activations="unquantized", **FLOAT),
    "from_pretrained": from_pretrained,
    "install": installed,
}


def stored() -> Stored:
    return shared("llama", "gptq", tie_word_embeddings=True)


def renamed(folder: Path, *names: str, index: str | None = None, of: Path | None = None) -> Path:
    """The same checkpoint, or another one, in files of these names, and an index of this one."""
    source = of or stored().path
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = load_file(source / "model.safetensors")
    parts = [dict(list(tensors.items())[at :: len(names)]) for at in range(len(names))]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, {"format": "pt"})
    if index is not None:
        places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


TWO = ("output-00001-of-00002.safetensors", "output-00002-of-00002.safetensors")
NAMES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "usual": (("model.safetensors",), None),
    "autogptq": (("gptq_model-4bit-128g.safetensors",), None),
    "exl2": (("output.safetensors",), None),
    "numbered": (TWO, None),
    "usual numbers, no index": (tuple(name.replace("output", "model") for name in TWO), None),
    "index": (TWO, f"model.{INDEX}"),
    "index of another name": (TWO, f"output.{INDEX}"),
    "unlike names": (("a.safetensors", "b.safetensors"), None),
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("door", DOORS)
def test_files_are_those_that_open_checkpoint_finds(door: str, names: str, tmp_path: Path) -> None:
    path = renamed(tmp_path / "model", *NAMES[names][0], index=NAMES[names][1])

    model = DOORS[door](path)

    assert torch.equal(logits(model), logits(stored().load()))
    assert "transformers_weights" not in model.config.to_dict()
    assert "qload_files" not in model.config.to_dict()


@pytest.mark.parametrize("names", ["usual", "exl2", "numbered"])
def test_files_of_a_plain_checkpoint_are_found_where_it_is_quantized(names: str, tmp_path: Path) -> None:
    path = renamed(tmp_path / "model", *NAMES[names][0], of=stored().means)
    config = QloadConfig(Fp8Quantizer(), activations="unquantized")

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **FLOAT)

    want = AutoModelForCausalLM.from_pretrained(stored().means, quantization_config=config, **FLOAT)
    assert torch.equal(logits(model), logits(want))


def test_a_file_and_an_index_are_paths_too(tmp_path: Path) -> None:
    path = renamed(tmp_path / "model", *TWO, index=f"output.{INDEX}")
    one = renamed(tmp_path / "one", "output.safetensors")

    for place in (path / f"output.{INDEX}", one / "output.safetensors", str(one)):
        assert torch.equal(logits(DOORS["load"](place)), logits(stored().load()))  # type: ignore[arg-type]


def test_a_file_is_loaded_alone(tmp_path: Path) -> None:
    path = renamed(tmp_path / "model", "model.safetensors")
    other = {name: each * 0 for name, each in load_file(path / "model.safetensors").items()}
    save_file(other, path / "other.safetensors", {"format": "pt"})

    assert torch.equal(logits(DOORS["load"](path / "model.safetensors")), logits(stored().load()))


def test_a_subfolder_is_looked_into(tmp_path: Path) -> None:
    renamed(tmp_path / "model", "output.safetensors")

    model = load(tmp_path, subfolder="model", activations="unquantized", **FLOAT)

    assert torch.equal(logits(model), logits(stored().load()))


def test_what_a_user_chooses_is_what_is_loaded(tmp_path: Path) -> None:
    path = renamed(tmp_path / "model", "model.safetensors")
    zeros = {name: each * 0 for name, each in load_file(path / "model.safetensors").items()}
    (path / "model.safetensors").rename(path / "model.good.safetensors")
    save_file(zeros, path / "model.safetensors", {"format": "pt"})

    model = load(path, variant="good", activations="unquantized", **FLOAT)

    assert torch.equal(logits(model), logits(stored().load()))


@pytest.mark.parametrize("door", DOORS)
def test_a_gap_in_the_numbers_is_refused_by_the_name_of_the_file(door: str, tmp_path: Path) -> None:
    path = renamed(tmp_path / "model", *TWO)
    (path / TWO[1]).unlink()

    with pytest.raises(StorageError, match=TWO[1]):
        DOORS[door](path)


def test_a_folder_without_weights_is_refused_in_own_words(tmp_path: Path) -> None:
    path = renamed(tmp_path / "model", "output.safetensors")
    (path / "output.safetensors").unlink()

    with pytest.raises(QloadError, match="model"):
        DOORS["load"](path)


@pytest.mark.parametrize("door", ["from_pretrained", "install"])
def test_one_file_beside_an_index_of_others_is_refused_by_both_names(door: str, tmp_path: Path) -> None:
    path = renamed(tmp_path / "model", *TWO, index=f"model.{INDEX}")
    save_file(load_file(stored().path / "model.safetensors"), path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ArgumentError, match=rf"qload finds {TWO[0]}.*\n.*model\.safetensors of transformers"):
        DOORS[door](path)
    with pytest.raises(StorageError, match=rf"model\.safetensors: .*is also in {TWO[0]}"):
        DOORS["load"](path)  # as open_checkpoint refuses it


def test_a_name_of_the_hub_without_such_files_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any, **__: Any) -> Any:
        raise OSError("some/model does not appear to have a file named pytorch_model.bin")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", absent)
    config = stored().load().config

    with pytest.raises(StorageError, match="remedy   download all its files into a folder"):
        load("some/model", config=config, model_class=AutoModelForCausalLM)


# Scales


@pytest.mark.parametrize("door", DOORS)
def test_a_scale_that_is_not_finite_is_refused_by_its_name(door: str, tmp_path: Path) -> None:
    path = renamed(tmp_path / "model", "model.safetensors")
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.up_proj.scales"
    tensors[name][0, 2] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})

    with pytest.raises(NonfiniteScaleError, match=rf"^{name}: "):
        DOORS[door](path)
    for config in ({"nonfinite": "allow"}, {"quantization_config": QloadConfig(nonfinite="allow")}):
        assert bool(logits(load(path, **config, **FLOAT)).isnan().any())  # type: ignore[arg-type]


# Experts

SILU = ExpertFacts(GatedActivation("silu"))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention"],
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A model of a type that no table has, its experts in FP8 blocks, and what they mean."""
    folder = tmp_path_factory.mktemp("lfm2")
    torch.manual_seed(5)
    plain = lfm2.Lfm2MoeForCausalLM(lfm2.Lfm2MoeConfig(**SIZES)).float()
    plain.save_pretrained(folder / "plain")
    config = json.loads((folder / "plain" / "config.json").read_text())
    tensors, means, names = {}, {}, []
    with safe_open(folder / "plain" / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118, it is no dict
            tensor = file.get_tensor(name)
            tensors[name] = means[name] = tensor
            if ".experts." in name and tensor.ndim == 2:
                codes = (tensor * 8).to(torch.float8_e4m3fn)
                blocks = [-(-size // 32) for size in tensor.shape]
                tensors[name], means[name] = codes, codes.float() / 8
                tensors[f"{name}_scale_inv"] = torch.full(blocks, 0.125)
            elif tensor.ndim == 2:
                names.append(name.removesuffix(".weight"))
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    for kind, held, said in (
        ("stored", tensors, {**config, "quantization_config": {**section, "modules_to_not_convert": names}}),
        ("means", means, config),
    ):
        (folder / kind).mkdir()
        save_file(held, folder / kind / "model.safetensors", {"format": "pt"})
        (folder / kind / "config.json").write_text(json.dumps(said))
    return Stored(folder / "stored", folder / "means")


def own_gate(limit: float) -> Any:
    """A gate that a class has by itself."""

    def gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate.clamp(max=limit)) * up

    return gate


def logits_of(model: Any) -> torch.Tensor:
    return logits(model, torch.tensor([[3, 1, 4, 1, 5, 9]]))


def test_experts_of_a_type_without_a_table_run_by_what_their_class_tells(family: Stored) -> None:
    model = load(family.path, activations="unquantized", **FLOAT)

    assert torch.allclose(logits_of(model), logits_of(family.plain()), atol=RANGE, rtol=0)


@pytest.mark.parametrize("limit", [float("inf"), -1.3])
def test_experts_whose_class_has_a_gate_of_its_own_are_computed_by_it(
    limit: float, family: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logits_of(family.plain())
    monkeypatch.setattr(lfm2.Lfm2MoeExperts, "_apply_gate", own_gate(limit))
    monkeypatch.setattr(lfm2.Lfm2MoeExperts, "forward", DeepseekV4Experts.forward)  # which calls the gate
    want = logits_of(family.plain())

    model = load(family.path, activations="unquantized", **FLOAT)

    assert off(logits_of(model), want) < RANGE
    assert (off(before, want) > RANGE) == (limit < 1)
    assert not of_kind(model, TypedExperts)
    assert of_kind(model, ClassExperts)


def test_a_gate_of_a_class_that_is_given_runs_in_the_kernel_of_experts(
    family: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lfm2.Lfm2MoeExperts, "_apply_gate", own_gate(float("inf")))
    for options in ({"facts": SILU}, {"quantization_config": QloadConfig(facts=SILU)}):
        model = load(family.path, **{"activations": "unquantized", **options}, **FLOAT)  # type: ignore[arg-type]

        assert of_kind(model, TypedExperts)
        if "facts" in options:
            assert off(logits_of(model), logits_of(family.plain())) < RANGE


@pytest.mark.parametrize("limit", [float("inf"), 2.0])
def test_facts_that_are_not_those_of_the_class_are_refused(
    limit: float, family: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lfm2.Lfm2MoeExperts, "_apply_gate", own_gate(limit))
    facts = SILU if limit == 2.0 else ExpertFacts(GatedActivation("gelu"))

    with pytest.raises(
        ArgumentError, match=r"facts\n  expected the activation of Lfm2MoeExperts\._apply_gate"
    ):
        load(family.path, facts=facts, **FLOAT)


def test_facts_that_contradict_a_known_class_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"facts\n  expected None, or the facts of \S+: ExpertFacts"):
        shared("mixtral", "awq").load(facts=ExpertFacts(GatedActivation("gelu")))
    assert shared("mixtral", "awq").load(facts=SILU)


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"nonfinite": "warn"}, {"facts": "silu"}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            QloadConfig(**wrong)  # type: ignore[arg-type]
