"""`generate` with a static cache, its steps compiled by Inductor on the CPU, as it compiles them on a GPU.

Only `nox -s transformers` collects this file; it needs a C++ compiler.
"""

import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from tests.engines.transformers.models import greedy, shared

pytestmark = pytest.mark.filterwarnings("ignore")  # of what torch itself imports

TIED: dict[str, Any] = {"tie_word_embeddings": True}


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(("kind", "name"), [("llama", "gptq"), ("llama", "nf4"), ("mixtral", "awq")])
def test_steps_that_inductor_compiled_write_the_same_tokens(kind: str, name: str) -> None:
    stored = shared(kind, name, **TIED)
    model, how = stored.load(), CompileConfig(fullgraph=True, dynamic=False, mode=None)
    how._compile_all_devices = True  # which transformers does not, of its own, on a CPU
    torch._dynamo.reset()
    counters.clear()

    made = greedy(model, cache_implementation="static", compile_config=how)

    assert torch.equal(made, greedy(stored.plain()))
    assert counters["inductor"]
    assert not counters["graph_break"]
