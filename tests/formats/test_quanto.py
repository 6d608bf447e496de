"""quanto: types by map, by config and by tensors; groups, shifts, shares, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.detect import loader_from_config
from qload.errors import CutError, ShapeError, UnsupportedFormatError
from qload.formats import CTIntWeight, Fp8Weight, QuantoConfig, QuantoWeight, UnquantizedWeight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.verify import verify
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
MODEL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


def packed(N: int, K: int, bits: int, group: int, shift: Any = None) -> tuple[dict[str, Tensor], Tensor]:
    """Return a layer's tensors, and its weight; products and differences are exact."""
    codes = torch.arange(N * K).reshape(-1, group) * 7 % 2**bits
    count, per = len(codes), 8 // bits
    scales = 2.0 ** (torch.arange(count)[:, None] % 4 - 1)
    shifts = torch.arange(count)[:, None] % 5 - 2.0 if shift is None else shift(count)
    zeros = shifts if not shifts.is_floating_point() else 0
    weight = ((codes - zeros) * scales - (shifts if shifts.is_floating_point() else 0)).reshape(N, K)
    filled = torch.cat([codes, codes.new_zeros(-count % per, group)]).reshape(per, -1, group)
    words = sum(block << bits * at for at, block in enumerate(filled)).to(torch.uint8)
    tensors = {"weight._data._data": words, "weight._scale": scales.bfloat16()}
    tensors["weight._shift"] = shifts.bfloat16() if shifts.is_floating_point() else shifts
    return tensors | {"input_scale": torch.ones(()), "output_scale": torch.ones(())}, weight


def eight(N: int, K: int, dtype: torch.dtype) -> dict[str, Tensor]:
    codes = (torch.arange(N * K).reshape(N, K) % 17 - 8).to(dtype)
    return {"weight._data": codes, "weight._scale": torch.full((N, 1), 0.5)}


def save(folder: Path, layers: dict[str, dict[str, Tensor]], **files: Any) -> Path:
    tensors = {
        f"{prefix}.{name}": tensor for prefix, layer in layers.items() for name, tensor in layer.items()
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def entry(kind: str, inputs: str = "none") -> dict[str, str]:
    return {"weights": kind, "activations": inputs}


def test_a_layer_by_hand() -> None:
    """Two groups of two codes: 3 and 10, low bits first; bfloat16 rounds 10 * 1.1015625 to 11, then - 0.5."""
    weight = QuantoWeight(
        config=QuantoConfig(bits=4, K=2),
        weight=torch.tensor([[0xA3, 0x0F]], dtype=torch.uint8),
        weight_scale=torch.tensor([[1.0], [1.1015625]]).bfloat16(),
        weight_shift=torch.tensor([[0.25], [0.5]]).bfloat16(),
    )

    assert weight.dequantize().tolist() == [[2.75, 14.75], [10.5, -0.5]]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("shift", [None, lambda count: torch.arange(count)[:, None].to(torch.uint8) % 4])
def test_groups_follow_the_models_config(tmp_path: Path, bits: int, shift: Any) -> None:
    up, up_weight = packed(256, 128, bits, 128, shift)
    down, down_weight = packed(128, 256, bits, 128, shift)
    kinds = {UP: entry(f"qint{bits}"), DOWN: entry(f"qint{bits}")}
    save(tmp_path, {UP: up, DOWN: down}, config=MODEL, quanto_qmap=kinds)

    for world in (1, 2, 4):
        ranks = [open_checkpoint(tmp_path, process_group=rank) for rank in FakeWorld(world)]
        for name, want, K in ((UP, up_weight, 128), (DOWN, down_weight, 256)):
            rows = [weights.get_weights_col(name) for weights in ranks]
            assert {row.config.group_size for row in rows} == {-1 if K == 128 else 128}
            assert torch.equal(torch.cat([row.dequantize() for row in rows]), want)
        if world == 4:
            with pytest.raises(CutError, match=r"multiples of 128"):
                ranks[0].get_weights_row(DOWN)
            continue
        for name, want in ((UP, up_weight), (DOWN, down_weight)):
            shares = [weights.get_weights_row(name).dequantize() for weights in ranks]
            assert torch.equal(torch.cat(shares, 1), want)
        assert not any(weights.report().unused for weights in ranks)
        fused = torch.cat([w.get_weights_col_packed(UP, 2).dequantize() for w in ranks])
        assert torch.equal(fused.reshape(world, 2, -1, 128).swapaxes(0, 1).reshape(256, 128), up_weight)


def test_a_map_names_the_type_of_each_module(tmp_path: Path) -> None:
    kinds = {"a": entry("qint8"), "b": entry("qfloat8_e4m3fn"), "d": entry("none", "qint8")}
    layers = {"a": eight(8, 16, torch.int8), "b": eight(8, 16, torch.float8_e4m3fn)}
    plain = {"weight": torch.ones(8, 16), "input_scale": torch.ones(()), "output_scale": torch.ones(())}
    save(tmp_path, {**layers, "c": {"weight": torch.ones(8, 16)}, "d": plain}, config={}, quanto_qmap=kinds)

    with open_checkpoint(tmp_path) as weights:
        loaded = {name: weights.get_weights(name) for name in "abcd"}
        assert weights.report().complete

    assert [type(weight) for weight in loaded.values()] == [
        CTIntWeight, Fp8Weight, UnquantizedWeight, UnquantizedWeight,
    ]  # fmt: skip
    codes = (torch.arange(128).reshape(8, 16) % 17 - 8) / 2
    assert all(torch.equal(loaded[name].dequantize(), codes) for name in "ab")
    report = verify(tmp_path)
    assert report.verdict == "ok"
    note = "quanto_qmap.json quantizes inputs to qint8; linears of qload take them as they are"
    assert note in report.notes


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_layers_of_one_output_have_a_scale_without_axes(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = eight(1, 16, dtype)
    stored["weight._scale"] = torch.tensor(0.5).bfloat16()
    kind = "qint8" if dtype == torch.int8 else "qfloat8_e4m3fn"
    save(tmp_path, {"gate": stored}, config={}, quanto_qmap={"gate": entry(kind)})

    for world in (1, 2):
        ranks = [open_checkpoint(tmp_path, process_group=rank) for rank in FakeWorld(world)]
        parts = [weights.get_weights_row("gate").dequantize() for weights in ranks]
        assert torch.equal(torch.cat(parts, 1), (torch.arange(16.0)[None] % 17 - 8) / 2)


def test_tensors_alone_name_the_types(tmp_path: Path) -> None:
    four, weight = packed(8, 48, 4, 48)
    layers = {"a": eight(8, 16, torch.int8), "b": eight(8, 16, torch.float8_e5m2), "c": four}
    save(tmp_path, layers)

    with open_checkpoint(tmp_path) as weights:
        assert torch.equal(weights.get_weights("c").dequantize(), weight)
        assert torch.equal(weights.get_weights("a").dequantize(), weights.get_weights("b").dequantize())
        assert weights.report().complete


@pytest.mark.parametrize("files", [{}, {"config": MODEL, "quanto_qmap": {"score": entry("qint4")}}])
def test_inputs_that_no_file_states_are_refused(files: dict[str, Any], tmp_path: Path) -> None:
    """The architecture of a model does not describe a head of another task."""
    four, want = packed(8, 256, 4, 128)
    save(tmp_path, {"score": four}, **files)

    with open_checkpoint(tmp_path) as weights, pytest.raises(UnsupportedFormatError) as caught:
        weights.get_weights("score")

    assert str(caught.value) == (
        "quanto of unknown sizes: not read by this qload\n"
        "  reason   score.weight._data._data has 8 rows of 128, which leave N and K open\n"
        "  remedy   keep config.json and quanto_qmap.json with the file; for a layer that config.json does "
        "not describe, state QuantoConfig(bits, K=...)"
    )
    stated = FormatLoader(ConfiguredFormat(QuantoWeight, QuantoConfig(4, K=256)))
    storage = MemoryStorage({f"score.{name}": tensor for name, tensor in four.items()})
    assert torch.equal(Weights(storage, loader=stated).get_weights("score").dequantize(), want)


def test_rows_that_two_types_may_have_are_refused() -> None:
    """Two groups fill one row of bytes with 2 and with 4 bits."""
    four, _ = packed(2, 48, 4, 48)
    storage = MemoryStorage({f"up.{name}": tensor for name, tensor in four.items()})
    weights = Weights(storage, loader=loader_from_config(None, storage))

    with pytest.raises(UnsupportedFormatError, match="which leave bits open"):
        weights.get_weights("up")


@pytest.mark.parametrize(("bits", "world"), [(2, 1), (4, 2)])
def test_layers_of_one_output_have_a_scale_for_each_input(bits: int, world: int) -> None:
    tensors, _ = packed(1, 128, bits, 128)
    columns = torch.arange(128.0)[None]
    tensors |= {"weight._scale": (columns % 3).bfloat16(), "weight._shift": (columns % 5 - 2).bfloat16()}
    codes = torch.arange(128)[None] * 7 % 2**bits
    storage = MemoryStorage({f"gate.{name}": tensor for name, tensor in tensors.items()})
    loader = loader_from_config({"quant_method": "quanto", "weights": f"int{bits}"}, storage)
    ranks = [Weights(storage, loader=loader, process_group=rank) for rank in FakeWorld(world)]

    parts = [weights.get_weights_row("gate").dequantize() for weights in ranks]
    assert torch.equal(torch.cat(parts, 1), codes * (columns % 3) - (columns % 5 - 2))


def test_groups_of_one_weight_have_codes_of_zero(tmp_path: Path) -> None:
    """quanto stores zero scales and codes for them, and the weights in the shifts."""
    draw = torch.Generator().manual_seed(0)
    four, _ = packed(256, 128, 4, 128)
    shape = four["weight._data._data"].shape
    four["weight._data._data"] = torch.randint(256, shape, generator=draw).to(torch.uint8)
    gate, _ = packed(1, 128, 4, 128)
    shift = torch.randn(1, 128, generator=draw).bfloat16()
    gate |= {"weight._data._data": torch.zeros(1, 128, dtype=torch.uint8), "weight._shift": shift}
    gate["weight._scale"] = torch.zeros(1, 128).bfloat16()
    save(
        tmp_path,
        {UP: four, "score": gate},
        config=MODEL,
        quanto_qmap=dict.fromkeys((UP, "score"), entry("qint4")),
    )

    with open_checkpoint(tmp_path) as weights:
        assert torch.equal(weights.get_weights("score").dequantize(), -shift.float())
    assert "constant-values" not in {finding.rule for finding in verify(tmp_path).findings}


ROWS = r"up\.weight\._data\._data: wrong shape\n  expected \(16, group size\), for 31 scales"


@pytest.mark.parametrize(
    ("K", "text"), [(128, ROWS), (96, "groups of a layer with K = 96: 32 groups of 128 are none")]
)
def test_shapes_that_fit_no_layer_are_errors(K: int, text: str) -> None:
    four, _ = packed(32, 128, 4, 128)
    if K == 128:
        four["weight._scale"], four["weight._shift"] = four["weight._scale"][:31], four["weight._shift"][:31]
        four["weight._data._data"] = four["weight._data._data"][:15]
    storage = MemoryStorage({f"up.{name}": tensor for name, tensor in four.items()})
    loader = loader_from_config({"quant_method": "quanto", "weights": "int4"}, storage).with_config(K=K)

    with pytest.raises(ShapeError, match=text):
        Weights(storage, loader=loader).get_weights("up")


def test_sizes_that_contradict_the_models_config_are_errors(tmp_path: Path) -> None:
    down, _ = packed(128, 256, 4, 128)
    kinds = {DOWN: entry("qint4")}
    save(tmp_path, {DOWN: down}, config={**MODEL, "intermediate_size": 512}, quanto_qmap=kinds)

    with (
        open_checkpoint(tmp_path) as weights,
        pytest.raises(ShapeError, match=r"128 \* 512 codes of a layer"),
    ):
        weights.get_weights(DOWN)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2])
def test_floats_of_the_type_of_the_map_get_no_note(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = eight(8, 16, dtype)
    kind = f"q{str(dtype).removeprefix('torch.')}"
    save(tmp_path, {"a": stored}, config={}, quanto_qmap={"a": entry(kind)})

    with open_checkpoint(tmp_path) as weights:
        assert torch.equal(weights.get_weights("a").dequantize(), stored["weight._data"].float() / 2)
        assert weights.report().notes == ()


def test_floats_of_another_type_than_the_map_get_a_note(tmp_path: Path) -> None:
    stored = eight(8, 16, torch.float8_e5m2)
    save(tmp_path, {"a": stored}, config={}, quanto_qmap={"a": entry("qfloat8_e4m3fn")})

    with open_checkpoint(tmp_path) as weights:
        weights.get_weights("a")
        assert weights.report().notes == (
            "a: the config says float8_e4m3fn, the weight is float8_e5m2",
        )  # fmt: skip
