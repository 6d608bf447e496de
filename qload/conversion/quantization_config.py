"""The `quantization_config` of converted layers, in the schema of each format's owner."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qload.configs.matching import HEAD
from qload.conversion import float4, fp8
from qload.conversion.targets import OutputLayer
from qload.detect.config_reader import MLX_SECTION, SECTIONS
from qload.formats import (
    AWQWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackWeight,
    Fp8Weight,
    GPTQWeight,
    Marlin24Weight,
    MarlinWeight,
    MLXFloatWeight,
    ModelOptNVFP4Weight,
    MXFP4ExpertsWeight,
    QuarkInt4Weight,
    mx,
    nvfp4,
)
from qload.layouts import Stored
from qload.spec import Weight

CT_VERSION = "0.18.0"  # the first version with this packing of 3-bit codes
NO_ACT_ORDER = "compressed-tensors from 0.20 on cannot load a layer in act order; gptq_v2 can represent it"


@dataclass(frozen=True)
class WrittenConfig:
    """Contents of a `quantization_config`; None if no layer is quantized.

    `side_file` is the name of the owner's own config file, `section` the key in config.json. `model` has
    further keys of config.json. `refused` has a reason, by prefix, for layers that the config cannot
    describe.
    """

    values: Mapping[str, Any] | None
    side_file: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    section: str = SECTIONS[0]
    model: Mapping[str, Any] = field(default_factory=dict)


def quantization_config(layers: Sequence[OutputLayer], plain: Sequence[str]) -> WrittenConfig:
    """Return the config of quantized `layers`; `plain` are the names of plain matrices."""
    types = Counter(layer.weight_type for layer in layers)
    if not types:
        return WrittenConfig(None)
    (first, _), *others = types.most_common()
    if others or first not in CONFIG_WRITERS:
        names = ", ".join(sorted(weight_type.format for weight_type in types))
        return _refuse_all(layers, f"convert writes no quantization_config for {names}")
    return CONFIG_WRITERS[first](layers, plain)


def _gptq_config(layers: Sequence[OutputLayer], plain: Sequence[str]) -> WrittenConfig:
    """Return the config of gptqmodel; `dynamic` has plain layers, and layers unlike the majority."""
    bits, group_size = _most_common_groups(layers)
    conventions = _zero_point_conventions(layers)
    if len(conventions) > 1:
        return _refuse_all(layers, f"zero points are in two conventions: {', '.join(sorted(conventions))}")
    dynamic: dict[str, dict[str, int]] = {
        f"-:^{re.escape(name)}$": {} for name in plain if not _is_head(name)
    }
    for layer in layers:
        if not _is_covered(layer, bits, group_size):
            override = {"bits": layer.config.bits, "group_size": layer.config.group_size}
            dynamic[f"+:^{re.escape(layer.prefix)}$"] = override
    values = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": any(layer.act_order for layer in layers),
        "sym": all(layer.symmetric for layer in layers),
        "lm_head": any(_is_head(layer.prefix) for layer in layers),
        "checkpoint_format": "gptq_v2" if conventions == {Stored.name} else "gptq",
        "pack_dtype": "int32",
        **({"dynamic": dynamic} if dynamic else {}),
    }
    return WrittenConfig(values, "quantize_config.json")


def _zero_point_conventions(layers: Sequence[OutputLayer]) -> set[str]:
    """Return the conventions of zero points that layers need; none if both variants stored minus one fit.

    A layer with the evidence "alike" fits either variant of zero points stored minus one.
    """
    stored = [(layer.config.zeros, layer.config.evidence) for layer in layers]
    needed = {zeros.name for zeros, evidence in stored if evidence != "alike" or isinstance(zeros, Stored)}
    return {zeros.name for zeros, _ in stored} if needed == {Stored.name} else needed


def _awq_config(layers: Sequence[OutputLayer], plain: Sequence[str]) -> WrittenConfig:
    """Return the config of autoawq; it has one bit width and group size, and excludes by parts of names."""
    bits, group_size = _most_common_groups(layers)
    refused = _refuse_uncovered(layers, bits, group_size, "awq")
    for layer in layers:
        excluded = next((name for name in plain if name in layer.prefix), None)
        if excluded is not None:
            refused[layer.prefix] = (
                f"awq excludes modules by parts of names, and the plain layer {excluded} is part of this one"
            )
        if not layer.config.zero_point:
            refused[layer.prefix] = "it stores no zero points, and other layers do"
    values = {
        "quant_method": "awq",
        "bits": bits,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
        **_exclusions(plain),
    }
    return WrittenConfig(values, refused=refused)


def _marlin_config(layers: Sequence[OutputLayer], plain: Sequence[str]) -> WrittenConfig:
    """Return the config of gptqmodel for Marlin checkpoints; it has one bit width and group size."""
    bits, group_size = _most_common_groups(layers)
    dense = layers[0].weight_type is MarlinWeight
    values = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": True,
        "lm_head": any(_is_head(layer.prefix) for layer in layers),
        "checkpoint_format": "marlin" if dense else "marlin_24",
        **({"is_marlin_format": True} if dense else {}),
        **_exclusions(plain),
    }
    refused = _refuse_uncovered(layers, bits, group_size, "marlin")
    return WrittenConfig(values, "quantize_config.json", refused)


def _pack_quantized_config(layers: Sequence[OutputLayer], plain: Sequence[str]) -> WrittenConfig:
    """Return the config of compressed-tensors for integers, grouped by bits, group size and symmetry."""

    def key(layer: OutputLayer) -> tuple[int, int, bool]:
        return layer.config.bits, layer.config.group_size, layer.config.symmetric

    def entries(layer: OutputLayer) -> dict[str, Any]:
        bits, group_size, symmetric = key(layer)
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "strategy": "channel" if group_size == -1 else "group",
            "group_size": None if group_size == -1 else group_size,
            "actorder": None,
            "dynamic": False,
        }
        return {"weights": weights, "input_activations": None}

    refused = {layer.prefix: NO_ACT_ORDER for layer in layers if layer.config.act_order}
    groups = _groups_by(key, layers)
    largest = max(groups, key=len)
    ordered = [largest, *(group for group in groups if group is not largest)]
    values = _compressed_tensors_values("pack-quantized", ordered, entries, plain)
    return WrittenConfig(values, refused=refused)


def _float_quantized_config(layers: Sequence[OutputLayer], plain: Sequence[str]) -> WrittenConfig:
    """Return the config of compressed-tensors for FP8, grouped by the scales of weights and activations."""

    def key(layer: OutputLayer) -> Hashable:
        return layer.config.per, layer.config.block, layer.activations

    def entries(layer: OutputLayer) -> dict[str, Any]:
        return {
            "weights": fp8.weights_scheme(layer.config.per, layer.config.block),
            "input_activations": fp8.activations_scheme(layer.activations),
        }

    refused = {
        layer.prefix: "it is kept unchanged, and its config would need another dialect of fp8"
        for layer in layers
        if layer.item is None
    }
    ordered = sorted(_groups_by(key, layers), key=len, reverse=True)
    values = _compressed_tensors_values("float-quantized", ordered, entries, plain)
    return WrittenConfig(values, refused=refused)


def _float4_config(layers: Sequence[OutputLayer], plain: Sequence[str]) -> WrittenConfig:
    """Return the config of the program that the names of tensors belong to, for MXFP4 or NVFP4."""
    weight_type, config = layers[0].weight_type, layers[0].config
    section, model = SECTIONS[0], {}
    if weight_type is MLXFloatWeight:
        sizes = {"group_size": config.group_size, "bits": config.bits, "mode": config.mode}
        values, section = {**sizes, **dict.fromkeys(plain, False)}, MLX_SECTION
    elif weight_type is ModelOptNVFP4Weight:
        weights = {"num_bits": 4, "type": "float", "group_size": nvfp4.GROUP, "dynamic": False}
        values = {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
            "ignore": list(plain),
        }
    elif weight_type is CTMXFP4Weight and config.stored == float4.QUARK_TENSORS:
        scales = {"dtype": "fp4", "scale_format": "e8m0", "group_size": mx.GROUP}
        values = _quark_values(scales, {}, plain)
    elif weight_type is CTMXFP4Weight and config.stored == float4.DEEPSEEK_TENSORS:
        values, model = {**float4.DEEPSEEK_CONFIG, **_exclusions(plain)}, {float4.EXPERT_DTYPE: "fp4"}
    elif weight_type is MXFP4ExpertsWeight:
        values = {"quant_method": "mxfp4", **_exclusions(plain)}
    else:
        size, name = (mx.GROUP, "mxfp4") if weight_type is CTMXFP4Weight else (nvfp4.GROUP, "nvfp4")
        entries = {"weights": float4.weights_scheme(size), "input_activations": None}
        values = _compressed_tensors_values(f"{name}-pack-quantized", [layers], lambda _: entries, plain)
    reason = "it is kept unchanged, and its config would need another dialect of four-bit floats"
    refused = {layer.prefix: reason for layer in layers if layer.item is None}
    return WrittenConfig(values, refused=refused, section=section, model=model)


def _exclusions(plain: Sequence[str]) -> dict[str, list[str] | None]:
    """Return the entry of plain layers in a config of transformers."""
    return {"modules_to_not_convert": list(plain) or None}


def _quark_int4_config(layers: Sequence[OutputLayer], plain: Sequence[str]) -> WrittenConfig:
    """Return the config of Quark for uint4; layers with other groups than most have an entry."""

    def weight_of(layer: OutputLayer) -> dict[str, Any]:
        size = layer.K if layer.config.group_size == -1 else layer.config.group_size
        return {"dtype": "uint4", "group_size": size, "symmetric": False, "zero_point_type": "int32"}

    entries = {layer.prefix: weight_of(layer) for layer in layers}
    common = Counter(entry["group_size"] for entry in entries.values()).most_common(1)[0][0]
    most = next(entry for entry in entries.values() if entry["group_size"] == common)
    others = {name: entry for name, entry in entries.items() if entry != most}
    return WrittenConfig(_quark_values(most, others, plain))


def _quark_values(
    weight: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]], plain: Sequence[str]
) -> dict[str, Any]:
    """Return the config of Quark with a type of weights for all layers, and those of single layers."""

    def layer_config(entry: Mapping[str, Any]) -> dict[str, Any]:
        weights = {"qscheme": "per_group", "ch_axis": -1, "is_dynamic": False, "scale_type": "float", **entry}
        return {"weight": weights, "input_tensors": None, "output_tensors": None, "bias": None}

    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": layer_config(weight),
        "layer_quant_config": {name: layer_config(entry) for name, entry in others.items()},
        "layer_type_quant_config": {},
        "exclude": list(plain),
        "export": {"pack_method": "reorder", "weight_format": "real_quantized", "kv_cache_group": []},
    }


def _groups_by(
    key: Callable[[OutputLayer], Hashable], layers: Sequence[OutputLayer]
) -> list[list[OutputLayer]]:
    groups = defaultdict(list)
    for layer in layers:
        groups[key(layer)].append(layer)
    return list(groups.values())


def _compressed_tensors_values(
    packing: str,
    groups: Sequence[Sequence[OutputLayer]],
    entries: Callable[[OutputLayer], dict[str, Any]],
    plain: Sequence[str],
) -> dict[str, Any]:
    """Return the config with one config group for each of `groups`.

    The first group has the target "Linear", the others the names of their layers.
    """
    config_groups = {
        f"group_{n}": {
            "targets": [layer.prefix for layer in group] if n else ["Linear"],
            **entries(group[0]),
            "output_activations": None,
        }
        for n, group in enumerate(groups)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "version": CT_VERSION,
        "config_groups": config_groups,
        "ignore": list(plain),
        "kv_cache_scheme": None,
    }


def _most_common_groups(layers: Sequence[OutputLayer]) -> tuple[int, int]:
    """Return the most common bits and group size; size -1 only if no layer has several groups."""
    grouped = [layer for layer in layers if layer.config.group_size != -1] or list(layers)
    counts = Counter((layer.config.bits, layer.config.group_size) for layer in grouped)
    return counts.most_common(1)[0][0]


def _is_covered(layer: OutputLayer, bits: int, group_size: int) -> bool:
    """Return whether a config with these bits and groups describes the layer."""
    layer_size = layer.config.group_size
    same = layer_size == group_size or (layer_size == -1 and group_size >= layer.K)
    return layer.config.bits == bits and same


def _refuse_uncovered(layers: Sequence[OutputLayer], bits: int, group_size: int, name: str) -> dict[str, str]:
    expected = f"the config of {name} has {bits} bits and groups of {group_size} for all layers"
    return {
        layer.prefix: f"{expected}, this one {layer.config.bits} bits and groups of {layer.config.group_size}"
        for layer in layers
        if not _is_covered(layer, bits, group_size)
    }


def _refuse_all(layers: Sequence[OutputLayer], reason: str) -> WrittenConfig:
    return WrittenConfig({}, refused={layer.prefix: reason for layer in layers})


def _is_head(prefix: str) -> bool:
    return prefix.rpartition(".")[2] == HEAD


CONFIG_WRITERS: Mapping[type[Weight], Callable[[Sequence[OutputLayer], Sequence[str]], WrittenConfig]] = {
    GPTQWeight: _gptq_config,
    AWQWeight: _awq_config,
    MarlinWeight: _marlin_config,
    Marlin24Weight: _marlin_config,
    CTPackWeight: _pack_quantized_config,
    QuarkInt4Weight: _quark_int4_config,
    CTMXFP4Weight: _float4_config,
    CTNVFP4Weight: _float4_config,
    ModelOptNVFP4Weight: _float4_config,
    MLXFloatWeight: _float4_config,
    MXFP4ExpertsWeight: _float4_config,
    Fp8Weight: _float_quantized_config,
}
