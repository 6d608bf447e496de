"""Where the engine whose names these are goes wrong, one test each (a survey ran it)."""

from typing import Any

import pytest
import torch
from torch import nn

from qload.detect import loader_from_config
from qload.errors import ConfigError, ExcludedModuleError, UnsupportedFormatError
from qload.formats import AWQConfig, AWQWeight
from qload.loader import WeightsLoader
from qload.methods import (
    SCALAR_TYPE_UINT4,
    SCALAR_TYPE_UINT8,
    AWQMarlinConfig,
    AWQMarlinLinearMethod,
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.testing import assert_reads_back
from qload.weights import Weights
from tests.formats.test_ct_pack import tensors
from tests.methods.engine import awq, config_of, load, ranks, ready

pytestmark = pytest.mark.usefixtures("seen_texts")


def read(**config: Any) -> AWQMarlinConfig:
    return AWQMarlinConfig.from_config({"quant_method": "awq", "version": "gemm", **config})


def made(kind: type[Any], weight: AWQWeight, *sizes: int, rank: Rank | None = None, **changes: Any) -> Any:
    config = config_of(weight, **changes)
    return kind(*sizes, bias=False, params_dtype=torch.float16, quant_config=config, process_group=rank)


def test_the_ids_of_its_scalar_types_are_kept() -> None:
    assert SCALAR_TYPE_UINT4.id == 0x4000000000400
    assert SCALAR_TYPE_UINT8.id == 0x4000000000800


def test_modules_to_not_convert_are_not_converted() -> None:
    config = read(bits=4, group_size=128, modules_to_not_convert=["lm_head"])

    assert isinstance(config.get_quant_method(nn.Linear(8, 8), "lm_head"), UnquantizedLinearMethod)
    assert config.modules_to_not_convert == ["lm_head"]


def test_layers_1_is_not_layers_10() -> None:
    config = read(bits=4, group_size=128, modules_to_not_convert=["layers.1"])
    methods = [config.get_quant_method(nn.Linear(8, 8), f"layers.{i}.mlp.up_proj") for i in (1, 10)]

    assert [isinstance(method, UnquantizedLinearMethod) for method in methods] == [True, False]


@pytest.mark.parametrize("key", ["group_size", "q_group_size"])
def test_both_spellings_of_the_group_size_are_read(key: str) -> None:
    assert read(bits=4, **{key: 64}).group_size == 64


@pytest.mark.parametrize("key", ["bits", "w_bit"])
def test_both_spellings_of_the_bits_are_read(key: str) -> None:
    assert read(**{key: 8}, group_size=64).weight_bits == 8


@pytest.mark.parametrize(
    ("config", "text"),
    [
        pytest.param({"bits": 4, "group_size": "64"}, "group_size", id="group size as text"),
        pytest.param({"bits": "4", "group_size": 128}, "bits", id="bits as text"),
        pytest.param({"bits": 4, "group_size": 64, "q_group_size": 128}, "q_group_size", id="two sizes"),
        pytest.param({"bits": 4, "group_size": 128, "zero_point": "no"}, "zero_point", id="zero_point"),
        pytest.param(
            {"bits": 4, "group_size": 128, "modules_to_not_convert": "lm_head"},
            "to_not_convert",
            id="a string",
        ),
    ],
)
def test_what_is_malformed_does_not_become_a_default(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(**config)


def test_what_a_config_does_not_say_is_what_engines_take_for_it() -> None:
    config = read()

    assert (config.weight_bits, config.group_size, config.zero_point) == (4, 128, True)
    assert (read(w_bit=8).weight_bits, read(q_group_size=64).group_size) == (8, 64)
    assert read(zero_point=None).zero_point is True


@pytest.mark.parametrize("version", ["gemv", "gemv_fast"])
def test_a_layout_other_than_gemm_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=f"awq_{version}"):
        read(bits=4, group_size=128, version=version)


def test_a_config_of_another_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quant_method\n.*awq\n.*gptq"):
        read(bits=4, group_size=128, version=None, quant_method="gptq")


@pytest.mark.parametrize("name", ["awq_marlin", None], ids=["its own name", "no name"])
def test_a_config_need_not_name_the_method(name: str | None) -> None:
    values = {"quant_method": name} if name else {}

    assert AWQMarlinConfig.from_config({**values, "bits": 4, "group_size": 128}).group_size == 128


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        pytest.param({"zero_point": True}, "uint4", id="true"),
        pytest.param({"zero_point": False}, "uint4b8", id="false"),
        pytest.param({}, "uint4", id="nothing"),
    ],
)
def test_zero_point_is_read(said: dict[str, bool], kind: str) -> None:
    config = read(bits=4, group_size=128, **said)

    assert (str(config.quant_type), config.zero_point) == (kind, kind == "uint4")


def test_zero_point_false_is_symmetric() -> None:
    weight = awq(64, 64, 32)
    middle = AWQWeight(config=AWQConfig(32, 4, False), qweight=weight.qweight, scales=weight.scales)
    module = made(ColumnParallelLinear, weight, 64, 64, zero_point=False)
    load(module, middle.fields())

    assert str(module.quant_method.quant_config.quant_type) == "uint4b8"
    assert_reads_back(ready(module), middle, torch.float16)


@pytest.mark.parametrize("zero_point", [True, False], ids=["with zero points", "symmetric"])
def test_8_bits_multiply(zero_point: bool) -> None:
    weight = awq(128, 64, 128, 8)
    if not zero_point:
        weight.qzeros.fill_(-0x7F7F7F80)  # type: ignore[union-attr]
    module = made(ColumnParallelLinear, weight, 128, 64, zero_point=zero_point)
    load(module, weight.fields())

    assert_reads_back(ready(module), weight, torch.float16)


def test_a_config_is_made_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    for name in ("get_device_capability", "get_device_properties", "current_device"):
        monkeypatch.setattr(torch.cuda, name, asked)
    config = AWQMarlinConfig(4, 128, True)

    assert (config.get_min_capability(), config.get_name()) == (80, "awq_marlin")
    assert config.get_supported_act_dtypes() == [torch.float16, torch.bfloat16]


def test_the_file_of_awqs_own_tool_is_looked_for() -> None:
    assert AWQMarlinConfig.get_config_filenames() == ["quantize_config.json", "quant_config.json"]


def test_one_group_for_all_rows_is_a_group() -> None:
    weight = awq(128, 64, -1)
    module = made(ColumnParallelLinear, weight, 128, 64)
    load(module, weight.fields())

    assert tuple(module.scales.shape) == (1, 64)
    assert_reads_back(ready(module), weight, torch.float16)


def test_a_group_size_that_marlin_does_not_read_is_refused_by_the_config() -> None:
    with pytest.raises(ValueError, match=r"-1, 32, 64, 128\n.*48"):
        AWQMarlinConfig(4, 48, True)


def test_column_offsets_count_words_where_words_are_stored() -> None:
    weight = awq(64, 128, 32)

    def make(rank: Rank) -> nn.Module:
        module = made(ColumnParallelLinear, weight, 64, 128, rank=rank)
        load(module, weight.fields())
        return ready(module)

    modules = ranks(2, make)
    assert_reads_back(lambda x: torch.cat([module(x) for module in modules], -1), weight, torch.float16)


@pytest.mark.parametrize(
    ("K", "group"),
    [
        pytest.param(256, 32, id="groups"),
        pytest.param(256, -1, id="one group"),
        pytest.param(128, 128, id="one group that has a size"),
    ],
)
def test_row_offsets_count_groups_where_groups_are_stored(K: int, group: int) -> None:
    weight = awq(K, 64, group)

    def make(rank: Rank) -> nn.Module:
        module = made(RowParallelLinear, weight, K, 64, rank=rank, group_size=group)
        load(module, weight.fields())
        return ready(module)

    modules = ranks(2, make)
    kernel = lambda x: sum(m(part) for m, part in zip(modules, x.split(K // 2, -1), strict=True))  # noqa: E731
    assert_reads_back(kernel, weight, torch.float16)


def test_keys_and_values_may_differ_in_width() -> None:
    parts = {part: awq(64, n, 32, seed=n) for part, n in (("q", 128), ("k", 64), ("v", 32))}
    config = config_of(parts["q"])
    module = QKVParallelLinear(
        64, 32, 4, 2, bias=False, v_head_size=16, params_dtype=torch.float16, quant_config=config
    )
    for part, weight in parts.items():
        load(module, weight.fields(), part)

    outputs = ready(module)(torch.eye(64)).split([128, 64, 32], -1)

    for got, weight in zip(outputs, parts.values(), strict=True):
        assert torch.equal(got.T, weight.dequantize())


PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True}
CHANNEL = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}


def compressed(groups: dict[str, Any], *ignore: str) -> WeightsLoader:
    return loader_from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups,
            "ignore": list(ignore),
        }
    )


def counted(loader: WeightsLoader, prefix: str, group: int, rank: Rank | None = None) -> Any:
    """A layer of 2 outputs and 16 inputs under a prefix, loaded by rows."""
    codes = (torch.arange(32) % 16).reshape(2, 16)
    named = {f"{prefix}.{name}": tensor for name, tensor in tensors(codes, group).items()}
    return Weights(MemoryStorage(named), loader=loader, process_group=rank).get_weights_row(prefix)


def test_groups_of_128_are_accepted_as_its_kernel_reads_them() -> None:
    """Its own test expects them to be refused."""
    method = read(bits=4, group_size=128).get_quant_method(nn.Linear(128, 64), "a")

    assert isinstance(method, AWQMarlinLinearMethod)


def test_a_group_size_of_minus_one_is_one_group_of_compressed_tensors_too() -> None:
    weight = counted(compressed({"group_0": {"targets": ["Linear"], "weights": CHANNEL}}), "a", -1)

    assert tuple(weight.weight_scale.shape) == (2, 1)
    assert torch.equal(weight.dequantize(), (torch.arange(32) % 16).reshape(2, 16).float() - 8)


def test_groups_of_a_config_have_any_name_and_all_are_read_for_their_targets() -> None:
    loader = compressed(
        {
            "attention": {"targets": ["re:.*attn.*"], "weights": PACKED},
            "mlp": {"targets": ["re:.*mlp.*"], "weights": CHANNEL},
        }
    )

    assert counted(loader, "layers.0.attn.q_proj", 8).config.group_size == 8
    assert counted(loader, "layers.0.mlp.up_proj", -1).config.group_size == -1


def test_an_ignored_layers_1_is_not_layers_10() -> None:
    loader = compressed({"group_0": {"targets": ["Linear"], "weights": PACKED}}, "layers.1")

    assert counted(loader, "layers.10", 8).format == "ct_pack"
    with pytest.raises(ExcludedModuleError, match=r"layers\.1"):
        counted(loader, "layers.1", 8)


def test_rows_of_compressed_tensors_are_cut_with_their_scales() -> None:
    loader = compressed({"group_0": {"targets": ["Linear"], "weights": PACKED}})
    whole = counted(loader, "a", 8).dequantize()

    parts = [counted(loader, "a", 8, rank).dequantize() for rank in FakeWorld(2)]

    assert torch.equal(torch.cat(parts, 1), whole)
