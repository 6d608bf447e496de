"""Histograms of scales and maps of errors: by hand, and of a checkpoint with a fault in a known place."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qload import convert, verify
from qload.pictures import layer_pictures
from qload.pictures.histograms import LayerPictures, _scale_histogram, format_histogram
from qload.spec import Role, TensorSpec
from qload.storage import MemoryStorage
from qload.testing import make_checkpoint
from qload.verify.comparison import ErrorMap
from tests.paths import FIXTURES
from tests.verify.checkpoints import GPTQ, gptq, model

UP = "model.layers.0.mlp.up_proj"


def drawn(want: torch.Tensor, got: torch.Tensor, step: int = 3) -> str:
    found = ErrorMap(*want.shape[-2:])
    for at in range(0, len(want), step):
        found.add(at, got[at : at + step], want[at : at + step])
    return found.text()


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, ""),
        ({-3: 5}, "2^-3: 5"),
        ({-3: 5, 0: 1}, "2^-3: 5 0 0 1"),
        ({2: 1, 1: 7}, "2^1: 7 1"),
    ],
)
def test_powers_without_a_scale_are_counted_too(counts, text):
    assert format_histogram(counts) == text


def test_scales_are_counted_by_their_powers_of_two(tmp_path: Path):
    """Zeros and what is not finite are on no side of any power."""
    scales = torch.tensor([[0.5, -0.75, 1.0, 1.99, 4.0, 0.0, torch.inf, torch.nan]]).half()
    stored = gptq("up") | {"up.scales": scales.repeat(2, 1)}

    assert layer_pictures(model(tmp_path, stored, quantization_config=GPTQ))["up"].scales == "2^-1: 4 4 0 2"


@pytest.mark.parametrize(
    ("factor", "digit"),
    [(0.0, 0), (2.0**-20, 1), (0.1, 5), (0.125, 6), (0.24, 6), (0.25, 7), (0.5, 8), (1.0, 9), (30.0, 9)],
)
def test_each_step_is_twice_as_far(factor, digit):
    want = torch.ones(8, 4)

    assert drawn(want, want * (1 + factor)).split(": ")[1] == " ".join([str(digit) * 4] * 8)


def test_a_map_says_where():
    """Of 32 x 48 values each digit is for two rows and three columns."""
    want = torch.ones(32, 48)
    got = want.clone()
    got[30, 5] = 3.0
    whole, rows = drawn(want, got).split(": ")
    lines = rows.split(" ")

    assert [len(lines), len(lines[0])] == [16, 16]
    assert [(r, c) for r, line in enumerate(lines) for c, digit in enumerate(line) if digit != "0"] == [
        (15, 1)
    ]
    assert lines[15][1] == "8"  # 2 beside the root of 6
    assert float(whole) == pytest.approx(2 / (32 * 48) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_as_far_as_can_be(value):
    want = torch.ones(2, 2)
    got = want.clone()
    got[0, 1] = value

    assert drawn(want, got).split(": ")[1] == "09 00"


def test_errors_where_the_reference_is_zero_are_as_far_as_can_be():
    assert drawn(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])).split(": ")[1] == "09"


def test_a_stack_of_matrices_has_no_map():
    assert drawn(torch.ones(2, 2, 2), torch.ones(2, 2, 2)) == ""


def test_a_checkpoint_beside_what_it_means_has_errors_where_it_is_damaged(tmp_path: Path):
    one, other = tmp_path / "coded", tmp_path / "plain"
    make_checkpoint("gptq", one, config={"num_hidden_layers": 1})
    convert(one, other, to="float32")
    stored = load_file(other / "model.safetensors")
    assert len({*stored[f"{UP}.weight"].shape}) == 2
    stored[f"{UP}.weight"][-1, -1] += 100
    save_file(stored, other / "model.safetensors", {"format": "pt"})

    report = verify(one, against=other, error_maps=True)
    found = layer_pictures(one, report.error_maps)
    lines = found[UP].error.split(": ")[1].split(" ")

    assert lines[-1][-1] != "0"
    assert {*"".join(lines)[:-1]} == {"0"}
    assert {each for name, p in found.items() if name != UP and p.error for each in p.error[3:]} <= {*"0: "}
    assert found[UP].scales
    assert layer_pictures(one)[UP].error == ""
    assert verify(one, against=other).error_maps == {}


def test_a_layer_that_is_its_reference_byte_for_byte_is_drawn_as_one_that_means_it(tmp_path: Path):
    one, other = tmp_path / "coded", tmp_path / "plain"
    make_checkpoint("gptq", one, config={"num_hidden_layers": 1})
    convert(one, other, to="float32")

    maps = [verify(one, against=place, error_maps=True).error_maps for place in (one, other)]

    assert maps[0] == maps[1]
    assert maps[0][UP] == f"0: {' '.join(['0' * 16] * 16)}"
    assert not any("norm" in name for name in maps[0])


def test_what_is_not_there_or_has_another_shape_has_no_picture(tmp_path: Path):
    assert layer_pictures(tmp_path) == {}
    one = tmp_path / "one"
    make_checkpoint("gptq", one, config={"num_hidden_layers": 1})
    maps = verify(one, against=FIXTURES / "models" / "gptq_mixtral", error_maps=True).error_maps

    assert UP not in maps
    assert verify(one, against=tmp_path / "none", error_maps=True).error_maps == {}


def test_bytes_of_quantized_scales_are_counted_by_the_scales_over_them() -> None:
    folder, name = FIXTURES / "bnb" / "nf4_nested_bf16_storage_128x256", "model.layers.0.self_attn.v_proj"
    (file,) = folder.glob("*.safetensors")
    scales = load_file(file)[f"{name}.weight.nested_absmax"]
    steps: list[tuple[str, int, int]] = []

    pictures = layer_pictures(folder, {name: "0.5: 12"}, progress=lambda *step: steps.append(step))

    powers = [int(size.abs().log2().floor()) for size in scales]
    counts = [powers.count(power) for power in range(min(powers), max(powers) + 1)]
    assert pictures == {name: LayerPictures(f"2^{min(powers)}: {' '.join(map(str, counts))}", "0.5: 12")}
    assert [stage for stage, _, _ in steps] == ["scales"] * len(steps)
    assert steps[0][1] == 0
    assert steps[-1][1] == steps[-1][2] > scales.nbytes


def test_a_scale_that_cannot_be_read_has_no_histogram() -> None:
    scales = TensorSpec("scales", (torch.float16,), "N", Role.SCALE)
    stored = MemoryStorage({"up.scales": torch.ones(4).half()})

    assert _scale_histogram(stored, [("up.scales", scales)]) == "2^0: 4"
    assert _scale_histogram(stored, [("up.scales", scales), ("up.gone", scales)]) == ""
