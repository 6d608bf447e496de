"""A model of Llama 3 8B's shape, random GPTQ weights in strips, beside the same code in fp16.

    python -m tests.bench.model [--tokens 1 16] [--blocks 32]

Of a decode step of so many sequences, as a CUDA graph: its time, and that of its quantized linears alone, of
both models, in turns. The step may take 1.05 times what the fp16 step takes with our linears in the place of
its own. Then tokens a second of one sequence, with all that the host does. The fp16 model multiplies by the
dequantized weights, embedding and head are fp16 in both. Nothing is timed before logits are checked: they may
be twice as far from those of float32 products by the same weights as those of the fp16 model.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from qload.detect import loader_from_config
from qload.formats import UnquantizedConfig, UnquantizedWeight
from qload.layouts import gptq
from qload.models import Decoder, Engine, load_model
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.bench.layers import checkpoint
from tests.bench.stack import distance
from tests.bench.timing import replayed

SHAPE = {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}
SPREAD = (56 / 3) ** 0.5  # of codes that are 1 to 15 as likely, the zero point 8 taken off
GROUP, KINDS = 128, 2  # blocks that differ: more would only take longer to make
PROMPT, NEW, TURNS = 64, 96, 5
ALLOWED, WANTED = 1.05, 1.9  # of a step, of tokens a second at M = 1
QUANTIZATION = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False,
    "checkpoint_format": "gptq_v2",  # zero points as they are
}  # fmt: skip


def config_of(blocks: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    """The config of a Llama."""
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": blocks,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "eos_token_id": None,
        "torch_dtype": "float16", "quantization_config": QUANTIZATION,
    }  # fmt: skip


def tensors_of(
    blocks: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int
) -> dict[str, Tensor]:
    """All tensors of its GPTQ checkpoint, of which every `KINDS`th block is the same."""
    keys = hidden // heads * kv_heads
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    kinds = [
        {f"{name}.{part}": tensor for name, each in shapes.items() for part, tensor in packed(*each).items()}
        for _ in range(min(KINDS, blocks))
    ]
    norms = ("input_layernorm", "post_attention_layernorm")
    found = {
        f"model.layers.{n}.{name}": each for n in range(blocks) for name, each in kinds[n % KINDS].items()
    }
    found |= {
        f"model.layers.{n}.{name}.weight": torch.ones(hidden).half() for n in range(blocks) for name in norms
    }
    found |= {f"{name}.weight": drawn(vocab, hidden) for name in ("model.embed_tokens", "lm_head")}
    return found | {"model.norm.weight": torch.ones(hidden).half()}


def packed(K: int, N: int) -> dict[str, Tensor]:
    """A layer's tensors on the CPU: codes of no mean, and products of the size of the inputs."""
    made = checkpoint(K, N, 4, GROUP)
    codes = torch.randint(1, 16, (K, N), device=made.qweight.device, dtype=torch.int32)
    scales = made.scales.float() / made.scales.float().mean() * (K**-0.5 / SPREAD)
    tensors = {**made.fields(), "qweight": gptq.rows(4).pack(codes), "scales": scales.half()}
    return {name: each.cpu() for name, each in tensors.items()}


def drawn(rows: int, columns: int) -> Tensor:
    """An fp16 matrix on the CPU, whose products are of the size of its inputs."""
    return (torch.randn(rows, columns, device="cuda") * columns**-0.5).half().cpu()


def plain(dtype: torch.dtype, weight: Weight, bias: Tensor | None, maximum: Any) -> nn.Module:
    """A layer of the dequantized weight, rounded to fp16, in a dtype."""
    values = weight.dequantize(torch.float16).to(dtype)
    return UnquantizedWeight(config=UnquantizedConfig(), weight=values).get_linear(bias)


def loaded(storage: MemoryStorage, config: dict[str, Any], dtype: torch.dtype, *, quantized: bool) -> Decoder:
    """The model as strips, or with plain linears in a dtype."""
    loader = (
        loader_from_config(QUANTIZATION, target="auto") if quantized else loader_from_config(QUANTIZATION)
    )
    weights = Weights(storage, loader=loader, device="cuda", dtype=dtype)
    return load_model(weights, config, make=None if quantized else partial(plain, dtype))


def linears(model: Decoder) -> list[Any]:
    """The layers that are quantized in one of the models, in the order of their calls."""
    blocks: Any = model.blocks
    each = ((b.self_attn.qkv_proj, b.self_attn.o_proj, b.mlp.gate_up_proj, b.mlp.down_proj) for b in blocks)
    return [layer for layers in each for layer in layers]


def inputs(engine: Engine, M: int, ids: list[int]) -> Tensor:
    """The logits after a prompt and a token of M sequences, which are then ready for a step."""
    engine.reset()
    for sequence in range(M):
        engine.prefill(ids[sequence : sequence + PROMPT], sequence)
    return engine.decode(ids[:M])


def checked(engines: dict[str, Engine], exact: Engine, M: int, ids: list[int]) -> None:
    """SystemExit where strips are further from float32 than twice what fp16 is."""
    want = inputs(exact, M, ids)
    ours, theirs = (distance(inputs(engines[name], M, ids), want) for name in ("strips", "fp16"))
    if not ours <= 2 * theirs:
        raise SystemExit(f"M = {M}: logits of strips are off by {ours:.2e}, those of fp16 by {theirs:.2e}")


def step_call(engine: Engine, M: int) -> Callable[[], Tensor]:
    """A step of M sequences, of which nothing asks the host."""
    ids = torch.ones(M, dtype=torch.int64)
    inputs = [each.cuda() for each in (ids, *engine.places(range(M), 1, engine.width))]
    return lambda: engine.run(*inputs)


def times(engines: dict[str, Engine], M: int) -> dict[str, float]:
    """Microseconds of each model's step and of its linears, in turns."""
    calls: dict[str, list[Callable[[], object]]] = {}
    for name, engine in engines.items():
        calls[f"{name} step"] = [step_call(engine, M)]
        layers = [(layer, layer.input_size_per_partition) for layer in linears(engine.model)]
        xs = {K: torch.randn(M, K, device="cuda").half() for K in {K for _, K in layers}}
        calls[f"{name} linears"] = [partial(layer, xs[K]) for layer, K in layers]
    found = replayed([*calls.values()])
    return {name: time * len(calls[name]) for name, (time, _) in zip(calls, found, strict=True)}


def tokens_a_second(engines: dict[str, Engine], ids: list[int]) -> dict[str, float]:
    """Of one sequence, greedy, the prompt aside, medians of turns."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(TURNS):
        for name, engine in engines.items():
            stream = engine.stream([ids[:PROMPT]], NEW + 1)
            next(stream)
            start = time.perf_counter()
            for _ in stream:
                pass
            seconds[name].append(time.perf_counter() - start)
    return {name: NEW / median(took) for name, took in seconds.items()}


@torch.no_grad()
def show(tokens: list[int], blocks: int) -> None:
    """The tables, on standard output."""
    config, storage = config_of(blocks, **SHAPE), MemoryStorage(tensors_of(blocks, **SHAPE))
    sizes: dict[str, Any] = {"max_tokens": 256, "max_sequences": max(tokens)}
    half, wide = torch.float16, torch.float32
    ids = torch.randint(SHAPE["vocab"], (PROMPT + max(tokens),)).tolist()
    exact = Engine(loaded(storage, config, wide, quantized=False), **sizes)
    engines = {
        name: Engine(loaded(storage, config, half, quantized=name == "strips"), **sizes)
        for name in ("fp16", "strips")
    }
    for M in tokens:
        checked(engines, exact, M, ids)
    del exact
    steps = Table(
        "M", "fp16 step us", "its linears", "strips step us", "its linears", "allowed", "step / allowed"
    )
    for M in tokens:
        found = times(engines, M)
        allowed = (found["fp16 step"] - found["fp16 linears"] + found["strips linears"]) * ALLOWED
        numbers = (*found.values(), allowed)
        steps.add_row(
            f"{M}", *(f"{number:.0f}" for number in numbers), f"{found['strips step'] / allowed:.3f}"
        )
    for engine in engines.values():
        engine.warm_up(PROMPT)
    rates = tokens_a_second(engines, ids)
    speed = Table("M", "fp16 tokens/s", "strips tokens/s", "ratio", "wanted")
    ratio = rates["strips"] / rates["fp16"]
    speed.add_row("1", f"{rates['fp16']:.0f}", f"{rates['strips']:.0f}", f"{ratio:.2f}", f"{WANTED}")
    for table in (steps, speed):
        Console(width=110).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--blocks", type=int, default=32)
    said = parser.parse_args()
    show(said.tokens, said.blocks)
