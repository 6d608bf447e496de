"""What a user may get wrong, or do to a model that lives: right, or refused in words that say what to do.

Collected where transformers is installed.
"""

import copy
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AwqConfig, BitsAndBytesConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from qload import Fp8Quantizer, open_checkpoint
from qload.engines.transformers import (
    LinearSlot,
    QloadConfig,
    TypedExperts,
    install,
    load,
    loading,
    uninstall,
)
from qload.engines.transformers.quantizer import LayerDevice, layer_devices
from qload.errors import ArgumentError, MismatchError, MissingTensorError, QloadError
from tests.engines.transformers.models import EAGER, RANGE, Stored, logits, of_kind, shared
from tests.models.recorded import off
from tests.models.with_transformers.stored import FORMATS
from tests.verify.damage.model import Model

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.int8}, "dtype"),
    ({"dtype": torch.float64}, "dtype"),
    ({"dtype": "float8_e4m3fn"}, "dtype"),
    ({"dtype": "half a float"}, "dtype"),
    ({"target": "tensorrt"}, "target"),
    ({"activations": "int8"}, "activations"),
    ({"tp_plan": "columns"}, "tp_plan"),
    ({"tp_plan": "auto", "distributed_config": DistributedConfig()}, "tp_plan"),
    ({"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}, "quantization_config"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
    ({"quantization_config": QloadConfig(Fp8Quantizer())}, "quantizer"),
]
CASTS: dict[str, Callable[[Any], Any]] = {
    "to": lambda model: model.to(torch.bfloat16),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "a part": lambda model: model.model.layers[0].to(torch.float16),
}


@pytest.mark.parametrize(("said", "name"), WRONG, ids=[str(each[0]) for each in WRONG])
def test_a_parameter_that_cannot_be_acted_on_is_named(said: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{name}\n  expected"):
        shared("llama", "gptq").load(**said)


@pytest.mark.parametrize("plan", [None, "auto", {"layers.*": "colwise"}], ids=str)
def test_a_plan_of_shares_is_one_of_three_kinds(plan: Any) -> None:
    loading.check_plan(plan, {"distributed_config": None})

    with pytest.raises(ArgumentError, match="expected None, 'auto', or styles by names of layers"):
        loading.check_plan("columns", {})
    if plan is not None:
        with pytest.raises(ArgumentError, match="expected one of the two"):
            loading.check_plan(plan, {"distributed_config": DistributedConfig()})


@pytest.mark.parametrize(
    ("dtype", "other", "result"),
    [
        (None, None, None),
        (torch.float16, None, torch.float16),
        (None, "bfloat16", "bfloat16"),
        (torch.float32, torch.float32, torch.float32),
    ],
)
def test_a_dtype_has_one_value_under_both_names(dtype: Any, other: Any, result: Any) -> None:
    assert loading.one_dtype(dtype, other) == result
    loading.check_dtype(result)

    with pytest.raises(ArgumentError) as caught:
        loading.one_dtype(torch.float16, torch.float32)
    assert (caught.value.expected, caught.value.got) == ("torch.float16, as dtype says", "torch.float32")


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("cast", CASTS)
def test_no_cast_reaches_a_weight_once_it_is_loaded(cast: str, kind: str) -> None:
    model = shared(kind, "awq").load()

    with pytest.raises(ArgumentError, match=r"dtype\n.*load\(path, dtype=\.\.\.\)"):
        CASTS[cast](model)

    scales = {slot.linear.scales.dtype for slot in of_kind(model, LinearSlot).values()}
    assert scales == {torch.float16}  # as they are stored
    assert {each.dtype for each in model.parameters()} == {torch.float32}  # all else is as it was, too


def test_what_is_no_path_is_asked_of_no_hub() -> None:
    with pytest.raises(ArgumentError, match=r"^path\n  expected str or PathLike"):
        load(3)  # type: ignore[arg-type]


def test_torchs_old_name_of_dtype_is_heard() -> None:
    path = shared("llama", "awq").path

    assert load(path, torch_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load(path, dtype=torch.bfloat16, torch_dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ArgumentError, match=r"torch_dtype\n  expected torch\.float32, as dtype says"):
        load(path, dtype=torch.float32, torch_dtype=torch.bfloat16)


def test_a_loaded_model_is_not_dequantized() -> None:
    with pytest.raises(ArgumentError, match=r"dequantize\n  expected a folder, `qload convert PATH"):
        shared("llama", "awq").load().dequantize()


def test_a_model_that_was_pickled_is_what_it_was() -> None:
    model = shared("llama", "awq").load()

    again = pickle.loads(pickle.dumps(model))

    assert torch.equal(logits(again), logits(model))
    assert again.num_parameters() == model.num_parameters()
    with pytest.raises(ArgumentError, match="dtype"):
        again.to(torch.bfloat16)
    assert again.model.embed_tokens.weight.dtype == torch.float32


def test_a_model_may_be_moved_and_copied() -> None:
    stored = shared("mixtral", "awq")

    model = copy.deepcopy(stored.load().to("cpu").to(torch.float32))

    assert torch.equal(logits(model), logits(stored.load()))
    slots = (*of_kind(model, LinearSlot).values(), *of_kind(model, TypedExperts).values())
    held = {buffer.dtype for slot in slots for buffer in slot.linear.buffers()}
    assert held == {torch.int32, torch.uint8, torch.float16}  # words, zero points and scales of panels


@pytest.mark.parametrize(("kind", "name"), [("llama", "gptq"), ("mixtral", "awq")])
def test_models_that_live_together_do_not_change_each_other(kind: str, name: str) -> None:
    one, other = shared(kind, name), shared("llama", "nf4")
    first = one.load()
    before = logits(first)
    second = other.load()

    assert off(logits(second), logits(other.plain())) < RANGE
    assert torch.equal(logits(first), before)
    plain = one.plain()  # by transformers' own loader, beside them
    assert off(before, logits(plain)) < RANGE
    assert not of_kind(plain, LinearSlot)


def test_a_model_outlives_what_it_was_installed_by() -> None:
    stored = shared("mixtral", "awq")
    install(activations="unquantized")
    try:
        model = AutoModelForCausalLM.from_pretrained(stored.path, dtype=torch.float32, **EAGER)
        before = logits(model)
    finally:
        uninstall()

    assert AUTO_QUANTIZATION_CONFIG_MAPPING["awq"] is AwqConfig
    assert torch.equal(logits(model), before)
    assert off(before, logits(stored.plain())) < RANGE
    assert torch.equal(logits(stored.load()), before)  # which needs no install


def test_a_device_map_without_accelerate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("modeling_utils", "integrations.accelerate"):
        monkeypatch.setattr(f"transformers.{module}.is_accelerate_available", lambda *_: False)

    with pytest.raises(ValueError, match="requires `accelerate`"):
        shared("llama", "gptq").load(device_map="auto")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    stored = shared("llama", "gptq")
    (tmp_path / "model.safetensors").symlink_to(stored.path / "model.safetensors")

    with pytest.raises(ValueError, match=r"config\.json"):
        Stored(tmp_path, stored.means).load()


def test_a_config_that_says_nothing_of_what_is_quantized_is_refused(tmp_path: Path) -> None:
    held = Model.read(shared("llama", "gptq").path)
    del held.config["quantization_config"]

    with pytest.raises(MissingTensorError, match=r"model\.layers\.0\..*weight"):
        Stored(held.write(tmp_path), tmp_path).load()


def test_a_head_that_is_not_stored_is_refused_and_not_drawn(tmp_path: Path) -> None:
    stored = shared("llama", "gptq", tie_word_embeddings=False)
    held = Model.read(stored.path)
    del held.tensors["lm_head.weight"]

    with pytest.raises(MissingTensorError, match=r"lm_head\.weight"):
        Stored(held.write(tmp_path), stored.means).load()


def test_adapters_that_are_not_merged_are_refused_with_their_layer(tmp_path: Path) -> None:
    stored, name = shared("llama", "gptq"), "model.layers.0.self_attn.q_proj"
    held = Model.read(stored.path)
    for own in [each for each in held.tensors if each.startswith(f"{name}.")]:
        held.tensors[own.replace(name, f"{name}.base_layer")] = held.tensors.pop(own)
    held.tensors[f"{name}.lora_A.default.weight"] = torch.ones(2, 4)

    with pytest.raises(MismatchError, match=rf"is an unmerged adapter of {name}\.base_layer"):
        Stored(held.write(tmp_path), stored.means).load()


def test_plain_tensors_that_the_model_has_no_place_for_are_told(tmp_path: Path) -> None:
    stored = shared("llama", "gptq", tie_word_embeddings=True)
    held, extra = Model.read(stored.path), "model.layers.0.mlp.router.weight"
    held.tensors[extra] = torch.ones(4, 4)

    _, found = Stored(held.write(tmp_path), stored.means).load(output_loading_info=True)

    assert set(found["unexpected_keys"]) == {extra}


def test_a_layer_waits_where_its_map_says_whatever_the_name_of_the_model() -> None:
    model = nn.ModuleDict({"up": nn.Linear(2, 2)})
    model.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    hook: Any = type("Hook", (), {"execution_device": "cuda:1"})()
    model["up"]._hf_hook = hook

    assert layer_devices(model, None, ["up"]) == {"up": LayerDevice(torch.device("cuda:1"), offloaded=True)}
    hook.execution_device = "cpu"
    assert layer_devices(model, None, ["up"]) == {"up": LayerDevice(torch.device("cpu"))}


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_quantized_head_is_not_tied_whatever_the_config_says(name: str, tmp_path: Path) -> None:
    stored = shared("llama", name, tie_word_embeddings=True)
    held, means = Model.read(stored.path), Model.read(stored.means)
    N, K = held.tensors["model.embed_tokens.weight"].shape
    head = FORMATS[name].layer(N, K, torch.Generator().manual_seed(5))
    held.tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in head.items()}
    with open_checkpoint(held.write(tmp_path / "stored")) as weights:
        means.tensors["lm_head.weight"] = weights.get_weights("lm_head").dequantize().contiguous()
    means.config["tie_word_embeddings"] = False

    own = Stored(tmp_path / "stored", means.write(tmp_path / "means"))

    assert off(logits(own.load()), logits(own.plain())) < RANGE


def rewritten(model: Stored, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The checkpoint with other tensors, in a folder of its own."""
    copy_of = folder / "rewritten"
    shutil.copytree(model.path, copy_of)
    for file in copy_of.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
    return copy_of


def stacked_of_nobody(tensors: dict[str, Any]) -> None:
    """The experts of the first layer in FP8 stacks, beside scales under a name of nobody's."""
    lead = next(name.partition(".experts.")[0] for name in sorted(tensors) if ".experts." in name)
    for name in [name for name in tensors if name.startswith(f"{lead}.experts.")]:
        del tensors[name]
    for part, shape in (("gate_up_proj", (4, 64, 32)), ("down_proj", (4, 32, 32))):
        tensors[f"{lead}.experts.{part}"] = torch.ones(shape).to(torch.float8_e4m3fn)
        tensors[f"{lead}.experts.{part}_scale_rate"] = torch.full((4, 3), 0.5)


def test_a_stack_that_no_format_reads_is_refused_by_load_and_by_from_pretrained(tmp_path: Path) -> None:
    path = rewritten(shared("mixtral", "fp8 block"), tmp_path, stacked_of_nobody)
    install()
    try:
        for call in (load, AutoModelForCausalLM.from_pretrained):
            with pytest.raises(QloadError, match=r"experts"):
                call(path)
    finally:
        uninstall()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
@pytest.mark.parametrize(
    ("kind", "name"), [("llama", "model.norm.weight"), ("gpt_oss", "model.layers.0.self_attn.sinks")]
)
def test_a_parameter_in_a_type_that_says_no_values_is_not_taken_as_values(
    kind: str, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """transformers alone casts its bytes to floats, and the model runs on."""

    def change(tensors: dict[str, Any]) -> None:
        if name in tensors:
            tensors[name] = torch.ones(tensors[name].shape).to(dtype)

    path = rewritten(shared(kind, "w4a16" if kind == "gpt_oss" else "awq"), tmp_path, change)

    with pytest.raises(QloadError, match=re.escape(name.removesuffix(".weight"))):
        load(path)
