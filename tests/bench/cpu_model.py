"""A model of Llama 3.2 1B's shape on a CPU, random 4-bit GPTQ weights in panels, beside the same in bfloat16.

    python -m tests.bench.cpu_model [--blocks 16] [--new 16] [--turns 3]

Tokens a second of one sequence, by what `qload run` runs, the prompt aside: the medians of turns. The same
model is run in bfloat16 by the same code, with the dequantized weights, and by transformers, where it is
installed, over the memory of these weights, by its model alone without its `generate`. Embedding and head are
bfloat16 in all. Beside them stand the time of the head in a token, and for how long all cores worked. Nothing
is timed before the logits are checked: they may be twice as far from those of float32 products as those of
bfloat16.

Where other programs keep the cores busy, OMP_WAIT_POLICY=passive has every model wait without taking them,
and the time for which cores worked is the one to look at.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from qload import native
from qload.detect import loader_from_config
from qload.layouts import gptq
from qload.models import Engine, load_model
from qload.spec import Weight
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


class Shared:
    """Layers of the dequantized weights in a dtype; `once`: one for all blocks, which are alike."""

    def __init__(self, dtype: torch.dtype, *, once: bool) -> None:
        self.dtype, self.once = dtype, once
        self._made: dict[str, nn.Module] = {}

    def __call__(self, weight: Weight, bias: Tensor | None, maximum: Any) -> nn.Module:
        """The layer of a weight."""
        within = weight.layer.name.partition(".layers.")[2].partition(".")[2]
        if not self.once or not within:
            return plain(self.dtype, weight, bias, maximum)
        if within not in self._made:
            self._made[within] = plain(self.dtype, weight, bias, maximum)
        return self._made[within]


def engine_of(
    storage: MemoryStorage, config: dict[str, Any], dtype: torch.dtype, make: Shared | None
) -> Engine:
    """The model in panels, or of the layers that `make` makes."""
    loader = loader_from_config(QUANTIZATION, target="auto" if make is None else None)
    weights = Weights(storage, loader=loader, device="cpu", dtype=dtype)
    return Engine(load_model(weights, config, make=make), max_tokens=256, max_sequences=1)


def logits(engine: Engine, ids: list[int]) -> Tensor:
    """After a prompt and a token."""
    engine.reset()
    engine.prefill(ids[:PROMPT], 0)
    return engine.decode(ids[:1])


def of_transformers(engine: Engine, config: dict[str, Any]) -> Any:
    """transformers' model of the same shape, over the memory of a model of plain layers."""
    import transformers

    said = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**said))
    own: Any = engine.model
    held = {
        "model.embed_tokens.weight": own.embed_tokens.weight,
        "lm_head.weight": own.lm_head.typed_linear.weight,
    }
    held["model.norm.weight"] = own.norm.weight
    for n, block in enumerate(own.blocks):
        attention, forward = block.self_attn, block.mlp
        queries, keys = attention.heads
        sizes = [count * attention.config.head_dim for count in (queries, keys, keys)]
        parts = dict(zip("qkv", attention.qkv_proj.typed_linear.weight.split(sizes), strict=True))
        gate, up = forward.gate_up_proj.typed_linear.weight.chunk(2)
        layers = {f"self_attn.{name}_proj": each for name, each in parts.items()}
        layers |= {
            "self_attn.o_proj": attention.o_proj.typed_linear.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
        }
        layers |= {"mlp.down_proj": forward.down_proj.typed_linear.weight}
        layers |= {"input_layernorm": block.input_layernorm.weight}
        layers |= {"post_attention_layernorm": block.post_attention_layernorm.weight}
        held |= {f"model.layers.{n}.{name}.weight": each for name, each in layers.items()}
    model.load_state_dict(held, assign=True)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(rotary.config)  # whose frequencies are in no checkpoint
    return model.eval()


def ran(model: Any, ids: list[int]) -> Iterator[Tensor]:
    """The logits (vocab,) after a prompt, and then of one likeliest token after another."""
    past, taken = None, torch.tensor([ids])
    while True:
        made = model(taken, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, last = made.past_key_values, made.logits[0, -1]
        yield last
        taken = last.argmax().view(1, 1)


class Took(NamedTuple):
    """Seconds of a token, of the head in it, and for which cores worked on a token, and on the head."""

    token: float
    head: float
    work: float
    head_work: float


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def timed(stream: Iterator[Any], head: Any, new: int) -> Took:
    """Medians over `new` tokens, after the first."""
    spent, before, took = (list[tuple[float, float]]() for _ in range(3))
    hooks = (
        head.register_forward_pre_hook(lambda *_: before.append(now())),
        head.register_forward_hook(lambda *_: spent.append(since(before[-1]))),
    )
    next(stream)
    spent.clear()
    for _ in range(new):
        start = now()
        next(stream)
        took.append(since(start))
    for hook in hooks:
        hook.remove()
    (token, work), (of_head, head_work) = (map(median, zip(*each, strict=True)) for each in (took, spent))
    return Took(token, of_head, work, head_work)


def since(start: tuple[float, float]) -> tuple[float, float]:
    clock, work = now()
    return clock - start[0], work - start[1]


Run = Callable[[], tuple[Iterator[Any], Any]]


def checked(storage: MemoryStorage, config: dict[str, Any], ids: list[int]) -> dict[str, Run]:
    """What begins a run of each model, and its head; SystemExit where logits are further off than allowed."""
    narrow = torch.bfloat16
    want = logits(engine_of(storage, config, torch.float32, Shared(torch.float32, once=True)), ids)
    engines = {
        "qload, bfloat16": engine_of(storage, config, narrow, Shared(narrow, once=False)),
        "qload, panels": engine_of(storage, config, narrow, None),
    }
    off = {name: distance(logits(engine, ids), want) for name, engine in engines.items()}
    runs: dict[str, Run] = {}
    if find_spec("transformers"):
        model = of_transformers(engines["qload, bfloat16"], config)
        runs["transformers, bfloat16"] = lambda: (ran(model, ids), model.lm_head)
        past = model(torch.tensor([ids]), use_cache=True).past_key_values
        off |= {
            "transformers": distance(model(torch.tensor([ids[:1]]), past_key_values=past).logits[0], want)
        }
    for name, each in off.items():
        if not each <= 2 * off["qload, bfloat16"]:
            raise SystemExit(f"logits of {name} are off by {each:.2e}: {off}")
    return runs | {name: partial(_begun, engine, ids) for name, engine in engines.items()}


def _begun(engine: Engine, ids: list[int]) -> tuple[Iterator[Any], Any]:
    return engine.stream([ids], engine.max_tokens - len(ids)), engine.model.lm_head


@torch.no_grad()
def show(blocks: int, new: int, turns: int) -> None:
    """The table, on standard output; SystemExit where logits are further off than allowed."""
    config = config_of(blocks, **SHAPE) | {"torch_dtype": "bfloat16"}
    ids = torch.randint(SHAPE["vocab"], (PROMPT,)).tolist()
    runs = checked(MemoryStorage(tensors_of(blocks, **SHAPE)), config, ids)
    found = dict[str, list[Took]]()
    for _ in range(turns):
        for name, begin in runs.items():
            found.setdefault(name, []).append(timed(*begin(), new))
    title = f"{native.isa()}, {native.threads()} threads"
    columns = "tokens/s", "ms a token", "ms of its head", "ratio", "ms of cores", "of its head", "ratio"
    table = Table("model", *columns, title=title)
    medians = {name: Took(*map(median, zip(*each, strict=True))) for name, each in found.items()}
    first = next(iter(medians.values()))
    for name, each in medians.items():
        ms = [f"{1e3 * value:.1f}" for value in each]
        ratios = [f"{first.token / each.token:.2f}", f"{first.work / each.work:.2f}"]
        table.add_row(name, f"{1 / each.token:.1f}", ms[0], ms[1], ratios[0], ms[2], ms[3], ratios[1])
    Console(width=110).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    show(**vars(parser.parse_args()))
