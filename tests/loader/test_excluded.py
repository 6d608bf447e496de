"""What a config leaves out has to be plain: the tensors decide, and a disagreement is an error."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from qload.detect import loader_from_config
from qload.errors import ArgumentError, ExcludedModuleError
from qload.formats import GPTQConfig, GPTQWeight, UnquantizedWeight
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.usefixtures("seen_texts")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}


def layers(*excluded: str, rank: Any = None) -> Weights:
    tensors = {f"layers.0.mlp.gate_proj.{n}": t for n, t in Case().weight().fields().items()}
    tensors["layers.0.mlp.gate.weight"] = torch.ones(8, 16)
    config = {**GPTQ, "modules_to_not_convert": list(excluded)}
    return Weights(MemoryStorage(tensors), loader=loader_from_config(config), process_group=rank)


def test_a_name_is_never_compared_by_its_beginning() -> None:
    weights = layers("mlp.gate")

    assert isinstance(weights.get_weights("layers.0.mlp.gate"), UnquantizedWeight)
    assert isinstance(weights.get_weights("layers.0.mlp.gate_proj"), GPTQWeight)


@pytest.mark.parametrize("entry", ["mlp.gate_proj", "layers.0", "model.layers.0.mlp.gate_proj"])
def test_a_layer_that_is_left_out_and_quantized_is_refused_by_every_rank_alike(entry: str) -> None:
    texts = set()
    for rank in FakeWorld(2):
        weights = layers(entry, rank=rank)
        with pytest.raises(ExcludedModuleError) as caught:
            weights.get_weights_col("layers.0.mlp.gate_proj")
        texts.add(str(caught.value))
        assert not weights.report().used

    assert texts == {
        "layers.0.mlp.gate_proj: left out by the config, and quantized\n"
        f"  expected plain tensors, as modules_to_not_convert has {entry!r}\n"
        "  got      gptq: qweight, qzeros, scales, g_idx\n"
        "  remedy   take the entry out of modules_to_not_convert, or store the layer plain"
    }


def test_a_changed_config_keeps_what_the_loader_knows() -> None:
    loader = loader_from_config({**GPTQ, "modules_to_not_convert": ["lm_head"]})

    assert loader.with_config(bits=8).exclusions == loader.exclusions


def test_what_is_no_setting_of_a_format_is_refused_with_those_that_are() -> None:
    loader = loader_from_config(GPTQ)

    with pytest.raises(ArgumentError, match=r"settings of gptq: bits, group_size, .*\n.* nonsense"):
        loader.with_config(nonsense=1)
    settings = {one.name: getattr(loader.formats[0].config, one.name) for one in fields(GPTQConfig)}
    assert loader.with_config(**settings).formats == loader.formats
