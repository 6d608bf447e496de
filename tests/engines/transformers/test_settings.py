"""What a model on qload can be asked for: installed, quantized while loading, on devices, adapted, compiled.

Collected where transformers is installed.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook
from peft import get_peft_model
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from qload import BNB4Quantizer, BNBInt8Quantizer, EETQQuantizer, Fp8Quantizer
from qload.engines.transformers import (
    LinearSlot,
    QloadConfig,
    TypedExperts,
    install,
    load,
    loading,
    lora_config,
    uninstall,
)
from qload.engines.transformers.layer_names import name_patterns
from qload.engines.transformers.placeholder_layers import DenseExpertsForward
from qload.engines.transformers.quantizer import LayerDevice, layer_devices, offload_if_mapped
from qload.errors import ArgumentError, MissingTensorError, ShapeError
from qload.quantize.policy import Modules
from tests.engines.transformers.models import EAGER, IDS, RANGE, Stored, greedy, logits, of_kind, shared
from tests.models.recorded import off
from tests.verify.damage.model import Model

TIED: dict[str, Any] = {"tie_word_embeddings": True}
QUANTIZERS = [
    Fp8Quantizer(),
    Fp8Quantizer("block", (16, 16)),
    EETQQuantizer(),
    BNBInt8Quantizer(),
    BNB4Quantizer("nf4"),
]
FLOAT: dict[str, Any] = {"dtype": torch.float32, **EAGER}


def test_plain_from_pretrained_runs_on_qload_while_it_is_installed() -> None:
    stored = shared("llama", "gptq", **TIED)
    before = dict(AUTO_QUANTIZATION_CONFIG_MAPPING), dict(AUTO_QUANTIZER_MAPPING)
    install(activations="unquantized")
    install(activations="unquantized")  # a second call replaces the first
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(stored.path, **FLOAT)
    finally:
        uninstall()

    assert len(of_kind(model, LinearSlot)) == 14
    assert off(logits(model), logits(stored.plain())) < RANGE
    assert before == (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING)
    uninstall()  # there is nothing to undo
    assert before == (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING)


def means(model: Any, plain: Any) -> Any:
    """The `plain` model with what the layers of another mean."""
    held = dict(plain.named_parameters())
    with torch.no_grad():
        for name, slot in of_kind(model, LinearSlot).items():
            held[f"{name}.weight"].copy_(slot.linear.typed.dequantize())
        for name, experts in of_kind(model, TypedExperts).items():
            stacks = [held[f"{name.rpartition('.')[0]}.{stack}"] for stack in ("gate_up_proj", "down_proj")]
            for e in range(experts.shape[0]):
                for stack, meant in zip(stacks, experts.linear.typed.dequantize(e), strict=True):
                    stack[e].copy_(meant)
    return plain


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_plain_checkpoint_is_quantized_while_it_is_loaded(kind: str, quantizer: Any) -> None:
    stored = shared(kind, "awq", tie_word_embeddings=False)
    config = QloadConfig(quantizer, activations="unquantized")

    options = {**FLOAT, "quantization_config": config}
    model = transformers.AutoModelForCausalLM.from_pretrained(stored.means, **options)

    assert {slot.linear.typed.format for slot in of_kind(model, LinearSlot).values()} == {quantizer.format}
    assert len(of_kind(model, LinearSlot)) == (14 if kind == "llama" else 8)
    assert len(of_kind(model, TypedExperts)) == (0 if kind == "llama" else 2)
    assert isinstance(model.lm_head, nn.Linear)  # which the policy leaves out, unless it is told otherwise
    plain = stored.plain()
    assert off(logits(model), logits(plain)) > RANGE
    assert off(logits(model), logits(means(model, plain))) < RANGE


def test_a_policy_says_which_layers_stay_plain() -> None:
    stored = shared("llama", "awq", tie_word_embeddings=False)
    config = QloadConfig(Fp8Quantizer(), Modules(without=("self_attn", "layers.1")))

    model = load(stored.means, quantization_config=config, **FLOAT)

    projections = ("down_proj", "gate_proj", "up_proj")
    assert sorted(of_kind(model, LinearSlot)) == [
        "lm_head", *(f"model.layers.0.mlp.{each}" for each in projections)
    ]  # fmt: skip


def test_the_config_is_json_and_says_what_it_was_made_of() -> None:
    said = QloadConfig(Fp8Quantizer(), target="marlin").to_dict()

    assert (said["quant_method"], said["target"], said["checkpoint"]) == ("qload", "marlin", None)
    assert said["quantizer"].startswith("Fp8Quantizer(")
    for wrong in ({"quantizer": "fp8"}, {"activations": "none"}, {"target": 3}):
        with pytest.raises(ArgumentError):
            QloadConfig(**wrong)


def test_the_config_of_a_model_loads_another_one_and_is_saved_as_the_checkpoint_has_it(
    tmp_path: Path,
) -> None:
    stored = shared("llama", "gptq", **TIED)
    model = stored.load()
    own = json.loads((Path(stored.path) / "config.json").read_text())["quantization_config"]
    model.config.save_pretrained(tmp_path)

    kind = transformers.AutoModelForCausalLM
    again = kind.from_pretrained(stored.path, config=model.config, **FLOAT)

    assert torch.equal(logits(again), logits(model))
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == own


def test_a_saved_config_of_a_tool_with_a_file_of_its_own_is_read_again() -> None:
    said = json.loads(json.dumps(QloadConfig().to_dict()))

    assert QloadConfig.from_dict(said).to_dict() == said


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_checkpoint_with_nothing_to_quantize_is_refused_with_experts_too(kind: str) -> None:
    stored = shared(kind, "awq", tie_word_embeddings=False)

    with pytest.raises(ArgumentError, match=r"none of them; (14|56) layers are stored quantized"):
        stored.load(quantization_config=QloadConfig(Fp8Quantizer()))


@pytest.mark.parametrize("name", ["intermediate_size", "num_attention_heads"])
def test_a_config_of_other_sizes_than_the_layers_have_is_refused(name: str) -> None:
    stored = shared("mixtral", "awq", tie_word_embeddings=False)
    config = transformers.AutoConfig.from_pretrained(stored.path)
    setattr(config, name, 2 * getattr(config, name))

    with pytest.raises(ShapeError, match="as the model has it"):
        load(stored.path, config=config, **FLOAT)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}], ids=str)
def test_a_device_map_gives_the_same_logits(kind: str, device_map: Any) -> None:
    stored = shared(kind, "awq", tie_word_embeddings=False)

    model = stored.load(device_map=device_map)

    assert off(logits(model), logits(stored.plain())) < RANGE
    assert model.num_parameters() == stored.plain().num_parameters()


def test_plain_layers_may_wait_on_a_disk_and_quantized_ones_may_not(tmp_path: Path) -> None:
    stored = shared("llama", "awq", tie_word_embeddings=False)
    there = {
        "model.embed_tokens": "cpu",
        "model.layers": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
    }

    model = stored.load(device_map={**there, "lm_head": "disk"}, offload_folder=tmp_path)

    assert off(logits(model), logits(stored.plain())) < RANGE
    with pytest.raises(ArgumentError, match=r"'disk' for model\.layers\.0"):
        stored.load(device_map={**there, "lm_head": "cpu", "model.layers": "disk"}, offload_folder=tmp_path)
    with pytest.raises(ArgumentError, match=r"'meta' for model\.layers\.0"):
        stored.load(device_map="meta")


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_weights_that_wait_elsewhere_come_for_each_product(kind: str) -> None:
    stored = shared(kind, "awq", tie_word_embeddings=False)
    model, want = stored.load(), logits(stored.plain())
    for slot in (*of_kind(model, LinearSlot).values(), *of_kind(model, TypedExperts).values()):
        offload_if_mapped(slot.linear, LayerDevice(torch.device("cpu"), offloaded=True))
        assert {each.device.type for name, each in slot.linear.named_buffers()} == {"meta"}

    assert off(logits(model), want) < RANGE
    assert off(logits(cpu_offload(stored.load(), torch.device("cpu"), offload_buffers=True)), want) < RANGE


def test_hooks_say_where_a_layer_multiplies() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("first", "second", "third")})
    for name, device in (("first", "cuda:0"), ("second", "cuda:1"), ("third", "cuda:0")):
        model[name]._hf_hook = AlignDevicesHook(device)  # type: ignore[assignment]
    model.hf_device_map = {"first": "cuda:0", "second": "cuda:1", "third": "cpu"}  # type: ignore[assignment]

    found = layer_devices(model, None, ["first", "second", "third"])

    assert found == {
        "first": LayerDevice(torch.device("cuda:0")),
        "second": LayerDevice(torch.device("cuda:1")),
        "third": LayerDevice(torch.device("cuda:0"), offloaded=True),
    }
    alone = layer_devices(SimpleNamespace(), {"": "cuda:3", "a.b": "cpu"}, ["a.b.c", "a.bc"])
    assert [str(place.device) for place in alone.values()] == ["cpu", "cuda:3"]


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # which peft says of every custom module
@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # peft asks for it
def test_adapters_of_peft_are_trained_beside_quantized_layers() -> None:
    stored = shared("llama", "gptq", **TIED)
    model, plain = stored.load(), stored.plain()
    names = ["q_proj", "v_proj", "down_proj"]
    torch.manual_seed(0)
    adapted = get_peft_model(model, lora_config(r=4, target_modules=names, init_lora_weights=False))
    torch.manual_seed(0)
    twin = get_peft_model(plain, lora_config(r=4, target_modules=names, init_lora_weights=False))

    for each in (adapted, twin):
        each(IDS.long(), labels=IDS.long()).loss.backward()

    own, theirs = (
        {name: each.grad for name, each in one.named_parameters() if each.grad is not None}
        for one in (adapted, twin)
    )
    assert own.keys() == theirs.keys()
    assert len(own) == 2 * len(names) * 2
    assert all(off(own[name], theirs[name]) < 10 * RANGE for name in own)
    with pytest.raises(ArgumentError, match="a quantized weight"):
        adapted.merge_and_unload()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("llama", "gptq"), ("mixtral", "awq")])
def test_a_compiled_model_with_a_static_cache_gives_the_same_tokens(kind: str, name: str) -> None:
    stored = shared(kind, name, **TIED)
    model = stored.load()
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)

    made = greedy(model, cache_implementation="static")

    assert torch.equal(made, greedy(stored.plain()))


def test_a_tensor_that_is_not_stored_is_refused_and_not_drawn(tmp_path: Path) -> None:
    stored = shared("llama", "awq", **TIED)
    held = Model.read(stored.path)
    del held.tensors["model.norm.weight"]

    with pytest.raises(MissingTensorError, match=r"model\.norm\.weight"):
        Stored(held.write(tmp_path), stored.means).load()


def test_a_layer_that_the_model_has_no_place_for_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = shared("llama", "awq", **TIED)
    held = Model.read(stored.path)
    own = {
        name: each for name, each in held.tensors.items() if name.startswith("model.layers.1.mlp.up_proj.")
    }
    held.tensors |= {name.replace("layers.1", "layers.9"): each for name, each in own.items()}

    _, found = Stored(held.write(tmp_path), stored.means).load(output_loading_info=True)

    assert "1 quantized layers have no place in LlamaForCausalLM: model.layers.9.mlp.up_proj" in caplog.text
    assert sorted(found["unexpected_keys"]) == sorted(name.replace("layers.1", "layers.9") for name in own)


def test_a_version_that_lacks_a_hook_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loading.check_version()
    monkeypatch.setattr(loading.transformers, "__version__", "4.0.0")
    with pytest.warns(UserWarning, match=r"tried with transformers 5\.23\.0, and this is 4\.0\.0"):
        loading.check_version()

    monkeypatch.delattr("transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS")
    with pytest.raises(ArgumentError, match=r"transformers\.integrations\.moe\.ALL_EXPERTS_FUNCTIONS"):
        loading.check_version()


def test_rows_for_all_experts_lie_one_expert_after_another() -> None:
    def typed(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ids * weights

    typed.shape = (2, 4, 4)  # type: ignore[attr-defined]

    module: Any = SimpleNamespace(typed_experts=typed)
    assert DenseExpertsForward(module)(torch.ones(6, 4)).tolist() == [[0]] * 3 + [[1]] * 3


def test_names_that_differ_in_the_first_number_are_one_pattern() -> None:
    names = ["a.0.w.7.q", "a.2.w.3.q", "a.10.w.7.q", "b", "c.1.scale"]

    assert name_patterns(names) == {r"^a\.(?:0|10|2)\.w\.[0-9]+\.q$", "^b$", r"^c\.(?:1)\.scale$"}
