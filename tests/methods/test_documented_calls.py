"""The calls that vLLM's and pymllm's documentation shows, on checkpoints of every format that engines name.

    config = get_quantization_config(name).from_config(quantization_config)
    method = config.get_quant_method(layer, prefix)
    method.create_weights(layer, K, outputs, K, N, dtype, weight_loader=...)
    param.weight_loader(param, tensor[, shard_id])
    method.process_weights_after_loading(layer)
    y = method.apply(layer, x, bias)

What a layer then holds is, bit for bit, what `open_checkpoint` reads of the same files for the same rank.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload.checkpoint import open_checkpoint
from qload.errors import ArgumentError, QloadError
from qload.kernels.dtypes import for_activations
from qload.loader import Heads, Split
from qload.methods import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    TypedLinearMethod,
    get_quantization_config,
)
from qload.parallel import ALONE, FakeWorld, Rank
from qload.spec import Weight
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.paths import FIXTURES
from tests.support.owners import prefix_of

# Under which name an engine asks for the checkpoint in which folder.
CASES = [
    ("gptq", "gptq/b4_g64_sym_noact_v1"),
    ("gptq", "gptq/b2_g128_asym_act_v1"),
    ("gptq", "gptq/b3_g32_asym_noact_v1"),
    ("gptq", "gptq/b8_g128_sym_act_v2"),
    ("gptq", "gptq/b4_g-1_sym_noact_v1"),
    ("gptq_marlin", "gptq/b4_g32_asym_noact_v1"),
    ("awq", "awq/g128_256x512"),
    ("awq", "awq/g32_256x96"),
    ("fp8", "fp8/block_132x32"),
    ("fp8", "fp8/tensor_scalar_16x64"),
    ("fp8", "activations/fp8_tensor_static"),
    ("compressed-tensors", "compressed_tensors/pack_w4_g128_act_order"),
    ("compressed-tensors", "compressed_tensors/pack_w4_g32_asym"),
    ("compressed-tensors", "compressed_tensors/pack_w6_g128_by_words"),
    ("compressed-tensors", "compressed_tensors/int_w8_channel"),
    ("compressed-tensors", "compressed_tensors/float_channel"),
    ("compressed-tensors", "compressed_tensors/marlin_24_w4_g128"),
    ("compressed-tensors", "compressed_tensors/nvfp4"),
    ("bitsandbytes", "bnb/nf4_nested_bf16_storage_128x256"),
    ("bitsandbytes", "bnb/int8_16x128"),
    ("eetq", "eetq/128x64"),
    ("exl2", "exl2/b6_g128_256x32"),
    ("marlin", "marlin/g128_256x128"),
    ("modelopt", "modelopt/nvfp4"),
    ("modelopt", "modelopt/fp8_tensor_16x64"),
    ("modelopt", "modelopt/w4a16_awq_g128_24x256"),
    ("mxfp4", "compressed_tensors/mxfp4"),
]
every_format = pytest.mark.parametrize(("name", "folder"), CASES, ids=lambda value: value.replace("/", "-"))
worlds = pytest.mark.parametrize("world", [1, 2], ids="{} ranks".format)
DTYPE = torch.float16
MODEL = FIXTURES / "gptq" / "model_g32_desc_act"
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


def config_of(name: str, folder: Path) -> Any:
    """As an engine reads it, from the JSON beside the files; MXFP4 says nothing more."""
    said = json.loads((folder / "config.json").read_text())
    values = said.get("quantization_config") or said.get("compression_config")
    config = get_quantization_config(name).from_config({} if name == "mxfp4" else values)
    config.activations = "unquantized"  # of which these layers are too small for some
    return config


def tensors_of(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """What the files have of a layer but for its bias, by suffix."""
    own = [key for key in sorted(weights.storage.keys()) if key.startswith(f"{prefix}.")]
    return {
        key.removeprefix(f"{prefix}."): weights.storage.read(key) for key in own if not key.endswith(".bias")
    }


def hand_over(layer: nn.Module, tensors: Mapping[str, Tensor], *shard: int | str) -> None:
    for suffix, tensor in tensors.items():
        param = getattr(layer, suffix.replace(".", "_"))
        param.weight_loader(param, tensor, *shard)


def layer_of(kind: Any, config: Any, prefix: str, rank: Rank, *sizes: Any, bias: bool = False) -> Any:
    layer = kind(
        *sizes, bias=bias, params_dtype=DTYPE, quant_config=config, prefix=prefix, process_group=rank
    )
    assert type(layer.quant_method) is TypedLinearMethod
    return layer


def loaded(kind: Any, config: Any, prefix: str, rank: Rank, tensors: dict[str, Tensor], sizes: Any) -> Any:
    """A layer of one part, from the first call to the last."""
    layer = layer_of(kind, config, prefix, rank, *sizes)
    hand_over(layer, tensors)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def assert_same(layer: nn.Module, expected: Weight, bias: Tensor | None = None) -> None:
    """The layer holds this weight, and multiplies as it does."""
    held: Weight = layer.typed_linear.typed
    expected = for_activations(expected, DTYPE)
    assert (type(held), held.config) == (type(expected), expected.config)
    assert (held.layer.parts, held.layer.K) == (expected.layer.parts, expected.layer.K)
    assert held.fields().keys() == expected.fields().keys()
    for field, tensor in expected.fields().items():
        assert_same_bits(held.fields()[field], tensor)
    x = torch.randn(3, held.layer.K, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    reference = expected.get_linear(bias, activations="unquantized")
    assert_same_bits(layer.quant_method.apply(layer, x, bias), reference(x))


def opened(folder: Path, rank: Rank = ALONE, target: Any = "auto") -> Weights:
    return open_checkpoint(folder, target=target, dtype=DTYPE, process_group=rank)


def asked(weights: Weights, prefix: str, split: Split) -> Weight | QloadError:
    try:
        return weights.get_weights_col(prefix) if split == "N" else weights.get_weights_row(prefix)
    except QloadError as error:
        return error


@every_format
@worlds
@pytest.mark.parametrize(("kind", "split"), [(ColumnParallelLinear, "N"), (RowParallelLinear, "K")])
def test_a_layer_is_the_share_that_the_files_have(
    name: str, folder: str, world: int, kind: Any, split: Split
) -> None:
    config, path = config_of(name, FIXTURES / folder), FIXTURES / folder
    for rank in FakeWorld(world):
        with opened(path, rank) as weights:
            prefix = prefix_of(max(weights.storage.keys())).removesuffix(".weight")
            expected = asked(weights, prefix, split)
            N, K = weights.loader.shape(weights, prefix)
            tensors = tensors_of(weights, prefix)
        if isinstance(expected, QloadError):
            with pytest.raises(type(expected), match=re.escape(str(expected).splitlines()[0])):
                loaded(kind, config, prefix, rank, tensors, (K, N))
            continue
        assert_same(loaded(kind, config, prefix, rank, tensors, (K, N)), expected)


AWQ_MODEL = FIXTURES / "awq" / "model_gemm_g64"
MODELS = [pytest.param("gptq", MODEL, id="gptq"), pytest.param("awq", AWQ_MODEL, id="awq")]


@worlds
@pytest.mark.parametrize(("name", "folder"), MODELS)
def test_queries_keys_and_values_are_loaded_under_their_ids(name: str, folder: Path, world: int) -> None:
    prefixes = {"q": f"{ATTENTION}.q_proj", "k": f"{ATTENTION}.k_proj", "v": f"{ATTENTION}.v_proj"}
    for rank in FakeWorld(world):
        with opened(folder, rank) as weights:
            weights.architecture = None  # which asks for whole heads by another argument
            (N, K), (kv, _) = (weights.loader.shape(weights, prefixes[shard]) for shard in "qk")
            config, size = config_of(name, folder), 32
            heads = (N // size, kv // size)
            layer = layer_of(QKVParallelLinear, config, f"{ATTENTION}.qkv_proj", rank, K, size, *heads)
            for shard, own in prefixes.items():
                hand_over(layer, tensors_of(weights, own), shard)
            layer.quant_method.process_weights_after_loading(layer)

            assert_same(layer, weights.get_multi_weights_col(list(prefixes.values())))


@pytest.mark.parametrize(("name", "folder"), MODELS)
def test_a_key_that_several_ranks_share_is_on_each_of_them(name: str, folder: Path) -> None:
    prefixes = {"q": f"{ATTENTION}.q_proj", "k": f"{ATTENTION}.k_proj", "v": f"{ATTENTION}.v_proj"}
    for rank in FakeWorld(4):
        with opened(folder, rank) as weights:
            (N, K), (kv, _) = (weights.loader.shape(weights, prefixes[shard]) for shard in "qk")
            sizes = (K, kv // 2, N // (kv // 2), 2)
            layer = layer_of(QKVParallelLinear, config_of(name, folder), "qkv", rank, *sizes)
            for shard, own in prefixes.items():
                hand_over(layer, tensors_of(weights, own), shard)
            layer.quant_method.process_weights_after_loading(layer)

            heads = Heads(N // (kv // 2), 2)
            assert_same(layer, weights.get_multi_weights_col(list(prefixes.values()), heads=heads))


def test_a_tensor_of_all_heads_is_cut_where_keys_are_on_several_ranks() -> None:
    folder = FIXTURES / "awq" / "g128_256x512"
    for rank in FakeWorld(4):
        with opened(folder, rank) as weights:
            prefix = prefix_of(max(weights.storage.keys()))
            layer = layer_of(QKVParallelLinear, config_of("awq", folder), prefix, rank, 256, 64, 4, 2)
            hand_over(layer, tensors_of(weights, prefix))
            layer.quant_method.process_weights_after_loading(layer)

            assert_same(layer, weights.get_weights_col_packed_qkv(prefix, 4, 2))


@worlds
@pytest.mark.parametrize("ids", [(0, 1), ("gate_proj", "up_proj")], ids=["by number", "by name"])
@pytest.mark.parametrize(("name", "folder"), MODELS)
def test_gate_and_up_are_one_layer(name: str, folder: Path, ids: Any, world: int) -> None:
    prefixes = [f"{MLP}.gate_proj", f"{MLP}.up_proj"]
    for rank in FakeWorld(world):
        with opened(folder, rank) as weights:
            N, K = weights.loader.shape(weights, prefixes[0])
            config = config_of(name, folder)
            layer = layer_of(MergedColumnParallelLinear, config, f"{MLP}.gate_up_proj", rank, K, [N, N])
            if ids != (0, 1):
                with pytest.raises(ArgumentError, match="shard_id\n  expected None or one of 0, 1\n"):
                    hand_over(layer, tensors_of(weights, prefixes[0]), ids[0])
                continue
            for shard, own in zip(ids, prefixes, strict=True):
                hand_over(layer, tensors_of(weights, own), shard)
            layer.quant_method.process_weights_after_loading(layer)

            assert_same(layer, weights.get_multi_weights_col(prefixes))


@worlds
@pytest.mark.parametrize(
    ("name", "folder", "blocks"),
    [
        ("gptq", "gptq/b4_g64_sym_noact_v1", [64, 64]),
        ("awq", "awq/g128_256x512", [256, 128, 128]),
        ("fp8", "fp8/tensor_scalar_16x64", [8, 8]),
        ("bitsandbytes", "bnb/nf4_nested_bf16_storage_128x256", [64, 64]),
        ("compressed-tensors", "compressed_tensors/nvfp4", [4, 4]),
    ],
)
def test_a_tensor_that_holds_all_parts_is_cut_in_each(
    name: str, folder: str, blocks: list[int], world: int
) -> None:
    path = FIXTURES / folder
    for rank in FakeWorld(world):
        with opened(path, rank) as weights:
            prefix = prefix_of(min(weights.storage.keys())).removesuffix(".weight")
            K = weights.loader.shape(weights, prefix)[1]
            config = config_of(name, path)
            layer = layer_of(MergedColumnParallelLinear, config, prefix, rank, K, blocks)
            hand_over(layer, tensors_of(weights, prefix))
            layer.quant_method.process_weights_after_loading(layer)

            assert_same(layer, weights.get_weights_col_packed(prefix, blocks))


@worlds
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_bias_is_cut_with_its_layer_and_added_once(kind: Any, world: int) -> None:
    folder = FIXTURES / "gptq" / "b4_g128_sym_noact_v1_256x512_bias"
    outputs = []
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    for rank in FakeWorld(world):
        with opened(folder, rank) as weights:
            prefix = prefix_of(min(weights.storage.keys()))
            N, K = weights.loader.shape(weights, prefix)
            bias = weights.get_tensor(f"{prefix}.bias")
            layer = layer_of(kind, config_of("gptq", folder), prefix, rank, K, N, bias=True)
            hand_over(layer, {**tensors_of(weights, prefix), "bias": bias})
            layer.quant_method.process_weights_after_loading(layer)
            column = kind is ColumnParallelLinear
            own = weights.get_sharded(f"{prefix}.bias", 0) if column else bias
            assert_same_bits(layer.bias.data, own)
            share = weights.get_weights_col(prefix) if column else weights.get_weights_row(prefix)
        here = x if column else x.chunk(world, -1)[rank.rank()].contiguous()
        added = own if column or rank.rank() == 0 else None
        outputs.append(layer(here))
        assert_same_bits(outputs[-1], share.get_linear(added)(here))
        assert_same_bits(outputs[-1], layer(here))


def test_what_took_a_parameters_place_after_it_was_loaded_is_what_counts() -> None:
    prefixes, made = [f"{MLP}.gate_proj", f"{MLP}.up_proj"], []
    with opened(AWQ_MODEL) as weights:
        N, K = weights.loader.shape(weights, prefixes[0])
        for order in (prefixes, prefixes[::-1]):
            config, name = config_of("awq", AWQ_MODEL), f"{MLP}.gate_up_proj"
            layer = layer_of(MergedColumnParallelLinear, config, name, ALONE, K, [N, N])
            for shard, own in enumerate(order):
                hand_over(layer, tensors_of(weights, own), shard)
            made.append(layer)
        right, exchanged = made
        exchanged.load_state_dict(right.state_dict(), assign=True)
        for layer in made:
            layer.quant_method.process_weights_after_loading(layer)

        assert_same(exchanged, weights.get_multi_weights_col(prefixes))
        assert_same(right, weights.get_multi_weights_col(prefixes))
