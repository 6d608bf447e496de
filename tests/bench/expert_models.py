"""Decode steps of models with experts in several formats, a few layers by `Engine` with CUDA graphs.

    python -m tests.bench.expert_models [--models gpt-oss-20b qwen3-30b] [--formats fp8 mxfp4] [--layers 2 4]

Weights are random, and some experts equal others. A step of one sequence is timed with all that the host
does, for two numbers of layers; the time of a layer is their difference. The last columns extrapolate to all
layers, embedding and head counted once. Layers other than experts are quantized too where the model's
checkpoints do so: those of Qwen3, and not those of gpt-oss.
"""

import argparse
import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qload import MemoryStorage, Weights, architecture_of, loader_from_config
from qload.models import Engine, load_model
from tests.bench.expert_formats import FORMATS, Format

PROMPT, NEW, TURNS = 16, 64, 5
COLUMNS = ("model", "format", "load s", "us of layers", "us a layer", "us of all", "tokens/s", "wanted")


@dataclass(frozen=True)
class Model:
    """Config of a model without its number of layers.

    `layers`: of the whole model; `wanted`: tokens a second; `plain`: parts of names of layers that are not
    quantized; `formats`: the ones in place of others whose blocks do not divide the layers.
    """

    config: Mapping[str, Any]
    layers: int
    wanted: int
    plain: tuple[str, ...]
    formats: Mapping[str, str]


MODELS = {
    "gpt-oss-20b": Model(
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
            "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "vocab_size": 201088, "attention_bias": True, "rms_norm_eps": 1e-5,
        },
        24, 250, ("embed_tokens", "lm_head", "router", "self_attn"),
        {"fp8": "fp8 channel", "gptq": "gptq 32"},
    ),
    "qwen3-30b": Model(
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_experts": 128,
            "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "norm_topk_prob": True,
        },
        48, 300, ("embed_tokens", "lm_head", "mlp.gate"), {},
    ),
}  # fmt: skip


def tensors_of(model: Model, config: Mapping[str, Any], kind: Format) -> tuple[dict[str, Tensor], list[str]]:
    """All tensors of a checkpoint on the host, and the names of its plain layers."""
    known = architecture_of(config)
    assert known is not None
    tensors, plain, quantized = dict[str, Tensor](), list[str](), dict[str, tuple[int, int]]()
    for name in known.required():
        vector, matrix = known.shape(name), known.expected(name)
        if matrix is None:
            assert vector is not None
            ones = torch.ones(vector) if name.endswith("norm.weight") else torch.zeros(vector)
            tensors[name] = ones.bfloat16()
        elif any(part in name for part in model.plain):
            drawn = torch.randn(matrix, device="cuda") * matrix[1] ** -0.5
            tensors[f"{name}.weight"] = drawn.bfloat16().cpu()
            plain.append(name)
        else:
            quantized[name] = matrix
            if config.get("attention_bias"):
                tensors[f"{name}.bias"] = torch.zeros(matrix[0]).bfloat16()
    return tensors | kind.matrices(quantized), plain


def engine_of(model: Model, kind: Format, layers: int) -> tuple[Engine, float]:
    """An engine of so many layers, and the seconds of its load."""
    config = {**model.config, "num_hidden_layers": layers, "torch_dtype": "bfloat16", "eos_token_id": None}
    tensors, plain = tensors_of(model, config, kind)
    quantization = kind.without(plain)
    loader = loader_from_config(quantization, target="auto")
    architecture = architecture_of(config)
    weights = Weights(
        MemoryStorage(tensors), loader=loader, architecture=architecture, device="cuda", dtype=torch.bfloat16
    )
    start = time.perf_counter()
    loaded = load_model(weights, {**config, "quantization_config": quantization})
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    engine = Engine(loaded, max_tokens=PROMPT + NEW + 2)
    engine.warm_up(PROMPT)
    return engine, seconds


def step_seconds(engine: Engine) -> float:
    """Seconds of a step of one sequence, by the median of turns."""
    ids = torch.randint(engine.model.config.vocab, (PROMPT,)).tolist()
    found = []
    for _ in range(TURNS):
        stream = engine.stream([ids], NEW + 1)
        next(stream)
        start = time.perf_counter()
        count = sum(1 for _ in stream)
        found.append((time.perf_counter() - start) / count)
    return median(found)


def measure(name: str, formats: list[str], layers: tuple[int, int]) -> Iterator[tuple[str, ...]]:
    """One row for each format."""
    model = MODELS[name]
    for format_name in formats:
        own = model.formats.get(format_name, format_name)
        steps, loads = [], []
        for count in layers:
            engine, seconds = engine_of(model, FORMATS[own], count)
            steps.append(step_seconds(engine))
            loads.append(seconds)
            del engine
            gc.collect()
            torch.cuda.empty_cache()
        each = (steps[1] - steps[0]) / (layers[1] - layers[0])
        whole = steps[0] + each * (model.layers - layers[0])
        times = "/".join(f"{1e6 * step:.0f}" for step in steps)
        numbers = times, f"{1e6 * each:.1f}", f"{1e6 * whole:.0f}", f"{1 / whole:.0f}", f"{model.wanted}"
        yield name, own, "/".join(f"{load:.1f}" for load in loads), *numbers


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["fp8", "mxfp4", "nvfp4", "gptq"]
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--formats", nargs="+", default=names, choices=[*FORMATS])
    parser.add_argument("--layers", nargs=2, type=int, default=(2, 4))
    asked = parser.parse_args()
    table = Table(
        *COLUMNS, title=f"one sequence, {asked.layers[0]} and {asked.layers[1]} layers, extrapolated"
    )
    with torch.no_grad():
        for name in asked.models:
            for row in measure(name, asked.formats, tuple(asked.layers)):
                print(*row, flush=True)
                table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
