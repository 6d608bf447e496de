"""Every fixture has its owner's numbers, whole and shared."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from qload.checkpoint import open_checkpoint
from qload.errors import UnsupportedFormatError
from qload.formats import FORMATS, ComfyAWQWeight, ComfyW4A8Weight, GGUFWeight
from tests.paths import FOLDERS, cases
from tests.support import owners

LAYERS = [folder for folder in cases(*FOLDERS) if (folder / "expected").is_dir()]
LAYERS = [folder for folder in LAYERS if not folder.name.startswith("model_")]
MODELS = [folder for folder in cases("gptq", "awq") if folder.name.startswith("model_")]


def name(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


@cache
def read(folder: Path) -> owners.Owned:
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata() or {}
    return owners.Owned(
        load_file(folder / "model.safetensors"),
        config_of(folder),
        load_file(folder / "expected" / "expected.safetensors"),
        metadata,
    )


def of_integers(folder: Path) -> bool:
    """Whether every layer of a fixture is of a format that kernels' lanes are emulated for."""
    weight_types = [each.weight_type for each in read(folder).loader.formats]
    if read(folder).weight.layer.transforms is not None:  # around the codes that a kernel reads
        return False
    return all(issubclass(each, owners.INTEGERS) for each in weight_types if not each.plain)


LANES = [folder for folder in LAYERS if of_integers(folder)]
NEEDS_A_FIXTURE = """
No folder under fixtures/ holds a layer of: {}.
Add fixtures/FORMAT/CASE/ with config.json, model.safetensors, expected/expected.safetensors (its key
"expected.weight" is what the format's own tool dequantizes to) and ORIGIN.toml (tool, seed).
docs/extending/format.md, section 3, has an example."""


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
    held = {type(read(folder).weight) for folder in LAYERS}
    held.add(GGUFWeight)  # in tests/formats/test_gguf.py, as these fixtures are no safetensors
    held |= {ComfyW4A8Weight, ComfyAWQWeight}  # in tests/formats/test_comfy.py, as these files have no config
    missing = [each.format for each in FORMATS if each not in held and not each.plain]

    assert not missing, NEEDS_A_FIXTURE.format(", ".join(missing))


def test_some_fixture_holds_every_reading_and_every_kernel_tensor_that_is_checked() -> None:
    held = {key for folder in LAYERS for key in read(folder).owner}
    checked = {
        *owners.COMPARED,
        *owners.ACTIVATIONS,
        *owners.UNMASKED,
        *(f"extra.{key}" for key in owners.EXTRA),
    }

    known = {
        *checked,
        *(f"repacked.{key}" for key in owners.REPACKED),
        *(f"repacked.{key}" for key in owners.REPACKED_FP4 if key.startswith("vllm033.")),
    }
    assert not held - known, f"add to REPACKED or EXTRA of tests/support/owners.py: {sorted(held - known)}"
    assert not known - held, (
        f"tests/support/owners.py names {sorted(known - held)}, of which no fixture is left"
    )


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
