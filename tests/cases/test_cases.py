"""Every case of a foreign folder: `QLOAD_CASES=DIR nox -s cases`.

The folder has an `index.json` with a list of cases, a safetensors file for each, and `models/`.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qload.detect import loader_from_config
from qload.errors import QloadError
from qload.formats import UnquantizedWeight
from qload.storage import MemoryStorage
from qload.verify import inspect, verify
from qload.weights import Weights, open_checkpoint
from tests import owners

FOLDER = os.environ.get("QLOAD_CASES")
READ = (  # whose checkpoint tensors are read
    "gptq", "awq_gemm", "exllama_gptq", "marlin", "gptq_marlin", "awq_marlin", "gptq_marlin_24",
)  # fmt: skip
CASES = json.loads((Path(FOLDER) / "index.json").read_text())["cases"] if FOLDER else []
MODELS = sorted((Path(FOLDER) / "models").iterdir()) if FOLDER else []

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
    return owners.Owned(mine, case["config"], {n: t for n, t in held.items() if n not in mine})


@pytest.mark.parametrize("case", of(*READ))
def test_a_whole_layer_has_its_owners_numbers(case: dict[str, Any], tmp_path: Path) -> None:
    owners.check_whole(read(case), tmp_path)
    owners.check_unmasked(read(case))


@pytest.mark.parametrize("case", of(*READ))
def test_every_kernel_tensor_has_the_bytes_of_those_who_write_it(case: dict[str, Any]) -> None:
    owners.check_repacked(read(case))


@pytest.mark.parametrize("case", of(*READ))
def test_every_layout_means_the_same_goes_back_and_is_read_alike(case: dict[str, Any]) -> None:
    owners.check_restored(read(case))
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


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_a_model_is_read_and_clean_or_refused_by_name(folder: Path) -> None:
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    if method not in ("gptq", "awq"):
        assert inspect(folder).verdict == verify(folder).verdict == "unreadable"
        assert method in verify(folder).findings[0].message
        return

    assert (inspect(folder).findings, verify(folder).findings) == ((), ())
    expected = load_file(folder / "EXPECTED.safetensors")
    kinds: Counter[bool] = Counter()
    with open_checkpoint(folder) as weights:
        for prefix in sorted({name.rpartition(".")[0] for name in list(weights.storage.keys())}):
            weight = weights.get_weights(prefix)
            kinds[isinstance(weight, UnquantizedWeight)] += 1
            want = expected.get(f"dequant.{prefix}.weight")
            if want is not None:
                assert torch.equal(weight.dequantize().to(want.dtype), want)
        assert weights.report().complete
    assert kinds[True]
    assert kinds[False]
