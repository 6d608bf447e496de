"""Names of torch before and after its import, in processes of their own."""

import subprocess
import sys

import pytest

from tests.paths import ROOT

USES = {
    "an attribute": "module.torch.float32",
    "a check of arguments after an import by others": "import torch; module.check_type('a', 'text', str)",
    "a check of fields after an import by others": """
import torch
from qload.errors import ArgumentError
try:
    module.GPTQWeight(config=module.GPTQConfig(4, 32), qweight=1, qzeros=1, scales=1)
except ArgumentError as error:
    assert 'torch.Tensor' in str(error), error
""",
}
PROGRAM = """
import sys
import qload.formats.gptq as module

assert "torch" not in sys.modules
assert not isinstance(1, module.Tensor)
{use}
import torch
from qload.lazy_torch import replace_names

replace_names()
assert module.torch is torch
assert module.Tensor is torch.Tensor
from qload.lazy_torch import Tensor
assert Tensor is torch.Tensor
"""


def ended(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    return done.stderr


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_names_become_torchs_own_in_every_module(use: str) -> None:
    use = use.replace("module.check_type", "__import__('qload.errors').errors.check_type")

    assert ended(PROGRAM.format(use=use)) == ""


def test_a_tensor_is_one_for_a_module_that_has_not_used_torch() -> None:
    program = """
import sys
import qload.formats.gptq as module
import torch

assert module.Tensor is not torch.Tensor
assert isinstance(torch.ones(1), module.Tensor)
assert not isinstance("text", module.Tensor)
"""
    assert ended(program) == ""


def test_names_are_torchs_own_where_it_is_imported_first() -> None:
    program = """
import torch
import qload.formats.gptq as module

assert module.torch is torch
assert module.Tensor is torch.Tensor
"""
    assert ended(program) == ""
