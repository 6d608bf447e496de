"""Report of `inspect` on a layer: derived from its config and its declaration, not from a list of formats."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from qload import dtypes, spec
from qload.checkpoint import LayerInfo
from qload.configs import Claims, FoundConfig, Method
from qload.detect import config_reader
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec
from qload.verify import inspect
from tests.paths import FIXTURES
from tests.verify.checkpoints import model

pytestmark = pytest.mark.usefixtures("seen_texts")

N, K, GROUP = 4, 16, 8
IN_ORDER = [k // GROUP for k in range(K)]


@dataclass(frozen=True)
class UnlistedConfig(spec.Grouped, spec.Config):
    name: ClassVar[str] = "unlisted"

    group_size: int


@dataclass(frozen=True)
class UnlistedBitsConfig(UnlistedConfig):
    bits: int = 8
    symmetric: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class UnlistedWeight(spec.Weight):
    """Codes of one byte, with an optional index of groups, under names in use by other formats."""

    config: UnlistedConfig
    qweight: Tensor
    scales: Tensor
    g_idx: Tensor | None = None

    format: ClassVar[str] = "unlisted"

    @classmethod
    def tensors(cls, config: UnlistedConfig) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("qweight", (dtypes.int8,), "N K", Role.WORD),
            TensorSpec("scales", (dtypes.float16,), "N G", Role.SCALE),
            TensorSpec("g_idx", (dtypes.int32,), "K", Role.INDEX, fact=True, index_of="G", optional=True),
        )

    def codes(self) -> spec.Codes:
        raise AssertionError("inspect reads no codes")


def inspected(
    folder: Path, config: UnlistedConfig, monkeypatch: pytest.MonkeyPatch, index: list[int] | None = None
) -> LayerInfo:
    """Return the only layer of a checkpoint in a format outside every list in qload."""

    def read(found: FoundConfig) -> Claims:
        formats = (ConfiguredFormat(UnlistedWeight, config),)
        return Claims("unlisted", "unlisted", file=found.file, formats=formats)

    tensors = {
        "up.qweight": torch.zeros(N, K, dtype=torch.int8),
        "up.scales": torch.ones(N, K // GROUP, dtype=torch.float16),
    }
    if index is not None:
        tensors["up.g_idx"] = torch.tensor(index, dtype=torch.int32)
    monkeypatch.setitem(config_reader.METHODS, "unlisted", Method(("unlisted",), read, (UnlistedWeight,)))
    report = inspect(model(folder, tensors, quantization_config={"quant_method": "unlisted"}))

    assert report.findings == ()
    (layer,) = report.layers
    return layer


def test_a_format_that_no_list_names_is_told_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = inspected(tmp_path, UnlistedBitsConfig(GROUP), monkeypatch)

    assert (layer.format, layer.shape, layer.dtype) == ("unlisted", (N, K), "float16")
    assert (layer.bits, layer.group_size, layer.sym) == (8, GROUP, False)


def test_what_a_config_does_not_have_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = inspected(tmp_path, UnlistedConfig(GROUP), monkeypatch)

    assert (layer.bits, layer.group_size, layer.sym) == (None, GROUP, None)


@pytest.mark.parametrize(
    ("index", "act_order"),
    [
        pytest.param(None, False, id="no index"),
        pytest.param(IN_ORDER, False, id="in order"),
        pytest.param(IN_ORDER[::-1], True, id="the last group first"),
    ],
)
def test_act_order_is_what_the_declared_index_says(
    index: list[int] | None, act_order: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inspected(tmp_path, UnlistedConfig(GROUP), monkeypatch, index).act_order is act_order


@pytest.mark.parametrize(
    ("case", "told"),
    [
        pytest.param("pack_w4_g128", (4, 128, True, False), id="symmetric"),
        pytest.param("pack_w4_g32_asym", (4, 32, False, False), id="with zero points"),
        pytest.param("pack_w4_g128_act_order", (4, 128, True, True), id="with an index"),
        pytest.param("int_w8_channel", (8, None, None, None), id="bits without a group size"),
    ],
)
def test_what_is_told_of_compressed_tensors(
    case: str, told: tuple[int, int | None, bool | None, bool | None]
) -> None:
    (layer,) = inspect(FIXTURES / "compressed_tensors" / case).layers

    assert (layer.bits, layer.group_size, layer.sym, layer.act_order) == told


@pytest.mark.parametrize(
    ("folder", "dtype", "scales"),
    [
        ("fp8/block_132x32", "float8_e4m3fn", "float32"),
        ("fp8/inverse_tensor_e5m2_16x64", "float8_e5m2", "float32"),
        ("gptq/model_g32_desc_act", "float16", "float16"),
    ],
)
def test_the_dtype_of_a_float_weight_is_its_own_and_not_its_scales(
    folder: str, dtype: str, scales: str
) -> None:
    layers = [layer for layer in inspect(FIXTURES / folder).layers if layer.format != "unquantized"]

    assert {(layer.dtype, layer.scale_dtype) for layer in layers} == {(dtype, scales)}


def test_the_dtype_of_a_plain_weight_is_its_own_and_there_are_no_scales(tmp_path: Path) -> None:
    model(tmp_path, {"up.weight": torch.ones(4, 2, dtype=torch.bfloat16)})

    (layer,) = inspect(tmp_path).layers

    assert (layer.dtype, layer.scale_dtype) == ("bfloat16", None)
