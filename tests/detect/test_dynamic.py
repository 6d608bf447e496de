"""GPTQ's `dynamic`: settings of single modules, and excluded modules."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.configs import FoundConfig
from qload.detect import loader_from_config
from qload.detect.config_reader import pattern_entries
from qload.errors import ConfigError, ExcludedModuleError, MismatchError, ShapeError
from qload.formats import GPTQConfig, GPTQWeight, UnquantizedWeight
from qload.layouts import Stored
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.usefixtures("seen_texts")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
PLAIN = {"weight": torch.ones(64, 128)}


def quantized(bits: int, group_size: int = 32) -> dict[str, Tensor]:
    return Case(bits=bits, group=group_size, K=128).weight().fields()


LAYERS = {
    "layers.0.up_proj": quantized(4),
    "layers.0.down_proj": quantized(8),
    "layers.1.up_proj": quantized(4, 64),
    "layers.1.down_proj": PLAIN,
}


def load(
    dynamic: dict[str, Any], rank: Any = None, names: Mapping[str, str] = MappingProxyType({})
) -> Weights:
    """Load the layers; `names` replaces the names of layers."""
    layers = {names.get(prefix, prefix): layer for prefix, layer in LAYERS.items()}
    tensors = {f"{prefix}.{name}": t for prefix, layer in layers.items() for name, t in layer.items()}
    loader = loader_from_config({**GPTQ, "dynamic": dynamic})
    return Weights(MemoryStorage(tensors), loader=loader, process_group=rank)


RULES = {
    r"-:.*1\.down": {},
    r"+:.*down": {"bits": 8},
    r"layers\.1": {"group_size": 64, "damp_percent": 0.1},
}


def test_the_first_rule_that_matches_a_module_has_its_say() -> None:
    weights = load(RULES)

    kinds = {prefix: weights.get_weights(prefix) for prefix in LAYERS}
    assert isinstance(kinds["layers.1.down_proj"], UnquantizedWeight)
    settings = {prefix: w.config for prefix, w in kinds.items() if isinstance(w, GPTQWeight)}
    assert {prefix: (c.bits, c.group_size, c.zeros) for prefix, c in settings.items()} == {
        "layers.0.up_proj": (4, 32, Stored()),
        "layers.0.down_proj": (8, 32, Stored()),
        "layers.1.up_proj": (4, 64, Stored()),
    }


def test_of_two_rules_for_a_module_the_later_one_is_not_asked() -> None:
    both = {"+:.*up": {"group_size": 32}, r"+:layers\.0\.up": {"group_size": 64}}

    assert load(both).get_weights("layers.0.up_proj").config.group_size == 32
    with pytest.raises(ShapeError, match="group size of 64"):
        load(dict(reversed(both.items()))).get_weights("layers.0.up_proj")


def test_a_pattern_is_matched_from_the_start_and_not_to_the_end() -> None:
    with pytest.raises(ShapeError):  # groups of 64 counted as of 32: no rule applies to the layer
        load({"up": {"group_size": 64}}).get_weights("layers.1.up_proj")

    assert load({"layers.1.up": {"group_size": 64}}).get_weights("layers.1.up_proj").config.group_size == 64


def test_bits_that_no_rule_says_are_told_by_the_shapes_and_noted() -> None:
    weights = load({"down": {"bits": 8}})

    assert weights.get_weights("layers.0.down_proj").config.bits == 8
    assert_same_bits(
        weights.get_weights("layers.0.down_proj").dequantize(),
        load({"layers.0.down": {"bits": 8}}).get_weights("layers.0.down_proj").dequantize(),
    )
    assert weights.report().notes == (
        *["layers.0.down_proj: bits is 4, the shapes are of 8 bits and are believed"] * 2,
    )


def test_a_layer_that_a_rule_leaves_out_and_that_is_quantized_is_refused_by_every_rank_alike() -> None:
    texts = set()
    for rank in FakeWorld(2):
        with pytest.raises(ExcludedModuleError, match=r"as dynamic has 're:\.\*up'") as caught:
            load({"-:.*up": {}}, rank).get_weights_col("layers.0.up_proj")
        texts.add(str(caught.value))

    assert len(texts) == 1


def test_parts_of_different_rules_are_not_fused() -> None:
    with pytest.raises(MismatchError, match="differ in config"):
        load(RULES).get_multi_weights_col(["layers.0.up_proj", "layers.0.down_proj"])


@pytest.mark.parametrize(
    ("rules", "key"),
    [
        pytest.param({"+:x": {"bits": 5}}, r"dynamic\.\+:x\.bits", id="bits that GPTQ has not"),
        pytest.param({"+:x": {"bits": True}}, r"dynamic\.\+:x\.bits", id="a truth value as bits"),
        pytest.param({"+:x": {"group_size": 0}}, "group_size", id="groups of nothing"),
    ],
)
def test_a_rule_that_cannot_be_is_named(rules: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        loader_from_config({**GPTQ, "dynamic": rules})


def test_a_pattern_that_looks_ahead_is_read() -> None:
    rules = {r"-:(?!.*(up|0\.down)).*": {}, r".*0\.down": {"bits": 8}, r"layers\.1": {"group_size": 64}}

    weights = load(rules)

    assert isinstance(weights.get_weights("layers.1.down_proj"), UnquantizedWeight)
    assert [weights.get_weights(f"layers.{name}").config.bits for name in ("0.up_proj", "0.down_proj")] == [
        4,
        8,
    ]


@pytest.mark.parametrize(("pattern", "why"), [("(", "missing"), ("(.|.)*x$|(.|.)*y$", "takes too long")])
def test_a_pattern_that_cannot_be_judged_costs_its_own_layers_an_error(pattern: str, why: str) -> None:
    """Exclude layers of an earlier rule, and plain layers."""
    weights = load({r".*0\.up": {}, pattern: {"bits": 2}}, names={"layers.1.up_proj": "z" * 90})

    assert weights.get_weights("layers.0.up_proj").config.bits == 4
    assert isinstance(weights.get_weights("layers.1.down_proj"), UnquantizedWeight)
    with pytest.raises(ConfigError, match=why):
        weights.get_weights("z" * 90)


def test_no_rule_changes_what_the_others_get() -> None:
    assert loader_from_config({**GPTQ, "dynamic": RULES}).formats[0].config == GPTQConfig(4, 32, Stored())


def test_only_patterns_that_quantize_are_entries() -> None:
    """A module may have a hostile name that is also a pattern."""
    rules = {"-:a": {}, "+:b": {"bits": 8}, "c": {}, "-:d.*": {}}
    found = list(pattern_entries(FoundConfig("config.json", "quantization_config", {"dynamic": rules})))

    assert [(entry.key, entry.text) for entry in found] == [("dynamic", "+:b"), ("dynamic", "c")]
    names = ("a", "b", "c", "d", "-:a", "+:b")
    assert [[name for name in names if entry.means(name)] for entry in found] == [["b"], ["c"]]
