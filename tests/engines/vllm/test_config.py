"""vLLM's calls of the quantization config, and the registration of the plug-in."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qload.engines.vllm import hooks, register, register_kernel
from qload.errors import ArgumentError, ConfigError, UnreadTensorsError, UnsupportedFormatError
from qload.kernels import DequantizeLinearKernel
from qload.testing import assert_same_bits
from tests.engines.vllm.test_kernel_config import described
from tests.models.with_transformers.stored import FORMATS
from tests.support.unread import known_type

LAYERS = "vllm.model_executor.layers"
NF4 = dict(FORMATS["nf4"].section)
AWQ = dict(FORMATS["awq"].section) | {"modules_to_not_convert": ["o_proj", "shared.gate_proj", "lm_head"]}


class Renames:
    """A mapper of one prefix to another."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def map_name(self, name: str) -> str:
        return self.new + name.removeprefix(self.old) if name.startswith(self.old) else name


def config_of(plugin: Any, section: dict[str, Any], folder: Path | None = None, *names: str) -> Any:
    """Create the config of a checkpoint with tensors of these names."""
    config = plugin.config.QloadQuantizationConfig.from_config(section)
    if folder is not None:
        save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
        config.maybe_update_config(str(folder))
    return config


def linear(plugin: Any) -> Any:
    return plugin.vllm[f"{LAYERS}.linear"].LinearBase(64, 64)


def vocabulary_layer(plugin: Any, kind: str) -> Any:
    return getattr(plugin.vllm[f"{LAYERS}.vocab_parallel_embedding"], kind)(64, 64, (0, 64), 64)


def test_answers_for_vllm(plugin: Any) -> None:
    config = config_of(plugin, AWQ)

    assert config.get_name() == "qload"
    assert config.get_min_capability() == 0
    assert config.get_supported_act_dtypes() == [torch.float16, torch.bfloat16, torch.float32]
    assert config.get_config_filenames() == [
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
    ]
    assert repr(config) == f"QloadQuantizationConfig({config.methods.loader!r})"
    assert config.packed_modules_mapping == {}


@pytest.mark.parametrize(("named", "wanted"), [("qload", "qload"), ("awq", None), (None, None)])
def test_only_the_users_choice_overrides(named: str | None, wanted: str | None, plugin: Any) -> None:
    assert plugin.config.QloadQuantizationConfig.override_quantization_method(AWQ, named) == wanted


def test_settings_of_the_section_reach_the_methods(plugin: Any) -> None:
    settings = {"target": None, "activations": "unquantized", "nonfinite": "allow"}
    config = config_of(plugin, AWQ | {"qload": settings})
    typed = config.get_quant_method(linear(plugin), "up_proj").typed

    assert {name: getattr(typed, name) for name in settings} == settings
    with pytest.raises(ConfigError, match=r"quantization_config\.qload"):
        config_of(plugin, AWQ | {"qload": {"kernel": "marlin"}})


@pytest.mark.parametrize(("module", "name"), hooks.LOADING_HOOKS)
def test_a_missing_name_is_refused_before_a_layer(
    module: str, name: str, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(plugin.vllm[module], name)

    with pytest.raises(ArgumentError, match=rf"{module}\.{name}, such as {hooks.TRIED[-1]}"):
        config_of(plugin, AWQ)


def test_each_class_of_layer_has_its_method(plugin: Any, tmp_path: Path) -> None:
    quantized = ("model.up_proj.qweight", "model.embed_tokens.qweight", "model.norms.qweight")
    config = config_of(plugin, AWQ, tmp_path, *quantized, "model.wte.weight", "plain_head.weight")
    methods, layers = plugin.methods, plugin.vllm[f"{LAYERS}.linear"]

    def method(layer: Any, prefix: str) -> type:
        return type(config.get_quant_method(layer, prefix))

    embeddings, head = (vocabulary_layer(plugin, k) for k in ("VocabParallelEmbedding", "ParallelLMHead"))
    assert method(torch.nn.Linear(4, 4), "model.up_proj") is type(None)
    assert method(linear(plugin), "model.up_proj") is methods.QloadLinearMethod
    assert method(linear(plugin), "model.o_proj") is layers.UnquantizedLinearMethod
    assert method(embeddings, "model.embed_tokens") is methods.QloadEmbeddingMethod
    assert method(embeddings, "model.wte") is type(None)
    assert method(embeddings, "model.unknown") is type(None)
    assert method(embeddings, "") is methods.QloadEmbeddingMethod  # the only quantized ones
    assert method(head, "") is methods.QloadHeadMethod
    assert method(head, "unknown_head") is methods.QloadHeadMethod  # its tensors decide
    assert method(head, "plain_head") is methods.PlainHeadMethod
    assert method(head, "lm_head") is methods.PlainHeadMethod  # by the config
    assert config.get_quant_method(linear(plugin), "model.up_proj").names is config.names
    assert config.get_quant_method(embeddings, "").typed.prefix == "model.embed_tokens"


def test_unnamed_embeddings_of_two_are_plain(plugin: Any, tmp_path: Path) -> None:
    config = config_of(plugin, AWQ, tmp_path, "model.embed_tokens.qweight", "model.wte.qweight")

    assert config.get_quant_method(vocabulary_layer(plugin, "VocabParallelEmbedding"), "") is None


def test_experts_have_a_method_unless_the_config_excludes_them(plugin: Any, tmp_path: Path) -> None:
    config = config_of(plugin, AWQ, tmp_path, "old.mlp.experts.0.w1.qweight")
    config.apply_vllm_mapper(Renames("old.", "model."))
    kind = plugin.vllm[f"{LAYERS}.fused_moe"].RoutedExperts

    method = config.get_quant_method(kind("model.mlp.experts", [0], None), "model.mlp.experts")
    assert type(method) is plugin.methods.QloadExpertsMethod
    assert method.formats == config.methods.loader.formats
    assert (method.names, method.config) == (config.names, config.methods)
    for entry in ("old.mlp.experts.0.w1", "unknown.experts.0.w1"):
        excluded = config_of(plugin, AWQ | {"modules_to_not_convert": [entry]}, None)
        excluded.names = config.names
        prefix = entry.replace("old.", "model.").removesuffix(".0.w1")
        assert excluded.get_quant_method(kind(prefix, [0], None), prefix) is None
    with pytest.raises(ArgumentError, match=r"model\.mlp\.experts: enable_eplb"):
        config.get_quant_method(kind("model.mlp.experts", [0], None, enable_eplb=True), "model.mlp.experts")


def test_experts_follow_the_entry_of_their_own(plugin: Any) -> None:
    section = dict(FORMATS["gptq"].section) | {"dynamic": {r"+:.*experts.*": {"bits": 8}}}
    config = config_of(plugin, section)
    kind = plugin.vllm[f"{LAYERS}.fused_moe"].RoutedExperts
    method = config.get_quant_method(kind("mlp.experts", [0], None), "mlp.experts")

    (quantized,) = (fmt.config for fmt in method.formats if not fmt.weight_type.plain)
    assert quantized.bits == 8


@pytest.mark.parametrize(
    ("prefix", "is_excluded"),
    [
        ("model.up_proj", False),
        ("model.o_proj", True),  # stored as renamed.o_proj
        ("model.shared.gate_up_proj", True),  # by the stored names of its parts
    ],
)
def test_the_stored_name_of_a_layer_decides(
    prefix: str, is_excluded: bool, plugin: Any, tmp_path: Path
) -> None:
    excluded = ["renamed.o_proj", "renamed.shared.gate_proj", "renamed.shared.up_proj", "lm_head"]
    names = [f"renamed.{name}.qweight" for name in ("up_proj", "o_proj")]
    names += [f"renamed.shared.{part}_proj.qweight" for part in ("gate", "up")]
    config = config_of(plugin, AWQ | {"modules_to_not_convert": excluded}, tmp_path, *names)
    config.apply_vllm_mapper(Renames("renamed.", "model."))
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    method = config.get_quant_method(linear(plugin), prefix)

    plain = plugin.vllm[f"{LAYERS}.linear"].UnquantizedLinearMethod
    assert isinstance(method, plain) == is_excluded
    assert is_excluded or method.typed.prefix == prefix


def test_a_merged_layer_is_named_by_the_first_renamed_part(plugin: Any, tmp_path: Path) -> None:
    config = config_of(plugin, AWQ, tmp_path, "renamed.gate_proj.qweight", "up_proj.qweight")
    config.apply_vllm_mapper(Renames("renamed.", ""))
    config.packed_modules_mapping = {"gate_up_proj": ["up_proj", "gate_proj"]}

    assert config._stored_name("gate_up_proj") == "renamed.gate_up_proj"
    assert config._stored_name("mlp.gate_up_proj") == "mlp.gate_up_proj"


def write_nf4(folder: Path, *names: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{n}.{s}": t for n in names for s, t in FORMATS["nf4"].layer(16, 64, generator).items()}
    save_file(tensors, folder / "model.safetensors")


def test_suffixes_with_dots_are_renamed_to_parameters(plugin: Any, tmp_path: Path) -> None:
    write_nf4(tmp_path, "model.up_proj")
    config = config_of(plugin, NF4)
    config.maybe_update_config(str(tmp_path))
    renamed = config.get_checkpoint_weight_mapper().orig_to_new_suffix

    assert renamed[".weight.absmax"] == ".weight_absmax"
    assert renamed[".weight.quant_state.bitsandbytes__nf4"] == ".weight_quant_state_bitsandbytes__nf4"
    assert all(old.count(".") > 1 and new == f".{old[1:].replace('.', '_')}" for old, new in renamed.items())
    assert config_of(plugin, AWQ).get_checkpoint_weight_mapper().orig_to_new_suffix == {}


def test_quantized_embeddings_of_a_plain_module_are_refused(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_nf4(tmp_path, "model.embed_tokens", "model.up_proj")
    config = config_of(plugin, NF4)
    config.maybe_update_config(str(tmp_path))

    with pytest.raises(UnsupportedFormatError, match=r"model\.embed_tokens.*\n.*plain embeddings"):
        config.get_checkpoint_weight_mapper()
    group = SimpleNamespace(is_first_rank=False)  # of a pipeline: its embeddings are elsewhere
    with monkeypatch.context() as patch:
        patch.setattr(plugin.vllm["vllm.distributed.parallel_state"], "get_pp_group", lambda: group)
        assert config.get_checkpoint_weight_mapper().orig_to_new_suffix
    embeddings = vocabulary_layer(plugin, "VocabParallelEmbedding")
    assert type(config.get_quant_method(embeddings, "")) is plugin.methods.QloadEmbeddingMethod
    assert config.get_checkpoint_weight_mapper().orig_to_new_suffix


def test_tensors_of_no_format_are_refused(plugin: Any, tmp_path: Path) -> None:
    given = known_type(tmp_path / "model")
    section = json.loads((given.folder / "config.json").read_text())["quantization_config"]
    config = config_of(plugin, section)
    config.maybe_update_config(str(given.folder))

    with pytest.raises(UnreadTensorsError) as caught:
        config.get_checkpoint_weight_mapper()
    assert caught.value.unread.keys() == given.unread.keys()


def test_the_revision_selects_the_files(plugin: Any) -> None:
    config = config_of(plugin, AWQ)
    assert (config.names.model, config.names.revision) == ("", None)

    config.maybe_update_config("owner/name", None, "v2")

    assert (config.names.model, config.names.revision) == ("owner/name", "v2")


def test_registration_adds_the_method_once(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "_warned", set())
    with caplog.at_level(logging.WARNING, "qload"):
        register()
        register()

    module = plugin.vllm[f"{LAYERS}.quantization"]
    assert module.QUANTIZATION_METHODS == ["awq", "qload"]
    assert module.registered == {"qload": plugin.config.QloadQuantizationConfig}
    (record,) = caplog.records
    assert record.getMessage().startswith("vLLM of no version: tried with")


@pytest.mark.parametrize(("module", "name"), hooks.REGISTRATION_HOOKS)
def test_registration_refuses_a_version_without_a_name(
    module: str, name: str, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(plugin.vllm[module], name)

    with pytest.raises(ArgumentError, match=rf"{module}\.{name}"):
        register()


@pytest.mark.parametrize("named", [None, [], ["qload"], ["qload", "qload_kernel"]])
def test_the_kernel_is_first_only_on_request(
    named: list[str] | None, plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels: dict[Any, list[type]] = {}
    platforms = plugin.vllm["vllm.platforms"].PlatformEnum
    kernels[platforms.CUDA] = [int, float]
    monkeypatch.setattr(plugin.vllm["vllm.model_executor.kernels.linear"], "_POSSIBLE_KERNELS", kernels)
    monkeypatch.setattr(plugin.vllm["vllm.envs"], "VLLM_PLUGINS", named)
    monkeypatch.setattr(hooks, "_warned", set())
    is_named = "qload_kernel" in (named or ())
    with caplog.at_level(logging.WARNING, "qload"):
        register_kernel()
        register_kernel()

    assert kernels == {platforms.CUDA: [plugin.kernel.QloadLinearKernel] * is_named + [int, float]}
    assert len(caplog.records) == is_named
    plugin.kernel.put_first(platforms.CPU)
    assert kernels[platforms.CPU] == [plugin.kernel.QloadLinearKernel]


def kernel_config(weight_type: str = "uint4b8", **changes: Any) -> Any:
    shape, options = (64, 32), {"act_type": torch.float32, "group_size": 16}
    both = {"full_weight_shape": shape, "partition_weight_shape": shape}
    return described(weight_type, **both | options | changes)


def test_the_kernel_refuses_with_a_reason(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = plugin.kernel.QloadLinearKernel

    assert kernel.get_min_capability() == 0
    assert kernel.can_implement(kernel_config()) == (True, None)
    able, reason = kernel.can_implement(kernel_config("unknown4"))
    assert not able
    assert "one of qload.scalar_types" in reason
    assert "unknown4" in reason
    capability = SimpleNamespace(to_int=lambda: 80)
    platform = plugin.vllm["vllm.platforms"].current_platform
    monkeypatch.setattr(platform, "get_device_capability", lambda: capability)
    assert kernel.can_implement(kernel_config()) == (False, "it would be dequantized at each call")
    assert kernel.can_implement(kernel_config(act_type=torch.float16)) == (True, None)
    with pytest.raises(AssertionError, match="dequantized"):
        kernel(kernel_config(), "w_q", "w_s", None).process_weights_after_loading(torch.nn.Module())


@pytest.mark.parametrize("has_zeros", [False, True])
def test_the_kernel_multiplies_by_the_weight(has_zeros: bool, plugin: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 32), generator=generator)
    zeros = torch.randint(0, 16, (4, 32), generator=generator) if has_zeros else torch.full((4, 32), 8)
    scales = 2.0 ** torch.randint(-2, 2, (4, 32), generator=generator)
    shifts = 4 * torch.arange(8)
    words = (codes.view(8, 8, 32) << shifts[:, None]).sum(1)
    zero_words = (zeros.view(4, 4, 8) << shifts).sum(2)
    layer: Any = torch.nn.Module()
    dims = {"input_dim": 0, "output_dim": 1}
    for name, value, packed in (
        ("codes", words, 0),
        ("steps", scales, None),
        ("points", zero_words, 1),
    ):
        dtype = torch.float32 if packed is None else torch.int32
        param: Any = torch.nn.Parameter(value.to(dtype), requires_grad=False)
        vars(param).update(dims if packed is None else {**dims, "packed_dim": packed})
        if has_zeros or name != "points":
            layer.register_parameter(name, param)
    config = kernel_config("uint4" if has_zeros else "uint4b8", zero_points=has_zeros)
    kernel = plugin.kernel.QloadLinearKernel(config, "codes", "steps", "points" if has_zeros else None)
    kernel.process_weights_after_loading(layer)

    x = torch.randint(-3, 4, (5, 64), generator=generator).float()
    weight = (codes - zeros.repeat_interleave(16, 0)) * scales.repeat_interleave(16, 0)
    assert type(kernel.inner) is DequantizeLinearKernel
    assert_same_bits(kernel.apply_weights(layer, x), x @ weight)
    assert_same_bits(kernel.apply_weights(layer, x, torch.arange(32.0)), x @ weight + torch.arange(32.0))
