"""The linear method of every format: engines with loaders of their own, and what is refused."""

import copy
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from qload.detect import loader_from_config
from qload.errors import (
    ArgumentError,
    ConfigError,
    CutError,
    MismatchError,
    MissingTensorError,
    NonfiniteScaleError,
    ShapeError,
)
from qload.methods import (
    CheckpointConfig,
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    TypedLinearMethod,
    UnquantizedLinearMethod,
    get_quantization_config,
    list_quantization_methods,
)
from qload.parallel import FakeWorld, Rank
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.formats.test_gptq_zeros import NAME, fields, quantized, whole_words
from tests.formats.test_gptq_zeros import config as gptq_config
from tests.formats.test_gptq_zeros import tensors as as_stored
from tests.methods.engine import awq

pytestmark = pytest.mark.usefixtures("seen_texts")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True}
K, N = 128, 64


def gptq(K: int = K, N: int = N, *, act_order: bool = False, seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = ((K // 8, N), (K // 32, N // 8))
    words = [torch.randint(-(2**31), 2**31 - 1, shape, generator=made).int() for shape in shapes]
    index = torch.arange(K) // 32
    return {
        "qweight": words[0],
        "qzeros": words[1],
        "scales": torch.rand(K // 32, N, generator=made).half() + 0.5,
        "g_idx": (index[torch.randperm(K, generator=made)] if act_order else index).int(),
    }


def config_of(values: dict[str, Any] = GPTQ, target: Any = "auto") -> CheckpointConfig:
    config: Any = get_quantization_config(values["quant_method"]).from_config(values)
    config.target, config.activations = target, "unquantized"
    return config


def asked(values: dict[str, Any], tensors: dict[str, Tensor], rank: Any, split: str, target: Any) -> Weight:
    storage = MemoryStorage({f"a.{name}": tensor for name, tensor in tensors.items()})
    weights = Weights(storage, loader=loader_from_config(values, target=target), process_group=rank)
    return weights.get_weights_col("a") if split == "N" else weights.get_weights_row("a")


def assert_holds(layer: Any, expected: Weight) -> None:
    held = layer.typed_linear.typed
    assert (type(held), held.config, held.layer.parts) == (
        type(expected),
        expected.config,
        expected.layer.parts,
    )
    for field, tensor in expected.fields().items():
        assert_same_bits(held.fields()[field], tensor)


class Engine(nn.Module):
    """A layer of an engine: it cuts by the parameters' tags, and writes into them."""

    def __init__(self, rank: Rank, split: str, *, tells: bool) -> None:
        super().__init__()
        self.input_size, self.output_size, self.rank = K, N, rank
        self.calls: list[str] = []
        if tells:
            self.tp_rank, self.tp_size = rank.rank(), rank.size()
        world, self.split = rank.size(), split
        self.share = (K // world, [N]) if split == "K" else (K, [N // world])

    def weight_loader(self, param: Any, loaded: Tensor) -> None:
        dim = getattr(param, "input_dim" if self.split == "K" else "output_dim", None)
        self.calls.append("own")
        if dim is not None:
            size = param.shape[dim]
            loaded = loaded.narrow(dim, self.rank.rank() * size, size)
        assert param.shape == (loaded.shape or (1,))
        param.data.copy_(loaded)


def engine(values: dict[str, Any], rank: Rank, split: str, *, tells: bool, target: Any = "auto") -> Any:
    layer = Engine(rank, split, tells=tells)
    method: Any = config_of(values, target).get_quant_method(layer, "a")
    method.create_weights(
        layer, *layer.share, K, N, params_dtype=torch.float16, weight_loader=layer.weight_loader
    )
    layer.quant_method = method
    return layer


FP8_TENSORS = {
    "weight": torch.linspace(-2, 2, N * K).reshape(N, K).to(torch.float8_e4m3fn),
    "weight_scale": torch.tensor(0.3),
}
MADE = [
    pytest.param(GPTQ, gptq(), id="gptq"),
    pytest.param(AWQ, awq(K, N, 32).fields(), id="awq"),
    pytest.param(FP8, FP8_TENSORS, id="fp8"),
]


@pytest.mark.parametrize("split", ["N", "K"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tells", [False, True], ids=["rank unknown", "rank told"])
@pytest.mark.parametrize(("values", "tensors"), MADE)
def test_an_engines_own_loader_may_cut_by_the_tags(
    values: Any, tensors: dict[str, Tensor], tells: bool, world: int, split: str
) -> None:
    if split == "K" and not tells and values is GPTQ and world > 1:
        pytest.skip("the share of an index that is whole cannot be told: refused below")
    for rank in FakeWorld(world):
        layer = engine(values, rank, split, tells=tells, target=None)
        for name, tensor in tensors.items():
            layer.weight_loader(getattr(layer, name), tensor)
        layer.quant_method.process_weights_after_loading(layer)

        assert layer.calls == ["own"] * len(tensors)
        assert_holds(layer, asked(values, tensors, rank, split, None))


class MergedEngine(Engine):
    """As engines cut two parts of one layer: each goes behind the other, a scalar to its own place."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank, "N", tells=False)
        self.share = (K, [N // rank.size()] * 2)

    def weight_loader(self, param: Any, loaded: Tensor, part: int | None = None) -> None:
        assert part is not None
        dim = getattr(param, "output_dim", None)
        if dim is None and getattr(param, "needs_scalar_to_array", False):
            param.data[part] = loaded
        elif dim is None:
            param.data.copy_(loaded)
        else:
            share = param.shape[dim] // 2
            mine = loaded.narrow(dim, self.rank.rank() * share, share)
            param.data.narrow(dim, part * share, share).copy_(mine)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("values", "tensors"), MADE)
def test_an_engines_own_loader_may_put_parts_behind_each_other(
    values: Any, tensors: dict[str, Tensor], world: int
) -> None:
    parts = {"x": tensors, "y": dict(tensors)}
    if values is FP8:
        parts["y"]["weight_scale"] = torch.tensor(0.7)
    else:
        parts["y"]["qzeros"] = tensors["qzeros"].flip(0)
    stored = {f"{part}.{name}": tensor for part, held in parts.items() for name, tensor in held.items()}
    for rank in FakeWorld(world):
        layer: Any = MergedEngine(rank)
        method: Any = config_of(values, None).get_quant_method(layer, "a")
        method.create_weights(
            layer, *layer.share, K, 2 * N, params_dtype=torch.float16, weight_loader=layer.weight_loader
        )
        for number, held in enumerate(parts.values()):
            for name, tensor in held.items():
                layer.weight_loader(getattr(layer, name), tensor, number)
        method.process_weights_after_loading(layer)

        loader = loader_from_config(values)
        weights = Weights(MemoryStorage(stored), loader=loader, process_group=rank)
        assert_holds(layer, weights.get_multi_weights_col(["x", "y"]))


@pytest.mark.parametrize("split", ["N", "K"])
def test_where_the_rank_is_told_parameters_take_whole_tensors(split: str) -> None:
    tensors = gptq(act_order=True)
    for rank in FakeWorld(2):
        layer = engine({**GPTQ, "desc_act": True}, rank, split, tells=True)
        for name, tensor in tensors.items():
            param = getattr(layer, name)
            param.weight_loader(param, tensor)
        layer.quant_method.process_weights_after_loading(layer)

        assert not layer.calls
        assert_holds(layer, asked(GPTQ, tensors, rank, split, "auto"))
        assert layer.typed_linear.maximum == ("own" if split == "K" else None)


@pytest.mark.parametrize(("act_order", "groups"), [(False, K // 32 // 2), (True, K // 32)])
def test_an_engine_cuts_groups_with_the_inputs_unless_act_order_is_claimed(
    act_order: bool, groups: int
) -> None:
    layer = engine({**GPTQ, "desc_act": act_order}, Rank(1, 2), "K", tells=False)

    assert tuple(layer.scales.shape) == (groups, N)
    assert tuple(layer.qzeros.shape) == (groups, N // 8)


def test_a_share_of_inputs_needs_the_rank_where_an_index_is_whole() -> None:
    layer = engine(GPTQ, Rank(1, 2), "K", tells=False)
    for name, tensor in gptq().items():
        layer.weight_loader(getattr(layer, name), tensor)

    with pytest.raises(ArgumentError, match="process_group, or tp_rank and tp_size"):
        layer.quant_method.process_weights_after_loading(layer)


def test_half_of_a_tensor_is_not_loaded() -> None:
    layer = engine(GPTQ, Rank(0, 1), "N", tells=False)
    for name, tensor in gptq().items():
        layer.weight_loader(getattr(layer, name), tensor)
    layer.scales.data[0] = torch.nan

    with pytest.raises(MismatchError, match=r"a\.scales: not loaded"):
        layer.quant_method.process_weights_after_loading(layer)


def layer_of(kind: Any = ColumnParallelLinear, rank: Any = None, sizes: Any = (K, N), **options: Any) -> Any:
    made = {"bias": False, "params_dtype": torch.float16, "quant_config": config_of(), "prefix": "a"}
    return kind(*sizes, process_group=rank, **{**made, **options})


def hand_over(layer: Any, tensors: dict[str, Tensor], *shard: Any) -> None:
    for name, tensor in tensors.items():
        layer.quant_method.load(layer, name, tensor, *shard)


def test_parameters_have_the_shape_and_the_tags_of_the_share() -> None:
    layer = layer_of(rank=Rank(1, 2))
    tags = {name: vars(getattr(layer, name)) for name in gptq()}

    assert {name: tuple(getattr(layer, name).shape) for name in gptq()} == {
        "qweight": (16, 32),
        "qzeros": (4, 4),
        "scales": (4, 32),
        "g_idx": (128,),
    }
    assert (tags["qweight"]["input_dim"], tags["qweight"]["output_dim"]) == (0, 1)
    assert (tags["qweight"]["packed_dim"], tags["qweight"]["packed_factor"]) == (0, 8)
    assert (tags["qzeros"]["packed_dim"], tags["qzeros"]["packed_factor"]) == (1, 8)
    assert "packed_dim" not in tags["scales"]
    hand_over(layer, gptq())
    assert_same_bits(layer.qweight.data, gptq()["qweight"][:, 32:])


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_what_is_handed_over_may_be_used_again(kind: Any) -> None:
    layer, tensors = layer_of(kind), gptq()
    hand_over(layer, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    layer.quant_method.process_weights_after_loading(layer)

    assert_holds(layer, asked(GPTQ, gptq(), Rank(0, 1), "N", "auto"))


def test_a_layer_that_stayed_plain_is_read_as_plain() -> None:
    weight = torch.randn(N, K)
    layer = layer_of(quant_config=config_of(FP8))
    layer.quant_method.load(layer, "weight", weight)
    layer.quant_method.process_weights_after_loading(layer)

    assert layer.typed_linear.typed.plain
    assert_same_bits(layer.typed_linear.typed.weight, weight.half())


def test_a_layer_without_all_of_its_tensors_is_refused_by_name() -> None:
    layer, tensors = layer_of(), gptq()
    del tensors["scales"]
    hand_over(layer, tensors)

    with pytest.raises(MissingTensorError, match=r"a\.scales"):
        layer.quant_method.process_weights_after_loading(layer)


def test_scales_that_are_not_finite_are_refused_unless_allowed() -> None:
    tensors = gptq()
    tensors["scales"][0, 0] = float("inf")
    refusing, allowing = config_of(), config_of()
    allowing.nonfinite = "allow"
    layers = [layer_of(quant_config=config) for config in (refusing, allowing)]
    for layer in layers:
        hand_over(layer, tensors)

    with pytest.raises(NonfiniteScaleError, match=r"a\.scales"):
        layers[0].quant_method.process_weights_after_loading(layers[0])
    layers[1].quant_method.process_weights_after_loading(layers[1])


def test_a_part_that_did_not_come_is_named() -> None:
    layer = layer_of(MergedColumnParallelLinear, sizes=(K, [N, N]), prefix="mlp.gate_up_proj")
    hand_over(layer, gptq(), 0)

    with pytest.raises(MissingTensorError, match=r"mlp\.up_proj\.qweight"):
        layer.quant_method.process_weights_after_loading(layer)


def test_parts_in_other_orders_are_multiplied_one_after_another() -> None:
    parts = gptq(act_order=True), gptq(act_order=True, seed=1)
    layer = layer_of(MergedColumnParallelLinear, sizes=(K, [N, N]))
    for number, tensors in enumerate(parts):
        hand_over(layer, tensors, number)

    layer.quant_method.process_weights_after_loading(layer)

    held = [linear.typed.dequantize() for linear in layer.typed_linear.linears]
    for got, tensors in zip(held, parts, strict=True):
        assert_same_bits(got, asked(GPTQ, tensors, Rank(0, 1), "N", None).dequantize())
    x, bias = torch.eye(K), torch.arange(2 * N).float()
    assert_same_bits(layer.quant_method.apply(layer, x, bias), layer.quant_method.apply(layer, x) + bias)


@pytest.mark.parametrize("fused", [False, True])
def test_one_rank_cuts_no_block_of_merged_parts(fused: bool) -> None:
    widths = (128, 64, 64)  # keys and values end inside of a block of 128 outputs
    values = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    draw = torch.Generator().manual_seed(1)
    matrices = [torch.randn(width, K, generator=draw).to(torch.float8_e4m3fn) for width in widths]
    whole = torch.cat([each.view(torch.uint8) for each in matrices]).view(torch.float8_e4m3fn)
    scales = [torch.rand(1, 1, generator=draw) + 0.5 for _ in widths]
    stored = [{"weight": one, "weight_scale_inv": scale} for one, scale in zip(matrices, scales, strict=True)]
    layer: Any = nn.Module()
    layer.tp_rank, layer.tp_size = 0, 1
    method: Any = config_of(values, None).get_quant_method(
        layer_of(MergedColumnParallelLinear, sizes=(K, [N, N])), "attn.qkv_proj"
    )
    method.create_weights(layer, K, list(widths), K, sum(widths), torch.float32)
    if fused:
        blocks = torch.rand(2, 1, generator=draw) + 0.5
        parts = [{"weight": whole, "weight_scale_inv": blocks}]
        meant = whole.float() * blocks.repeat_interleave(128, 0)
    else:
        parts = stored
        meant = torch.cat([one.float() * scale for one, scale in zip(matrices, scales, strict=True)])
    for number, tensors in enumerate(parts):
        for name, tensor in tensors.items():
            method.load(layer, name, tensor, None if fused else number)

    method.process_weights_after_loading(layer)

    assert torch.equal(method.apply(layer, torch.eye(K)), meant.T)


def test_a_layer_loaded_whole_and_in_parts_is_refused() -> None:
    layer = layer_of(MergedColumnParallelLinear, sizes=(K, [N, N]))
    hand_over(layer, gptq(), 0)
    hand_over(layer, gptq(N=2 * N))

    with pytest.raises(MismatchError, match="loaded whole and in parts"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("tensors", [gptq(K=2 * K), gptq(N=2 * N)], ids=["K", "N"])
def test_tensors_of_another_layer_are_refused(tensors: dict[str, Tensor]) -> None:
    layer = layer_of()
    hand_over(layer, tensors)

    with pytest.raises(ShapeError, match=r"a: .*\n?.*\(64, 128\) = \(N, K\)"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_cut_inside_of_a_word_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(CutError, match=r"a\.qweight: cannot cut K = 72 at 36"):
        layer_of(RowParallelLinear, Rank(0, 2), (72, N))


def test_exl2_is_not_cut_along_its_inputs() -> None:
    config = get_quantization_config("exl2").from_config({"quant_method": "exl2", "bits": 4.0})

    with pytest.raises(CutError, match=r"a\.q_invperm: cannot cut K.*\n.*\n.*lawful   only world size 1"):
        layer_of(RowParallelLinear, Rank(0, 2), quant_config=config)


def test_the_order_of_calls_is_kept() -> None:
    layer = layer_of()
    with pytest.raises(ArgumentError, match="before the first call"):
        layer(torch.ones(1, K).half())
    with pytest.raises(ArgumentError, match="without weights"):
        layer.quant_method.create_weights(layer, K, [N], K, N, torch.float16)
    with pytest.raises(MissingTensorError, match=r"a\.B"):
        layer.quant_method.load(layer, "B", torch.ones(1))
    param, tensors = layer.qweight, gptq()
    hand_over(layer, tensors)
    layer.quant_method.process_weights_after_loading(layer)
    made = layer.typed_linear
    layer.quant_method.process_weights_after_loading(layer)

    assert layer.typed_linear is made
    assert not list(layer.parameters())
    with pytest.raises(ArgumentError, match="loaded before process_weights_after_loading"):
        param.weight_loader(param, tensors["qweight"])
    with pytest.raises(ShapeError, match=r"a\.bias"):
        layer.quant_method.apply(layer, torch.ones(1, K).half(), torch.ones(3).half())


def test_layers_are_made_on_meta_and_copied() -> None:
    with torch.device("meta"):
        layer = layer_of()
    with pytest.raises(ArgumentError, match="to_empty before loading"):
        layer.quant_method.load(layer, "qweight", gptq()["qweight"])
    twin = copy.deepcopy(layer.to_empty(device="cpu"))
    hand_over(twin, gptq())
    again = copy.deepcopy(twin)
    for each in (twin, again):
        each.quant_method.process_weights_after_loading(each)

    assert_holds(again, twin.typed_linear.typed)
    with pytest.raises(MissingTensorError):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_cast_and_a_move_change_no_weight() -> None:
    layer = layer_of(bias=True)
    bias = torch.randn(N).half()
    hand_over(layer, gptq())
    layer.bias.weight_loader(layer.bias, bias)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(2, K).half()
    before = layer(x)

    layer.bfloat16().to("cpu").half()

    assert_same_bits(layer(x), before)
    assert_same_bits(before, asked(GPTQ, gptq(), Rank(0, 1), "N", "auto").get_linear(bias)(x))


# Configs


def test_every_method_that_is_read_has_a_name() -> None:
    names = list_quantization_methods()

    assert set(names) >= {
        *("gptq", "gptq_marlin", "awq", "awq_marlin", "fp8", "compressed-tensors", "bitsandbytes", "eetq"),
        *("exl2", "marlin", "modelopt", "mxfp4"),
    }
    for name in names:
        kind = get_quantization_config(name)
        assert kind.get_name() == name
        assert torch.bfloat16 in kind.get_supported_act_dtypes()


def test_a_config_is_of_the_method_that_it_is_asked_under() -> None:
    assert get_quantization_config("gptq").from_config({"bits": 4, "group_size": 32}).get_name() == "gptq"
    for config, got in ((FP8, "'fp8', of fp8 layers"), (BNB, "'bitsandbytes', of bnb_int8 layers")):
        with pytest.raises(ConfigError, match=f"quant_method\n  expected gptq\n  got      {got}"):
            get_quantization_config("gptq").from_config(config)
    with pytest.raises(ConfigError, match="an object"):
        get_quantization_config("gptq").from_config(None)


def test_modelopts_own_file_is_read() -> None:
    said = {"quant_algo": "FP8", "exclude_modules": ["b"]}
    values = {"producer": {"name": "modelopt"}, "quantization": said}
    config = get_quantization_config("modelopt").from_config(values)

    assert type(config.get_quant_method(nn.Linear(2, 2), "a")) is TypedLinearMethod
    assert type(config.get_quant_method(nn.Linear(2, 2), "b")) is UnquantizedLinearMethod


def test_layers_that_are_left_out_are_plain_and_others_are_none_of_ours() -> None:
    config = config_of({**GPTQ, "modules_to_not_convert": ["lm_head"]})

    assert type(config.get_quant_method(nn.Linear(2, 2), "lm_head")) is UnquantizedLinearMethod
    assert config.get_quant_method(nn.LayerNorm(2), "norm") is None
    with pytest.raises(ArgumentError, match="a layer's name"):
        config.get_quant_method(nn.Linear(2, 2), 5)  # type: ignore[arg-type]
    assert repr(config).startswith("GptqConfig(FormatLoader(gptq: ")


def test_sizes_in_integers_of_numpy_are_those_of_a_linear_layer() -> None:
    layer = nn.Linear(numpy.int64(2), numpy.int64(2))

    assert type(config_of(GPTQ).get_quant_method(layer, "a")) is TypedLinearMethod
    layer.in_features = 2.0
    assert config_of(GPTQ).get_quant_method(layer, "a") is None


def test_a_layer_is_read_by_the_rule_that_knows_it() -> None:
    values = {**GPTQ, "dynamic": {"+:.*b$": {"bits": 8}, "-:.*c$": {}}}
    config = config_of(values)
    method: Any = config.get_quant_method(nn.Linear(2, 2), "model.b")

    assert method.formats[0].config.bits == 8
    assert type(config.get_quant_method(nn.Linear(2, 2), "model.c")) is UnquantizedLinearMethod


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("kind", "axis"), [(ColumnParallelLinear, 0), (RowParallelLinear, 1)])
@pytest.mark.parametrize("write", [whole_words, fields])
def test_zero_points_of_0_are_read_as_from_files(kind: Any, axis: int, world: int, write: Any) -> None:
    codes, zeros, scales, want = quantized(4, 512, 256, 64, 0.1)
    tensors = as_stored(codes, scales, write(zeros, 4), 4)
    values = gptq_config(4, 64)

    shares = []
    for rank in FakeWorld(world):
        layer = kind(
            512, 256, prefix=NAME, quant_config=config_of(values, None), process_group=rank, bias=False
        )
        for name, tensor in tensors.items():
            param = getattr(layer, name.rpartition(".")[2])
            param.weight_loader(param, tensor)
        layer.quant_method.process_weights_after_loading(layer)
        shares.append(layer.typed_linear.typed.dequantize().half())

    assert torch.equal(torch.cat(shares, axis), want)


def test_a_convention_that_codes_deny_is_refused_by_an_engine_too() -> None:
    codes, zeros, scales, _ = quantized(4, 512, 256, 64, 0)
    config = config_of(gptq_config(4, 64, checkpoint_format="gptq_v2"), None)
    layer: Any = ColumnParallelLinear(512, 256, prefix=NAME, quant_config=config, bias=False)
    for name, tensor in as_stored(codes, scales, fields(zeros, 4), 4).items():
        param = getattr(layer, name.rpartition(".")[2])
        param.weight_loader(param, tensor)

    with pytest.raises(MismatchError, match="qzeros: zero points are one off"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_layer_leaves_parameters_to_others_that_share_them() -> None:
    (rank,) = FakeWorld(1)
    layer = engine(FP8, rank, "N", tells=True)
    for name, tensor in FP8_TENSORS.items():
        layer.weight_loader(getattr(layer, name), tensor)
    kept = {name: getattr(layer, name) for name in FP8_TENSORS}

    layer.quant_method.process_weights_after_loading(layer)

    for name, tensor in FP8_TENSORS.items():
        assert_same_bits(kept[name].data.reshape(tensor.shape), tensor)


def test_a_whole_layer_without_a_rank_is_loaded_by_the_format() -> None:
    (rank,) = FakeWorld(1)
    layer = engine(GPTQ, rank, "N", tells=False)

    assert all(getattr(layer, name).weight_loader != layer.weight_loader for name in gptq())
