"""`LLM.generate` on a CPU: vLLM's engine, scheduler, pages and compiler, its native operators in torch.

`nox -s vllm` collects this file.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.vllm import natives, ranks, running
from tests.engines.vllm.checkpoints import built
from tests.models.with_transformers import theirs

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM and torch import

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # which vLLM has on a CPU
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [*range(10, 50)]]  # the last one needs two pages
NEW = 8


def generated(folder: Path, **options: Any) -> tuple[Tensor, bool]:
    """The tokens that follow each prompt, the likeliest each; whether Inductor compiled what made them."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    running.Attention.forward = running.OWN_FORWARD
    natives.put_in()
    from vllm import LLM, SamplingParams

    sizes = {"max_model_len": 64, "block_size": 32, "dtype": "float32", "skip_tokenizer_init": True}
    engine = LLM(model=str(folder), quantization="qload", **sizes, **options)
    asked = SamplingParams(max_tokens=NEW, temperature=0, detokenize=False, ignore_eos=True)
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)
    tokens = torch.tensor([each.outputs[0].token_ids for each in found])
    return tokens, bool(torch._dynamo.utils.counters["inductor"])


def wanted(means: Path) -> Tensor:
    """Those of transformers, one prompt after another."""
    model = theirs.AutoModelForCausalLM.from_pretrained(means, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # no token ends a text there either
    asked = {"max_new_tokens": NEW, "do_sample": False}
    return torch.cat([model.generate(torch.tensor([prompt]), **asked)[:, -NEW:] for prompt in PROMPTS])


@pytest.mark.parametrize(
    ("kind", "name", "compiled"),
    [
        ("llama", "gptq", True),
        ("llama", "nf4", True),
        ("llama", "w4a16", False),
        ("qwen2", "awq", True),
        ("mixtral", "awq", False),
    ],
)
def test_the_tokens_are_those_of_what_the_codes_mean(
    kind: str, name: str, compiled: bool, tmp_path: Path
) -> None:
    folder, _ = built(kind, name, tmp_path, **HEADS)
    how = {"compilation_config": {"custom_ops": ["none"]}, "enforce_eager": not compiled}

    found = ranks.alone(lambda: generated(folder, **how))

    assert not isinstance(found, str), found
    tokens, was_compiled = found
    assert torch.equal(tokens, wanted(tmp_path / "means"))
    assert was_compiled is compiled
