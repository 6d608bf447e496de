"""Models of tiny sizes through the kernels of a GPU: within the bound, layer by layer."""

from pathlib import Path

import pytest

from qload.verify import Prompt
from qload.verify.logits.logit_check import check_logits
from tests.verify.test_logits import TOKENS, quantized

pytestmark = pytest.mark.gpu
IDS = tuple(range(1, 25))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("asymmetric", "llama"), ("packed", "qwen2"), ("fp8", "llama"), ("nf4", "qwen3"), ("int8", "llama"),
        ("packed", "mixtral"), ("plain", "llama"),
    ],
)  # fmt: skip
def test_no_layer_departs(form: str, kind: str, dtype: str, tmp_path: Path) -> None:
    model = quantized(form, kind, TOKENS if form == "int8" else None)
    model.config["torch_dtype"] = dtype

    found = check_logits(str(model.write(tmp_path)), Prompt(IDS, "cuda"))

    assert found.findings == []
    assert found.numbers["dtype"] == dtype
