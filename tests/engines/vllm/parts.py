"""Layers that vLLM merges and whose parts are not stored alike: right, or refused by name. `nox -s vllm`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from tests.engines.vllm.checkpoints import answers, changed, refused, same
from tests.models.with_transformers.stored import FORMATS, GROUP, compressed, scales, words

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM and torch import

LAYER = "model.layers.0"
KEYS, UP = f"{LAYER}.self_attn.k_proj", f"{LAYER}.mlp.up_proj"
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def gptq8(N: int, K: int, generator: Generator) -> Mapping[str, Tensor]:
    """GPTQ of 8 bits."""
    return {
        **FORMATS["gptq"].layer(N, K, generator),
        "qweight": words((K // 4, N), generator),
        "qzeros": words((K // GROUP, N // 4), generator),
        "scales": scales((K // GROUP, N), K, 73, generator, torch.float16),
    }


def groups(name: str) -> dict[str, Any]:
    """Two groups, the second of one layer of 8 bits."""
    section = compressed("mixed-precision", INT4)
    section["config_groups"]["group_0"]["format"] = "pack-quantized"
    section["config_groups"]["group_1"] = {
        "targets": [name],
        "weights": INT8,
        "input_activations": None,
        "format": "int-quantized",
    }
    return section


Layers = Mapping[str, Callable[[int, int, Generator], Mapping[str, Tensor]] | None]
SAID: list[tuple[str, str, Layers, dict[str, Any]]] = [
    ("one part is left out", "awq", {KEYS: None}, {"modules_to_not_convert": [KEYS]}),
    ("one part is skipped", "nf4", {UP: None}, {"llm_int8_skip_modules": [UP]}),
    ("one part has 8 bits", "gptq", {KEYS: gptq8}, {"dynamic": {r"+:.*\.0\..*k_proj": {"bits": 8}}}),
    ("one part has a group of its own", "w4a16", {UP: FORMATS["w8a8"].layer}, groups(UP)),
]
UNSAID: list[tuple[str, str, Layers]] = [
    ("gptq", "plain", {KEYS: None}),
    ("awq", "plain", {UP: None}),
    ("nf4", "plain", {KEYS: None, UP: None}),
    ("fp8 block", "plain", {KEYS: None}),
]
WHOLE: list[tuple[str, Layers, dict[str, Any]]] = [
    (
        "awq",
        {f"{LAYER}.self_attn.{part}_proj": None for part in "qkvo"},
        {"modules_to_not_convert": [f"{LAYER}.self_attn"]},
    ),
    (
        "gptq",
        {f"{LAYER}.mlp.{part}_proj": gptq8 for part in ("gate", "up")},
        {"dynamic": {r"+:.*\.0\.mlp\.(gate|up)_proj": {"bits": 8}}},
    ),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("name", "layers", "section"), [each[1:] for each in SAID], ids=[each[0] for each in SAID]
)
def test_parts_of_which_the_config_says_different_things_are_refused_by_the_layers_name(
    name: str, layers: Layers, section: dict[str, Any], world: int, tmp_path: Path
) -> None:
    folder, _ = changed("llama", name, tmp_path, layers, section)
    merged = f"{LAYER}.self_attn.qkv_proj" if KEYS in layers else f"{LAYER}.mlp.gate_up_proj"

    assert merged in refused(world, folder, "MismatchError")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "kind", "layers"), UNSAID)
def test_parts_of_which_the_tensors_alone_say_that_they_differ_are_multiplied_each(
    name: str, kind: str, layers: Layers, world: int, tmp_path: Path
) -> None:
    folder, want = changed("llama", name, tmp_path, layers)

    assert same(answers(world, folder), want)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "layers", "section"), WHOLE, ids=["left out", "of 8 bits"])
def test_whole_merged_layers_may_be_stored_otherwise(
    name: str, layers: Layers, section: dict[str, Any], world: int, tmp_path: Path
) -> None:
    folder, want = changed("llama", name, tmp_path, layers, section)

    assert same(answers(world, folder), want)
