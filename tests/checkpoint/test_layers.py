"""What is listed of a layer is what loading it gives, and no weight is read for it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from qload import LayerInfo, layers
from qload.checkpoint import open_checkpoint
from qload.detect import loader_from_config
from qload.errors import ArgumentError, ConfigError, MissingTensorError, StorageError, UnsupportedFormatError
from qload.formats import FORMATS
from qload.loader import Part, Split, TensorSource, WeightsLoader
from qload.quantize import Fp8Quantizer, QuantizingLoader
from qload.quantize.policy import mlp_only
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import layers as drawn_layers
from qload.verify import inspect
from qload.weights import Weights
from tests.example_counts import at_most
from tests.format_cases import CONFIGS, every_format
from tests.paths import FIXTURES
from tests.verify.checkpoints import GPTQ, gptq, model, plain
from tests.verify.test_large import calls, growth, is_linear

REFUSED = {"refused", "quantized_33x65"}
FOLDERS = sorted(
    config.parent
    for config in FIXTURES.glob("*/*/config.json")
    if REFUSED.isdisjoint(config.relative_to(FIXTURES).parts)
)


class Counting(MemoryStorage):
    """Which tensors were read."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.seen: set[str] = set()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        self.seen.add(name)
        return super().read(name, index)


def folder_name(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


@every_format
@at_most(10)
@given(data=st.data())
def test_a_layer_of_every_format_is_listed_and_no_weight_is_read(
    weight_type: type[Weight], data: Any
) -> None:
    stored = data.draw(drawn_layers(weight_type, CONFIGS[weight_type]))
    storage = Counting(stored.named())
    weights = Weights(storage, loader=stored.loader())

    (layer,) = layers(weights)

    facts = [name for spec in weight_type.tensors(stored.config) if spec.fact for name in spec.suffixes]
    small = {name for name in stored.named() if name.endswith((*facts, "qzeros"))}
    assert storage.seen <= small
    assert not weights.report().used
    loaded = weights.get_weights("layer")
    assert (layer.prefix, layer.format, layer.error) == ("layer", weight_type.format, None)
    assert (layer.shape, layer.config) == ((stored.N, stored.K), loaded.config)
    assert sorted(layer.tensors) == sorted(weights.report().used)
    assert layer.bytes == sum(tensor.nbytes for tensor in stored.tensors.values())


def test_there_is_a_fixture_of_every_format() -> None:
    assert len(FOLDERS) > 50
    listed = {layer.format for folder in FOLDERS for layer in layers(folder)}

    without_config = {"gguf", "comfy_w4a8", "comfy_awq"}
    assert listed == {weight_type.format for weight_type in FORMATS} - without_config


@pytest.mark.parametrize("folder", FOLDERS, ids=folder_name)
def test_what_is_listed_of_a_folder_is_what_loading_gives(folder: Path) -> None:
    listed = layers(folder)

    assert listed
    assert list(inspect(folder).layers) == listed
    with open_checkpoint(folder) as weights:
        for layer in listed:
            loaded = weights.get_weights(layer.prefix)
            assert (layer.format, layer.config) == (loaded.format, loaded.config)
            assert layer.shape == tuple(loaded.shape[-len(layer.shape) :])
            assert layer.target is None
        assert sorted(weights.report().used) == sorted(name for layer in listed for name in layer.tensors)


@pytest.mark.parametrize("target", ["auto", "marlin", "exllama"])
@pytest.mark.parametrize(
    "folder", ["gptq/model_g32_desc_act", "awq/model_gemm_g64", "compressed_tensors/pack_w4_g128"]
)
def test_a_loader_that_repacks_lists_what_is_stored_and_what_becomes_of_it(folder: str, target: Any) -> None:
    path = FIXTURES / folder
    with open_checkpoint(path, target=target) as weights:
        listed = layers(weights)
        made = {layer.prefix: weights.get_weights(layer.prefix).format for layer in listed}

    assert [(layer.prefix, layer.format) for layer in listed] == [
        (layer.prefix, layer.format) for layer in layers(path)
    ]
    assert {layer.prefix: layer.target or layer.format for layer in listed} == made
    assert any(layer.target for layer in listed)


@pytest.mark.parametrize(("folder", "target"), [("eetq/128x64", "auto"), ("fp8/block_132x32", "auto")])
def test_what_no_kernel_order_holds_has_no_target(folder: str, target: Any) -> None:
    with open_checkpoint(FIXTURES / folder, target=target) as weights:
        (layer,) = layers(weights)

        assert layer.target is None
        assert weights.get_weights(layer.prefix).format == layer.format


def test_a_loader_that_quantizes_says_what_it_makes_and_what_it_leaves() -> None:
    tensors = {**plain("a.up_proj.weight", "b.o_proj.weight"), "norm.weight": torch.ones(4)}
    loader = QuantizingLoader(loader_from_config(None), Fp8Quantizer(), policy=mlp_only())
    weights = Weights(MemoryStorage(tensors), loader=loader)

    listed = {layer.prefix: layer for layer in layers(weights)}

    assert {prefix: layer.target for prefix, layer in listed.items()} == {
        "a.up_proj": "fp8", "b.o_proj": None, "norm": None,
    }  # fmt: skip
    assert {layer.format for layer in listed.values()} == {"unquantized"}
    assert listed["a.up_proj"].excluded is None
    assert "policy" in (listed["b.o_proj"].excluded or "")


def test_one_broken_layer_among_many_is_listed_with_its_error(tmp_path: Path) -> None:
    tensors = {**gptq("a"), **gptq("b"), **gptq("c")}
    del tensors["b.scales"]

    a, b, c = layers(model(tmp_path, tensors, quantization_config=GPTQ))

    assert (a.error, c.error) == (None, None)
    assert isinstance(b.error, MissingTensorError)
    assert b.error.tensor == "b.scales"
    assert (b.prefix, b.format, b.config, b.shape) == ("b", None, None, ())
    assert sorted(b.tensors) == ["b.g_idx", "b.qweight", "b.qzeros"]
    assert b.bytes == sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("b."))


@pytest.mark.usefixtures("seen_texts")
def test_what_cannot_be_opened_is_the_error_of_opening(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        layers(tmp_path / "nowhere")
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    for config, error in (
        ({"quant_method": "gptq", "bits": 5}, ConfigError),
        ({"quant_method": "unheard of"}, UnsupportedFormatError),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        with pytest.raises(error):
            layers(tmp_path)


def test_weights_that_are_given_stay_open(tmp_path: Path) -> None:
    with open_checkpoint(model(tmp_path, plain("a.weight"))) as weights:
        (layer,) = layers(weights)

        assert weights.get_weights(layer.prefix).shape == layer.shape


class Silent(WeightsLoader):
    """A loader of somebody's own that only loads."""

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        raise AssertionError("listing loads nothing")

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        return 4, 4


def test_a_loader_that_describes_nothing_says_so() -> None:
    (layer,) = layers(Weights(MemoryStorage(plain("a.weight")), loader=Silent()))

    assert isinstance(layer.error, ArgumentError)
    assert "one with describe(), to list a\n  got      Silent" in str(layer.error)


def excluded(tmp_path: Path, **config: Any) -> dict[str, str | None]:
    tensors = {**gptq("model.layers.0.up_proj"), **plain("lm_head.weight"), "norm.weight": torch.ones(4)}
    folder = model(tmp_path, tensors, quantization_config={**GPTQ, **config})
    return {layer.prefix: layer.excluded for layer in layers(folder)}


def test_why_a_layer_is_plain_is_told_by_the_entry_that_leaves_it_out(tmp_path: Path) -> None:
    nothing = dict.fromkeys(["model.layers.0.up_proj", "lm_head", "norm"])

    assert excluded(tmp_path) == nothing
    assert excluded(tmp_path, modules_to_not_convert=["lm_head"]) == {
        **nothing, "lm_head": "modules_to_not_convert has 'lm_head'",
    }  # fmt: skip
    assert excluded(tmp_path, dynamic={"-:lm_.*": {}}) == {**nothing, "lm_head": "dynamic has 're:lm_.*'"}


def test_a_layer_that_no_target_means_says_so() -> None:
    group = {"targets": ["re:.*up_proj"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    config = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": group},
    }  # fmt: skip
    weights = Weights(MemoryStorage(plain("down_proj.weight")), loader=loader_from_config(config))

    (layer,) = layers(weights)

    assert layer.excluded == "no entry of config_groups.a.targets means it"


def test_listing_grows_in_proportion_to_the_tensors() -> None:
    def listed(count: int) -> int:
        tensors = {name: held for at in range(count) for name, held in gptq(f"layers.{at}.up").items()}
        weights = Weights(MemoryStorage(tensors), loader=loader_from_config(GPTQ))
        return calls(lambda: layers(weights))

    assert is_linear(growth(listed, 30))


def test_a_plain_layer_is_plain(tmp_path: Path) -> None:
    folder = model(tmp_path, {**gptq("a"), **plain("b.weight")}, quantization_config=GPTQ)

    listed: list[LayerInfo] = layers(folder)

    assert [layer.plain for layer in listed] == [False, True]
