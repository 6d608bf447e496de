"""Every fixture has its owner's numbers, whole and shared."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from qload.errors import UnsupportedFormatError
from qload.formats import FORMATS
from qload.weights import open_checkpoint
from tests import owners
from tests.paths import cases

INTEGERS = ("gptq", "awq", "exllama", "marlin", "gptq_marlin", "awq_marlin", "gptq_marlin_24")
OTHERS = ("exl2", "eetq", "fp8", "bnb", "compressed_tensors", "modelopt", "mxfp4")
LAYERS = [folder for folder in cases(*INTEGERS, *OTHERS) if (folder / "expected").is_dir()]
LAYERS = [folder for folder in LAYERS if not folder.name.startswith("model_")]
LANES = [
    folder
    for folder in LAYERS
    if folder.parent.name in INTEGERS or folder.name.startswith(("pack_", "marlin_24_"))
]
MODELS = [folder for folder in cases("gptq", "awq") if folder.name.startswith("model_")]


def name(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def read(folder: Path) -> owners.Owned:
    return owners.Owned(
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text())["quantization_config"],
        load_file(folder / "expected" / "expected.safetensors"),
    )


@pytest.mark.parametrize("folder", LAYERS, ids=name)
def test_a_whole_layer_has_its_owners_numbers(folder: Path, tmp_path: Path) -> None:
    owners.check_whole(read(folder), tmp_path)


@pytest.mark.parametrize("folder", LAYERS, ids=name)
def test_every_other_reading_and_every_other_tensor_is_its_owners(folder: Path) -> None:
    owners.check_unmasked(read(folder))
    owners.check_extras(read(folder))


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("folder", LAYERS, ids=name)
def test_shares_have_their_owners_numbers_or_are_refused(folder: Path, world: int, tmp_path: Path) -> None:
    owners.check_shares(read(folder), tmp_path, world)


@pytest.mark.parametrize("folder", LAYERS, ids=name)
def test_every_kernel_tensor_has_the_bytes_of_those_who_write_it(folder: Path) -> None:
    owners.check_repacked(read(folder))


@pytest.mark.parametrize("folder", LAYERS, ids=name)
def test_every_layout_goes_back_to_the_bits_of_the_checkpoint(folder: Path) -> None:
    owners.check_restored(read(folder))


@pytest.mark.parametrize("folder", LANES, ids=name)
def test_a_kernel_that_reads_a_layout_reads_its_owners_numbers(folder: Path) -> None:
    owners.check_emulated(read(folder))


@pytest.mark.parametrize("folder", MODELS, ids=name)
def test_a_model_has_its_owners_numbers_and_nothing_is_left_over(folder: Path) -> None:
    owners.check_model(folder, load_file(folder / "expected" / "expected.safetensors"))


def test_some_fixture_holds_every_format_that_is_read() -> None:
    assert {read(folder).weight.format for folder in LAYERS} | {"unquantized"} == {
        weight_type.format for weight_type in FORMATS
    }


def test_some_fixture_holds_every_reading_and_every_kernel_tensor_that_is_checked() -> None:
    held = {key for folder in LAYERS for key in read(folder).owner}
    checked = {"expected.weight", *owners.UNMASKED, *(f"extra.{key}" for key in owners.EXTRA)}

    assert held == {*checked, *(f"repacked.{key}" for key in owners.REPACKED)}


@pytest.mark.parametrize(
    ("folder", "method"),
    [
        ("gptq_p_b4_g128_sym", "gptq_p"),
        ("awq_gemv_g32_256x96", "awq_gemv"),
        ("awq_gemv_fast_g32_256x96", "awq_gemv_fast"),
    ],
)
def test_a_variant_that_is_not_read_is_refused_by_name(folder: str, method: str, fixtures: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match=rf"{method}: not read by this qload"):
        open_checkpoint(fixtures / "refused" / folder)
