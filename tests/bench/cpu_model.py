"""A model of Llama 3.2 1B's shape on a CPU, random 4-bit GPTQ weights in panels, beside the same in bfloat16.

    python -m tests.bench.cpu_model [--blocks 16] [--new 16] [--turns 3]

Tokens a second of one sequence, by what `qload run` runs, the prompt aside: the medians of turns. Embedding
and head are bfloat16 in both, and the bfloat16 model multiplies by the dequantized weights. Beside them
stands the share of the head in a token: the median of its calls over that of the token. Nothing is timed
before the logits are checked: they may be twice as far from those of float32 products as those of bfloat16.
"""

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qload import native
from qload.detect import loader_from_config
from qload.layouts import gptq
from qload.models import Engine, load_model
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.bench.model import GROUP, QUANTIZATION, SPREAD, config_of, plain
from tests.bench.stack import distance

SHAPE = {"hidden": 2048, "inner": 8192, "heads": 32, "kv_heads": 8, "vocab": 128256}
PROMPT = 16


def packed(K: int, N: int) -> dict[str, Tensor]:
    """A layer's tensors: codes of no mean, and products of the size of the inputs."""
    codes, scales = torch.randint(1, 16, (K, N), dtype=torch.int32), torch.rand(K // GROUP, N) + 0.5
    return {
        "qweight": gptq.rows(4).pack(codes),
        "qzeros": gptq.columns(4).pack(torch.full((K // GROUP, N), 8, dtype=torch.int32)),
        "scales": (scales * (K**-0.5 / SPREAD)).half(),
        "g_idx": (torch.arange(K) // GROUP).to(torch.int32),
    }


def tensors_of(
    blocks: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int
) -> dict[str, Tensor]:
    """All tensors of a GPTQ checkpoint, of which every block is the same."""
    keys = hidden // heads * kv_heads
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    block = {f"{name}.{part}": each for name, size in shapes.items() for part, each in packed(*size).items()}
    ones = torch.ones(hidden).bfloat16()
    block |= {f"{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")}
    found = {f"model.layers.{n}.{name}": each for n in range(blocks) for name, each in block.items()}
    matrix = (torch.randn(vocab, hidden) * hidden**-0.5).bfloat16()
    return found | {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix, "model.norm.weight": ones}


def engine_of(storage: MemoryStorage, config: dict[str, Any], dtype: torch.dtype, quantized: bool) -> Engine:
    """The model in panels, or with plain linears in a dtype."""
    loader = loader_from_config(QUANTIZATION, target="auto" if quantized else None)
    weights = Weights(storage, loader=loader, device="cpu", dtype=dtype)
    model = load_model(weights, config, make=None if quantized else partial(plain, dtype))
    return Engine(model, max_tokens=256, max_sequences=1)


def logits(engine: Engine, ids: list[int]) -> Tensor:
    """After a prompt and a token."""
    engine.reset()
    engine.prefill(ids[:PROMPT], 0)
    return engine.decode(ids[:1])


def timed(engine: Engine, ids: list[int], new: int) -> tuple[float, float]:
    """Seconds of a token, and of the head in it: medians over `new` of them."""
    spent: list[float] = []
    head: Any = engine.model.lm_head
    before: list[float] = []
    hooks = (
        head.register_forward_pre_hook(lambda *_: before.append(time.perf_counter())),
        head.register_forward_hook(lambda *_: spent.append(time.perf_counter() - before[-1])),
    )
    took = list[float]()
    stream = engine.stream([ids[:PROMPT]], new + 1)
    next(stream)
    spent.clear()
    start = time.perf_counter()
    for _ in stream:
        now = time.perf_counter()
        took.append(now - start)
        start = now
    for hook in hooks:
        hook.remove()
    return median(took), median(spent)


@torch.no_grad()
def show(blocks: int, new: int, turns: int) -> None:
    """The table, on standard output; SystemExit where logits are further off than allowed."""
    config = config_of(blocks, **SHAPE) | {"torch_dtype": "bfloat16"}
    storage = MemoryStorage(tensors_of(blocks, **SHAPE))
    ids = torch.randint(SHAPE["vocab"], (PROMPT,)).tolist()
    want = logits(engine_of(storage, config, torch.float32, quantized=False), ids)
    engines = {
        name: engine_of(storage, config, torch.bfloat16, quantized=name == "panels")
        for name in ("bfloat16", "panels")
    }
    off = {name: distance(logits(engine, ids), want) for name, engine in engines.items()}
    if not off["panels"] <= 2 * off["bfloat16"]:
        raise SystemExit(
            f"logits of panels are off by {off['panels']:.2e}, of bfloat16 by {off['bfloat16']:.2e}"
        )
    found = dict[str, list[tuple[float, float]]]()
    for _ in range(turns):
        for name, engine in engines.items():
            found.setdefault(name, []).append(timed(engine, ids, new))
    title = f"{native.isa()}, {native.threads()} threads"
    table = Table("model", "tokens/s", "ms a token", "its head", "ratio", title=title)
    tokens = {name: median(token for token, _ in each) for name, each in found.items()}
    for name, each in found.items():
        share = median(head / token for token, head in each)
        ratio = f"{tokens['bfloat16'] / tokens[name]:.2f}"
        table.add_row(name, f"{1 / tokens[name]:.1f}", f"{1e3 * tokens[name]:.1f}", f"{share:.0%}", ratio)
    Console(width=100).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    show(**vars(parser.parse_args()))
