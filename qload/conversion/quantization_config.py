"""The `quantization_config` of converted layers, in the schema of each format's owner."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qload.conversion import fp8
from qload.conversion.targets import StoredLayer
from qload.formats import AWQWeight, CTPackWeight, Fp8Weight, GPTQWeight, Marlin24Weight, MarlinWeight
from qload.layouts import Stored
from qload.spec import Weight

HEAD = "lm_head"
CT_VERSION = "0.18.0"  # from which on codes of 3 bits are packed as they are here
NO_ACT_ORDER = "compressed-tensors from 0.20 on opens no layer in act order; gptq_v2 says it"


@dataclass(frozen=True)
class WrittenConfig:
    """A `quantization_config`, the file of its owner that says it once more, and for whom it cannot speak.

    `values` None: nothing is quantized. `refused`: the reason, by the prefixes of layers.
    """

    values: Mapping[str, Any] | None
    side_file: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


def section(layers: Sequence[StoredLayer], plain: Sequence[str]) -> WrittenConfig:
    """Of quantized layers, and of the matrices that stay `plain`."""
    types = Counter(layer.weight_type for layer in layers)
    if not types:
        return WrittenConfig(None)
    (first, _), *others = types.most_common()
    if others or first not in SECTIONS:
        names = ", ".join(sorted(each.format for each in types))
        return _nobody(layers, f"no quantization_config that is written here is of {names}")
    return SECTIONS[first](layers, plain)


def _gptq(layers: Sequence[StoredLayer], plain: Sequence[str]) -> WrittenConfig:
    """As gptqmodel writes it: what differs from most layers, and what is left out, is in `dynamic`."""
    bits, size = _usual(layers)
    conventions = _conventions(layers)
    if len(conventions) > 1:
        return _nobody(layers, f"zero points are in two conventions: {', '.join(sorted(conventions))}")
    dynamic: dict[str, dict[str, int]] = {
        f"-:^{re.escape(name)}$": {} for name in plain if not _is_head(name)
    }
    for layer in layers:
        if not _covered(layer, bits, size):
            own = {"bits": layer.config.bits, "group_size": layer.config.group_size}
            dynamic[f"+:^{re.escape(layer.prefix)}$"] = own
    values = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": any(layer.act_order for layer in layers),
        "sym": all(layer.symmetric for layer in layers),
        "lm_head": any(_is_head(layer.prefix) for layer in layers),
        "checkpoint_format": "gptq_v2" if conventions == {Stored.name} else "gptq",
        "pack_dtype": "int32",
        **({"dynamic": dynamic} if dynamic else {}),
    }
    return WrittenConfig(values, "quantize_config.json")


def _conventions(layers: Sequence[StoredLayer]) -> set[str]:
    """Conventions of zero points that the layers need; zero points minus one may fit several."""
    told = [(layer.config.zeros, layer.config.evidence) for layer in layers]
    needed = {zeros.name for zeros, evidence in told if evidence != "alike" or isinstance(zeros, Stored)}
    return needed if needed - {Stored.name} else {zeros.name for zeros, _ in told}


def _awq(layers: Sequence[StoredLayer], plain: Sequence[str]) -> WrittenConfig:
    """As autoawq writes it: one number of bits and one group size for all, parts of names for what is not."""
    bits, size = _usual(layers)
    refused = _uncovered(layers, bits, size, "awq")
    for layer in layers:
        inside = next((name for name in plain if name in layer.prefix), None)
        if inside is not None:
            refused[layer.prefix] = (
                f"awq leaves out by parts of names, and {inside}, which stays plain, is one"
            )
        if not layer.config.zero_point:
            refused[layer.prefix] = "zero points are not stored, and of other layers are"
    values = {
        "quant_method": "awq",
        "bits": bits,
        "group_size": size,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": list(plain) or None,
    }
    return WrittenConfig(values, refused=refused)


def _marlin(layers: Sequence[StoredLayer], plain: Sequence[str]) -> WrittenConfig:
    """As gptqmodel wrote it: one number of bits and one group size for all."""
    bits, size = _usual(layers)
    dense = layers[0].weight_type is MarlinWeight
    values = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": False,
        "sym": True,
        "lm_head": any(_is_head(layer.prefix) for layer in layers),
        "checkpoint_format": "marlin" if dense else "marlin_24",
        **({"is_marlin_format": True} if dense else {}),
        "modules_to_not_convert": list(plain) or None,
    }
    return WrittenConfig(values, "quantize_config.json", _uncovered(layers, bits, size, "marlin"))


def _compressed_tensors(layers: Sequence[StoredLayer], plain: Sequence[str]) -> WrittenConfig:
    """A group of modules for each kind of layer: all of the most usual one, the others by their names."""
    kinds: dict[tuple[int, int, bool], list[str]] = {}
    refused = {layer.prefix: NO_ACT_ORDER for layer in layers if layer.config.act_order}
    for layer in layers:
        kind = layer.config.bits, layer.config.group_size, layer.config.symmetric
        kinds.setdefault(kind, []).append(layer.prefix)
    usual = max(kinds, key=lambda kind: len(kinds[kind]))
    groups = {}
    for at, kind in enumerate([usual, *(kind for kind in kinds if kind != usual)]):
        targets = ["Linear"] if kind == usual else kinds[kind]
        groups[f"group_{at}"] = {
            "targets": targets,
            "weights": _scheme(*kind),
            "input_activations": None,
            "output_activations": None,
        }
    return WrittenConfig(_of_groups("pack-quantized", groups, plain), refused=refused)


def _float_quantized(layers: Sequence[StoredLayer], plain: Sequence[str]) -> WrittenConfig:
    """As compressed-tensors writes FP8: a group of modules for each kind of scales, of weights and inputs."""
    kinds: dict[tuple[object, ...], list[StoredLayer]] = {}
    refused = {
        layer.prefix: "it is kept as it is, and its config would say another dialect of fp8"
        for layer in layers
        if layer.item is None
    }
    for layer in layers:
        kinds.setdefault((layer.config.per, layer.config.block, layer.inputs), []).append(layer)
    ordered = sorted(kinds.values(), key=len, reverse=True)
    groups = {
        f"group_{at}": {
            "targets": [layer.prefix for layer in alike] if at else ["Linear"],
            "weights": fp8.scheme_of_weights(alike[0].config.per, alike[0].config.block),
            "input_activations": fp8.scheme_of_inputs(alike[0].inputs),
            "output_activations": None,
        }
        for at, alike in enumerate(ordered)
    }
    return WrittenConfig(_of_groups("float-quantized", groups, plain), refused=refused)


def _of_groups(packing: str, groups: Mapping[str, object], plain: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "version": CT_VERSION,
        "config_groups": groups,
        "ignore": list(plain),
        "kv_cache_scheme": None,
    }


def _scheme(bits: int, size: int, symmetric: bool) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if size == -1 else "group",
        "group_size": None if size == -1 else size,
        "actorder": None,
        "dynamic": False,
    }


def _usual(layers: Sequence[StoredLayer]) -> tuple[int, int]:
    """Bits and group size of most layers; one group of all inputs only where no layer has several."""
    several = [layer for layer in layers if layer.config.group_size != -1] or list(layers)
    counts = Counter((layer.config.bits, layer.config.group_size) for layer in several)
    return counts.most_common(1)[0][0]


def _covered(layer: StoredLayer, bits: int, size: int) -> bool:
    """Whether a config of these bits and groups means this layer too."""
    own = layer.config.group_size
    same = own == size or (own == -1 and size >= layer.K)
    return layer.config.bits == bits and same


def _uncovered(layers: Sequence[StoredLayer], bits: int, size: int, name: str) -> dict[str, str]:
    said = f"{name}'s config says {bits} bits and groups of {size} of all layers"
    return {
        layer.prefix: f"{said}; this one has {layer.config.bits} bits and groups of {layer.config.group_size}"
        for layer in layers
        if not _covered(layer, bits, size)
    }


def _nobody(layers: Sequence[StoredLayer], why: str) -> WrittenConfig:
    return WrittenConfig({}, refused={layer.prefix: why for layer in layers})


def _is_head(prefix: str) -> bool:
    return prefix.rpartition(".")[2] == HEAD


SECTIONS: Mapping[type[Weight], Callable[[Sequence[StoredLayer], Sequence[str]], WrittenConfig]] = {
    GPTQWeight: _gptq,
    AWQWeight: _awq,
    MarlinWeight: _marlin,
    Marlin24Weight: _marlin,
    CTPackWeight: _compressed_tensors,
    Fp8Weight: _float_quantized,
}
