"""transformers' `generate` of a Llama 3 8B's shape: random GPTQ weights on qload, beside the same in bf16.

    python -m tests.bench.generate [--sequences 1 16] [--blocks 32]

Greedy, with a static cache and steps that torch compiles (`reduce-overhead`, so graphs). Tokens a second are
those of the longer of two runs less the shorter, so that the prompt counts for nothing; medians of turns. The
step may take 1.05 times what the plain one takes with our linears in the place of its own, which are timed in
a graph. The plain model multiplies by the dequantized weights, embedding and head are plain in both. Nothing
is timed before logits are checked: they may be twice as far from those of float32 as the plain model's are.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig

from qload import open_checkpoint
from qload.engines import transformers as engine
from tests.bench.model import ALLOWED, QUANTIZATION, SHAPE, config_of, tensors_of
from tests.bench.stack import distance
from tests.bench.timing import replayed

HALF = torch.bfloat16
PROMPT, SHORT, LONG, TURNS = 64, 32, 128, 5
WANTED = 1.6  # times the tokens a second of the plain model, one sequence
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def written(folder: Path, blocks: int) -> None:
    """The checkpoint, with what transformers wants to know."""
    config = config_of(blocks, **SHAPE)
    config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": QUANTIZATION}
    config |= {"tie_word_embeddings": False, "bos_token_id": 0}
    tensors = {
        name: tensor.clone() for name, tensor in tensors_of(blocks, **SHAPE).items()
    }  # of its own each
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def plain(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' own model of the dequantized weights, rounded to fp16 and then to `dtype`."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    modules = dict(model.named_modules())
    with open_checkpoint(folder, device="cuda") as weights, torch.no_grad():
        for name, module in modules.items():
            if not name.endswith(PROJECTIONS):
                continue
            module.weight.copy_(weights.get_weights(name).dequantize(torch.float16))
        for name, parameter in model.named_parameters():
            if not any(each in name for each in PROJECTIONS):
                parameter.copy_(weights.get_tensor(name))
    return model


def linears(model: Any) -> list[Any]:
    """The quantized layers of the blocks, or those in their place."""
    return [module for name, module in model.named_modules() if name.endswith(PROJECTIONS)]


def logits(model: Any, ids: Tensor) -> Tensor:
    """Of the last token of each prompt."""
    with torch.no_grad():
        made: Tensor = model(ids, logits_to_keep=1).logits
    return made


def generated(model: Any, ids: Tensor, tokens: int) -> Tensor:
    """So many tokens more, the likeliest each."""
    how = CompileConfig(fullgraph=True, dynamic=False, mode="reduce-overhead")
    options = {"cache_implementation": "static", "compile_config": how, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    made: Tensor = model.generate(ids, max_new_tokens=tokens, **options)
    if made.shape != (len(ids), PROMPT + tokens):
        raise SystemExit(f"generate wrote {tuple(made.shape)} tokens")
    return made


def seconds(call: Callable[[], object]) -> float:
    """Of one call, until the device is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def steps(models: dict[str, Any], ids: Tensor) -> dict[str, float]:
    """Seconds of one step of each model, all that the host does with it."""
    for model in models.values():
        for tokens in (LONG, LONG, SHORT, SHORT):  # which compiles, and makes the cache of the longer one
            generated(model, ids, tokens)
    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(TURNS):
        for name, model in models.items():
            short, long = (seconds(partial(generated, model, ids, tokens)) for tokens in (SHORT, LONG))
            found[name].append((long - short) / (LONG - SHORT))
    return {name: median(each) for name, each in found.items()}


def of_linears(models: dict[str, Any], M: int) -> dict[str, float]:
    """Seconds of the linears alone, in a graph."""
    groups = []
    for model in models.values():
        found = linears(model)
        widths = {layer.in_features for layer in found}
        xs = {K: torch.randn(M, K, device="cuda").to(HALF) for K in widths}
        groups.append([partial(layer, xs[layer.in_features]) for layer in found])
    times = replayed(groups)
    return {name: us * len(group) / 1e6 for name, group, (us, _) in zip(models, groups, times, strict=True)}


@torch.no_grad()
def show(sequences: list[int], blocks: int) -> None:
    """The table, on standard output."""
    table = Table("sequences", "bf16 tokens/s", "qload tokens/s", "ratio", "wanted", "step / allowed")
    with TemporaryDirectory() as name:
        folder = Path(name)
        written(folder, blocks)
        models = {"bf16": plain(folder, HALF), "qload": engine.load(folder, dtype=HALF, device_map="cuda")}
        exact = plain(folder, torch.float32)
    prompts = torch.randint(SHAPE["vocab"], (max(sequences), PROMPT), device="cuda")
    want = logits(exact, prompts)
    del exact
    theirs, ours = (distance(logits(model, prompts), want) for model in models.values())
    if not ours <= 2 * theirs:
        raise SystemExit(f"logits of qload's model are off by {ours:.2e}, those of bf16 by {theirs:.2e}")
    for M in sequences:
        took, alone = steps(models, prompts[:M]), of_linears(models, M)
        allowed = (took["bf16"] - alone["bf16"] + alone["qload"]) * ALLOWED
        rates = [M / each for each in took.values()]
        numbers = f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{rates[1] / rates[0]:.2f}"
        table.add_row(f"{M}", *numbers, f"{WANTED}" * (M == 1), f"{took['qload'] / allowed:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--blocks", type=int, default=32)
    said = parser.parse_args()
    show(said.sequences, said.blocks)
