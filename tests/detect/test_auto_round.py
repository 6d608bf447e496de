"""AutoRound: the tensors of each `packing_format`, and entries of `extra_config` for single modules."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.configs import FoundConfig
from qload.detect import loader_from_config, read_claims, read_configs
from qload.errors import (
    ConfigError,
    CutError,
    ExcludedModuleError,
    UnsupportedFormatError,
)
from qload.formats import (
    AWQWeight,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackWeight,
    Fp8Weight,
    GPTQWeight,
    UnquantizedWeight,
)
from qload.layouts import STORED_MINUS_ONE, Stored, ZeroPoints
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.kernels.mp_layers import Case
from tests.paths import FIXTURES

pytestmark = pytest.mark.usefixtures("seen_texts")

AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
PREFIX = "model.layers.0.mlp.gate_proj"


def formats(**changes: Any) -> tuple[type[Weight], Any]:
    fmt = loader_from_config({**AUTO_ROUND, **changes}).formats[0]
    return fmt.weight_type, fmt.config


@pytest.mark.parametrize(
    ("packing", "zeros"),
    [
        pytest.param("auto_round:auto_gptq", STORED_MINUS_ONE, id="GPTQ"),
        pytest.param("auto_round:gptq", STORED_MINUS_ONE, id="the tool's other name for it"),
        pytest.param("auto_round:gptqmodel", Stored(), id="GPTQModel"),
        pytest.param("auto_round", Stored(), id="its own"),
        pytest.param(None, STORED_MINUS_ONE, id="nothing said"),
    ],
)
def test_the_packing_says_how_zero_points_are_stored(packing: str | None, zeros: ZeroPoints) -> None:
    weight_type, config = formats(packing_format=packing)

    assert weight_type is GPTQWeight
    assert (config.bits, config.group_size, config.zeros) == (4, 32, zeros)


@pytest.mark.parametrize(
    ("backend", "zeros"),
    [
        ("auto_round:exllamav2", Stored()),
        ("auto_round:tritonv2", Stored()),
        ("auto_round:gptq:exllamav2", STORED_MINUS_ONE),
        ("auto_round:gptq", STORED_MINUS_ONE),
        ("gptq:exllamav2", STORED_MINUS_ONE),
        ("auto", STORED_MINUS_ONE),
    ],
)
@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_a_backend_says_it_where_there_is_no_packing(backend: str, zeros: ZeroPoints, method: str) -> None:
    assert formats(quant_method=method, backend=backend)[1].zeros == zeros
    packed = formats(quant_method=method, backend=backend, packing_format="auto_round:gptqmodel")
    assert packed[1].zeros == Stored()


def test_a_backend_may_mean_awq() -> None:
    assert formats(backend="auto_round:awq")[0] is AWQWeight


@pytest.mark.parametrize("backend", ["auto_round:marlin", "exllamav2", "auto_round:qbits_zp", "hpu"])
def test_a_backend_of_which_nothing_is_certain_is_refused_by_name(backend: str) -> None:
    with pytest.raises(
        UnsupportedFormatError, match=rf"auto-round \(backend {backend}\): not read"
    ) as caught:
        formats(backend=backend)

    assert "set packing_format" in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "weight_type"),
    [
        ({"packing_format": "auto_round:auto_awq"}, AWQWeight),
        ({"packing_format": "auto_round:awq", "bits": 8}, AWQWeight),
        (
            {"packing_format": "auto_round:fp8_static", "bits": 8, "data_type": "fp8", "group_size": -1},
            Fp8Weight,
        ),
        ({"data_type": "nv_fp4_with_static_gs", "group_size": 16}, CTNVFP4Weight),
        ({"data_type": "mx_fp", "group_size": 32}, CTMXFP4Weight),
        ({"data_type": "fp", "bits": 8, "group_size": 0}, Fp8Weight),
        ({"bits": 8, "act_bits": 8, "group_size": -1}, CTIntWeight),
        ({"act_bits": 16}, CTPackWeight),
    ],
)
def test_the_packing_and_the_type_say_whose_tensors_there_are(
    changes: dict[str, Any], weight_type: type[Weight]
) -> None:
    assert formats(**{"packing_format": "auto_round:llm_compressor", **changes})[0] is weight_type


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"packing_format": "auto_round:auto_gptq", "bits": 5}, id="bits that GPTQ has not"),
        pytest.param({"packing_format": "auto_round:auto_awq", "bits": 3}, id="bits that AWQ has not"),
        pytest.param({"group_size": 0}, id="groups of nothing"),
        pytest.param({"bits": "4"}, id="bits in words"),
        pytest.param({"extra_config": {"lm_head": {"bits": 7}}}, id="bits of a module"),
        pytest.param({"extra_config": ["lm_head"]}, id="a list of modules"),
    ],
)
def test_what_no_packing_writes_is_named_by_its_key(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"bits|group_size|extra_config"):
        loader_from_config({**AUTO_ROUND, **changes})


def test_fake_quantized_weights_have_no_format_and_a_note() -> None:
    section = {**AUTO_ROUND, "packing_format": "auto_round:fake"}

    claims = read_claims(FoundConfig("config.json", "quantization_config", section))

    assert claims.formats == ()
    assert claims.notes == (
        "config.json says packing_format fake: weights were quantized and are stored plain",
    )  # fmt: skip


@pytest.mark.parametrize("packing", ["auto_round:mlx", "auto_round:llm_compressor"])
def test_another_packing_is_refused_by_name(packing: str) -> None:
    with pytest.raises(UnsupportedFormatError, match="packing_format of config is not supported"):
        loader_from_config({**AUTO_ROUND, "packing_format": packing, "data_type": "rotated"})


def stored(
    layers: dict[str, dict[str, Tensor]], extra: dict[str, Any] | None = None, **changes: Any
) -> Weights:
    tensors = {f"{prefix}.{name}": t for prefix, layer in layers.items() for name, t in layer.items()}
    loader = loader_from_config(
        {**AUTO_ROUND, "packing_format": "auto_round:gptqmodel", "extra_config": extra, **changes}
    )
    return Weights(MemoryStorage(tensors), loader=loader)


def quantized(bits: int, group: int = 32) -> dict[str, Tensor]:
    return Case(bits=bits, group=group, K=128).weight().fields()


PLAIN = {"weight": torch.ones(4, 8)}


def test_names_come_before_patterns_and_patterns_lie_anywhere() -> None:
    extra = {r"layers\.\d+\.up": {"bits": 8}, "layers.1.up": {"group_size": 64}, "lm_head": {"bits": 8}}
    layers = {"m.layers.0.up": quantized(8), "layers.1.up": quantized(4, 64), "lm_head": quantized(8)}

    weights = stored({**layers, "m.layers.1.down": quantized(4)}, extra)

    said = {prefix: weights.get_weights(prefix).config for prefix in (*layers, "m.layers.1.down")}
    assert [(config.bits, config.group_size) for config in said.values()] == [
        (8, 32),
        (4, 64),
        (8, 32),
        (4, 32),
    ]
    assert not any("bits" in note for note in weights.report().notes)


def test_sixteen_bits_leave_a_module_plain() -> None:
    extra = {".*mlp\\.gate.*": {"bits": 16, "data_type": "float"}, "model.q_proj": {"bits": 16}}
    layers = {"model.mlp.gate": PLAIN, "model.q_proj": PLAIN, "model.mlp.gate_proj": quantized(4)}
    weights = stored({**layers, "model.o_proj": quantized(4)}, extra)

    assert isinstance(weights.get_weights("model.mlp.gate"), UnquantizedWeight)
    assert isinstance(weights.get_weights("model.q_proj"), UnquantizedWeight)
    assert isinstance(weights.get_weights("model.o_proj"), GPTQWeight)
    with pytest.raises(ExcludedModuleError, match="extra_config has"):
        weights.get_weights("model.mlp.gate_proj")


def test_a_name_takes_precedence_over_a_plain_pattern() -> None:
    extra = {"^model.*": {"bits": 16}, "model.mlp.up": {"bits": 4}}
    weights = stored({"model.mlp.up": quantized(4), "model.mlp.down": PLAIN}, extra)

    assert isinstance(weights.get_weights("model.mlp.up"), GPTQWeight)
    assert isinstance(weights.get_weights("model.mlp.down"), UnquantizedWeight)


def test_static_fp8_has_a_scale_for_each_output_in_one_dimension() -> None:
    weight = torch.tensor([[1.0, -2.0], [3.0, 0.5]]).to(torch.float8_e4m3fn)
    layer = {
        "weight": weight,
        "weight_scale": torch.tensor([0.5, 2.0], dtype=torch.bfloat16),
        "input_scale": torch.tensor([0.25], dtype=torch.bfloat16),
    }
    fp8 = {"packing_format": "auto_round:fp8_static", "bits": 8, "data_type": "fp8", "group_size": -1}
    weights = stored({"up": layer}, **fp8)

    loaded = weights.get_weights("up")

    assert loaded.dequantize().tolist() == [[0.5, -1.0], [6.0, 1.0]]
    assert loaded.config.per == "channel"
    assert weights.report().complete


@pytest.mark.parametrize(
    ("packing", "size", "shape"),
    [
        ("auto_round:fp8", 32, (4, 2)),
        ("auto_round:fp8", [2, 32], (2, 2)),
        ("auto_round:fp8", -1, (4, 1)),
        ("auto_round:auto_gptq", 0, (1,)),
        ("auto_round:auto_gptq", -1, (4,)),
    ],
)
def test_group_sizes_of_fp8_are_blocks_outputs_or_the_tensor(
    packing: str, size: Any, shape: tuple[int, ...]
) -> None:
    codes = (torch.arange(4 * 64).reshape(4, 64) % 9 - 4.0).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.arange(torch.Size(shape).numel()).reshape(shape)
    grid = scales.reshape(shape[0], -1)
    spread = grid.repeat_interleave(4 // grid.shape[0], 0).repeat_interleave(64 // grid.shape[1], 1)
    fp8 = {"packing_format": packing, "bits": 8, "data_type": "fp8", "group_size": size}

    weights = stored({"up": {"weight": codes, "weight_scale": scales}}, **fp8)

    assert torch.equal(weights.get_weights("up").dequantize(), codes.float() * spread)
    assert weights.report().notes == ()
    other = torch.ones(1) if size == -1 else torch.ones(4)
    weights = stored({"up": {"weight": codes, "weight_scale": other}}, **fp8)
    assert torch.equal(weights.get_weights("up").dequantize(), codes.float())
    assert "does not name its format" in weights.report().notes[0]


def test_groups_of_fp8_are_cut_between_groups() -> None:
    codes = (torch.arange(4 * 64).reshape(4, 64) % 9 - 4.0).to(torch.float8_e4m3fn)
    layer = {"up.weight": codes, "up.weight_scale": 2.0 ** torch.arange(8.0).reshape(4, 2)}
    section = {"packing_format": "auto_round:fp8", "bits": 8, "data_type": "fp8", "group_size": 32}
    loader = loader_from_config({**AUTO_ROUND, **section})

    for world in (1, 2):
        ranks = [Weights(MemoryStorage(layer), loader=loader, process_group=r) for r in FakeWorld(world)]
        parts = [weights.get_weights_row("up") for weights in ranks]
        assert {part.config.block for part in parts} == {(1, 32)}
        whole = codes.float() * layer["up.weight_scale"].repeat_interleave(32, 1)
        assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), whole)


def test_fake_quantized_weights_are_plain() -> None:
    weights = stored({"up": {"weight": torch.ones(4, 8)}}, packing_format="auto_round:fake")

    assert weights.get_weights("up").plain


def test_the_config_beside_the_model_is_read_where_config_json_has_none(tmp_path: Path) -> None:
    folder = FIXTURES / "auto_round" / "auto_gptq_w4_g32_sym"
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quantization_config.json").write_text(json.dumps(section))

    with open_checkpoint(tmp_path) as weights, open_checkpoint(folder) as same:
        assert_same_bits(weights.get_weights(PREFIX).dequantize(), same.get_weights(PREFIX).dequantize())
    (tmp_path / "quantization_config.json").write_text(json.dumps({"bits": 4}))
    assert not read_configs(tmp_path)[1]  # config of another program, without a method


def test_rows_without_an_index_lie_in_order_and_are_cut_between_groups() -> None:
    folder = FIXTURES / "auto_round" / "auto_gptq_w8_g32_sym_mixed"
    prefix = "model.layers.0.mlp.down_proj"
    with open_checkpoint(folder) as weights:
        whole = weights.get_weights(prefix)
        assert weights.report().notes == (f"{prefix}: g_idx is not stored: the groups are in order",)
    assert whole.g_idx is None
    assert (whole.scales < 0).sum() == 101

    shares = []
    for rank in FakeWorld(3):
        with open_checkpoint(folder, process_group=rank) as weights:
            shares.append(weights.get_weights_row(prefix))
    assert_same_bits(torch.cat([share.dequantize() for share in shares], 1), whole.dequantize())
    for rank in FakeWorld(2):
        with open_checkpoint(folder, process_group=rank) as weights, pytest.raises(CutError, match="of 32"):
            weights.get_weights_row(prefix)


def test_the_claims_name_the_method_and_the_packing() -> None:
    found = FoundConfig(
        "config.json", "quantization_config", {**AUTO_ROUND, "packing_format": "auto_round:awq"}
    )

    claims = read_claims(found)

    assert (claims.method, claims.format, claims.bits, claims.sym) == ("auto-round", "awq", 4, True)
