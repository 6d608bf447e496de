"""Every case of a foreign folder: `QLOAD_CASES=DIR nox -s cases`.

The folder has an `index.json` of cases, and a safetensors file for each; `test_models` reads its models.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from qload.detect import loader_from_config
from qload.errors import QloadError
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.support import owners

FOLDER = os.environ.get("QLOAD_CASES")
INTEGERS = (  # that every layout of integers is made from
    "gptq", "awq_gemm", "exllama_gptq", "marlin", "gptq_marlin", "awq_marlin", "gptq_marlin_24",
    "ct_marlin-24", "ct_pack-quantized", "ct_pack-quantized-legacy",
)  # fmt: skip
READ = (  # whose checkpoint tensors are read
    *INTEGERS, "exl2", "eetq", "fp8_tensor", "fp8_channel", "fp8_block", "fp8_gptqmodel_inverse",
    "fp8_marlin", "bnb_nf4", "bnb_fp4", "bnb_int8", "ct_int-quantized", "ct_naive-quantized",
    "ct_float-quantized", "ct_nvfp4-pack-quantized", "ct_mxfp4-pack-quantized", "nvfp4_modelopt",
    "fp4_marlin", "mxfp4_gptoss", "act_int-quantized", "act_float-quantized", "act_nvfp4-pack-quantized",
    "act_mxfp8-quantized", "ct_mxfp8-quantized", "modelopt_w4a16_awq",
)  # fmt: skip
FP4 = {  # by the size of a group, the config of layers that the owner converts without one
    16: {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    32: {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                },
            }
        },
    },
}
CASES = json.loads((Path(FOLDER) / "index.json").read_text())["cases"] if FOLDER else []

pytestmark = pytest.mark.skipif(not FOLDER, reason="QLOAD_CASES names no folder of cases")


def of(*formats: str) -> list[Any]:
    chosen = [case for case in CASES if case["format"] in formats]
    return [pytest.param(case, id=f"{case['format']}-{case['case']}") for case in chosen] or [
        pytest.param({}, id="none")
    ]


def read(case: dict[str, Any]) -> owners.Owned:
    if not case:
        pytest.fail(f"the folder has no case of the formats {READ}")
    held = load_file(Path(FOLDER or "") / case["file"])
    mine = {name: tensor for name, tensor in held.items() if name in case["checkpoint_tensors"]}
    config = case["config"]
    if config is None and case["format"].startswith("fp8"):
        config = {"quant_method": "fp8"}  # the owner converts a layer that no config came with
    if config is None and case["format"] == "fp4_marlin":
        config = FP4[case["group_size"]]
    return owners.Owned(mine, config, {n: t for n, t in held.items() if n not in mine})


@pytest.mark.parametrize("case", of(*READ))
def test_a_whole_layer_has_its_owners_numbers(case: dict[str, Any], tmp_path: Path) -> None:
    owners.check_whole(read(case), tmp_path)
    owners.check_unmasked(read(case))
    owners.check_extras(read(case))


@pytest.mark.parametrize("case", of(*READ))
def test_every_kernel_tensor_has_the_bytes_of_those_who_write_it(case: dict[str, Any]) -> None:
    owners.check_repacked(read(case))


@pytest.mark.parametrize("case", of(*READ))
def test_every_layout_means_the_same_and_goes_back(case: dict[str, Any]) -> None:
    owners.check_restored(read(case))


@pytest.mark.parametrize("case", of(*INTEGERS))
def test_a_kernels_lanes_read_every_layout_alike(case: dict[str, Any]) -> None:
    owners.check_emulated(read(case))


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("case", of(*READ))
def test_shares_have_their_owners_numbers_or_are_refused(
    case: dict[str, Any], world: int, tmp_path: Path
) -> None:
    owners.check_shares(read(case), tmp_path, world)


@pytest.mark.parametrize("case", of(*sorted({case["format"] for case in CASES} - set(READ))))
def test_every_other_format_is_refused_and_never_read_as_plain(case: dict[str, Any]) -> None:
    layer = read(case)

    def load() -> None:
        loader = loader_from_config(case["config"])
        Weights(MemoryStorage(layer.tensors), loader=loader).get_weights(layer.prefix)

    with pytest.raises(QloadError):
        load()
