"""Lawful calls of functions that check sizes, dtypes and numbers, with sizes unlike each other."""

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save
from torch import nn

from qload import DefaultWeightsLoader
from qload.devices.operands import Meaning, group_runs
from qload.devices.tensors import check_writable, writable
from qload.engines.vllm.kernel_config import choose_kernel
from qload.experts import GatedActivation
from qload.experts.expert_parallel import LocalExperts, grid, local_experts
from qload.experts.routing import Routing
from qload.formats import Fp8Config, Fp8Weight
from qload.kernels import MPLinearLayerConfig, choose_mp_linear_kernel, scalar_types
from qload.kernels import bounds as bounds_of
from qload.kernels.activations import quantize
from qload.kernels.cuda import byte_strips, exllama
from qload.kernels.cuda import marlin as marlin_kernels
from qload.kernels.cuda.marlin import MarlinCall
from qload.kernels.dtypes import bias_for
from qload.kernels.experts_function import check as check_expert_inputs
from qload.kernels.mp_linear.kernels import permute_param_layout_, read_layer
from qload.kernels.plans import check as check_linear_inputs
from qload.kernels.products import in_slices, token_blocks, transposed
from qload.kernels.quantized_inputs import MadeInputs
from qload.layouts import compressed_tensors, eetq, marlin_24, panels, strips
from qload.layouts.marlin_24 import choose_positions, read_positions
from qload.loader.base import split_blocks
from qload.loader.heads import Heads
from qload.methods import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from qload.methods import marlin as marlin_method
from qload.methods.awq_marlin import AWQMarlinConfig
from qload.methods.base import get_quantization_config
from qload.methods.marlin import (
    marlin_permute_bias,
    marlin_permute_scales,
    verify_marlin_supported,
    verify_marlin_supports_shape,
)
from qload.methods.parameter_buffer import LayerShare
from qload.methods.parameters import (
    Shard,
    divide,
    empty_parameter,
    fill,
    is_empty,
    load_inputs,
    load_outputs,
    set_weight_attrs,
)
from qload.models import Decoder, load_model
from qload.models.attention import attend_with_bias, mask_bias, query_scales
from qload.models.config import LatentConfig
from qload.models.generation import Engine, Sampler, check_ids, check_prompt
from qload.models.images import ImageProcessor, check_image_tokens, resized
from qload.models.kv_cache import HeadSizes, PagedCache, PageTable, Step, pad_heads, page_count, unpad_heads
from qload.models.memory import check_memory
from qload.models.rope import Rope, RopeConfig, rotate_halves, rotate_pairs, yarn_mscale
from qload.models.stored_layers import SharedMatrix, check_matrix
from qload.models.vision import patch_mask, patch_positions, real_images
from qload.models.vision_config import vision_config
from qload.native.modules import one_thread, requested_threads, using
from qload.native.modules import threads as native_threads
from qload.parallel import Collectives, Rank, collectives_of
from qload.parallel.launcher import LaunchedRank
from qload.parallel.process_group import FakeWorld
from qload.plan.explain import capability_of
from qload.plan.sharing import check_ranks
from qload.quantize.policy import Modules, mlp_only
from qload.quantize.quantizers import (
    BNB4Quantizer,
    BNBInt8Quantizer,
    EETQQuantizer,
    Fp8Quantizer,
    check_finite,
    requantize,
)
from qload.sentences.sentence import WordSentence, parse_side
from qload.spec import ActivationScheme, Layer
from qload.storage import MemoryStorage
from qload.storage.header import parse_header
from qload.storage.protocol import bounds, check_out, check_rows
from qload.testing.tiny_checkpoint import make_checkpoint
from qload.weights import Weights
from tests.kernel_formats.marlin_layers import layer
from tests.kernels import cuda_layers as layers
from tests.meta.test_argument_types import EXPERTS, FACTS

Call = tuple[Callable[..., Any], dict[str, Any]]

S, QUERIES, KEYS, HEADS, KV, SIZE = 2, 3, 5, 6, 2, 8  # of attention
WEIGHT = layer(128, 64, 32)  # (K, N) and the group
LINEAR = MPLinearLayerConfig((128, 64), (128, 64), scalar_types.uint4b8, torch.float16, 32, False)
WORDS = torch.arange(16 * 64, dtype=torch.int32).view(16, 64)
AWQ_WORDS = torch.arange(128 * 8, dtype=torch.int32).view(128, 8)
set_weight_attrs(AWQ_WORDS, {"input_dim": 0, "output_dim": 1, "packed_dim": 1})
FILE = save({"a": torch.zeros(3, 4), "b": torch.zeros(5)})


def float_range(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) / 8


ROUTED = {
    "method": "softmax_grouped",
    "experts": 6,
    "top_k": 2,
    "renormalized": False,
    "groups": 3,
    "top_groups": 2,
    "factor": 1.5,
}
ROUTING = Routing(**ROUTED)
CORRECTED = Routing("sigmoid_grouped", experts=6, top_k=2, groups=3, top_groups=2)

MODELS: dict[str, Call] = {
    "attend_with_bias": (
        attend_with_bias,
        {
            "q": torch.ones(S, QUERIES, HEADS, SIZE),
            "k": torch.ones(S, KEYS, KV, SIZE),
            "v": torch.ones(S, KEYS, KV, SIZE),
            "bias": torch.zeros(S, 1, QUERIES, KEYS),
            "scale": 0.5,
        },
    ),
    "mask_bias": (
        mask_bias,
        {"positions": torch.arange(6).view(2, 3), "keys": 5, "dtype": torch.float32, "window": 2, "chunk": 3},
    ),
    "query_scales": (query_scales, {"positions": torch.arange(7), "floor": 2.0, "scale": 0.5}),
    "rotate_halves": (
        rotate_halves,
        {"x": float_range(3, 2, 8), "cos": float_range(3, 4), "sin": float_range(3, 4)},
    ),
    "rotate_pairs": (
        rotate_pairs,
        {"x": float_range(3, 2, 8), "cos": float_range(3, 4), "sin": float_range(3, 4)},
    ),
    "yarn_mscale": (yarn_mscale, {"factor": 4.0, "weight": 0.7}),
    "HeadSizes": (HeadSizes, {"only": (64, 128), "multiple": 2, "largest": 256}),
    "pad_heads": (pad_heads, {"heads": float_range(3, 2, 6), "size": 8}),
    "unpad_heads": (unpad_heads, {"heads": float_range(3, 2, 8), "size": 6}),
    "PagedCache": (
        PagedCache,
        {
            "layers": 2,
            "pages": 3,
            "page_size": 4,
            "kv_heads": 5,
            "k_dim": 6,
            "v_dim": 7,
            "dtype": torch.float16,
        },
    ),
    "page_count": (page_count, {"sequences": 3, "tokens": 17, "page_size": 4}),
    "PageTable": (PageTable, {"sequences": 3, "tokens": 17, "page_size": 4}),
    "Step": (
        Step,
        {
            "positions": torch.arange(6),
            "slots": torch.arange(6),
            "pages": torch.zeros(2, 3, dtype=torch.int64),
        },
    ),
    "Step.of": (Step.of, {"starts": [3, 5], "tokens": 2, "pages": [[0, 1], [2, 3]], "page_size": 4}),
    "Sampler": (Sampler, {"temperature": 0.5, "top_p": 0.75, "seed": 11}),
    "check_ids": (check_ids, {"ids": [3, 9], "vocab": 10}),
    "check_prompt": (
        check_prompt,
        {"prompt_ids": [3, 9, 5], "tokens": 4, "vocab": 10, "max_tokens": 7, "longest": 3},
    ),
    "check_memory": (check_memory, {"device": torch.device("cpu"), "needed": 3 << 30, "free": 4 << 30}),
    "real_images": (
        real_images,
        {"pixels": torch.ones(2, 3, 4, 5), "pixel_mask": torch.ones(2, 4, 5, dtype=torch.bool)},
    ),
    "patch_mask": (patch_mask, {"pixel_mask": torch.ones(2, 6, 9, dtype=torch.bool), "patch": 3}),
    "patch_positions": (patch_positions, {"mask": torch.ones(2, 3, 4, dtype=torch.bool), "side": 5}),
    "LatentConfig": (
        LatentConfig,
        {
            "q_rank": 12,
            "kv_rank": 16,
            "nope_size": 24,
            "rope_size": 8,
            "value_size": 32,
        },
    ),
}
TINY: list[Decoder] = []  # one model, in float32


def engine(**sizes: int) -> Engine:
    """Return a new engine of a model that is made once."""
    if not TINY:
        with TemporaryDirectory() as folder:
            tensors = make_checkpoint("plain", folder, model="qwen2")
            config = json.loads((Path(folder) / "config.json").read_text())
        wide = {name: tensor.float() for name, tensor in tensors.items()}
        weights = Weights(MemoryStorage(wide), loader=DefaultWeightsLoader())
        TINY.append(load_model(weights, {**config, "torch_dtype": "float32", "dtype": "float32"}))
    return Engine(TINY[0], **sizes)


def decode(prompt: list[int], ids: list[int], sequences: list[int], max_tokens: int) -> torch.Tensor:
    """Return the next ids after the same prompt of two sequences and one more token of each."""
    made = engine(max_tokens=max_tokens, max_sequences=2, page_size=2)
    for sequence in range(2):
        made.prefill(prompt, sequence)
    return made.decode(ids, sequences).argmax(-1)


MODELS |= {
    "Engine": (
        lambda **sizes: engine(**sizes).cache.keys,
        {"max_tokens": 9, "max_sequences": 2, "page_size": 4},
    ),
    "Engine.prefill": (
        lambda **arguments: engine(max_tokens=5, max_sequences=2).prefill(**arguments).argmax(-1),
        {"ids": [3, 9, 5], "sequence": 1},
    ),
    "Engine.decode": (decode, {"prompt": [3, 9, 5], "ids": [4, 6], "sequences": [1, 0], "max_tokens": 4}),
    "Engine.stream": (
        lambda **arguments: list(engine(max_tokens=8, max_sequences=2).stream(**arguments)),
        {"prompts": [[3, 9, 5], [4]], "tokens": 2},
    ),
    **{
        f"Sampler.choose of {number}": (
            lambda top_k, top_p, temperature, number=number: Sampler(temperature, top_k, top_p).choose(
                torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.5, 2.0, -1.0, 1.0]]), torch.tensor([number, number])
            ),
            {"top_k": 4, "top_p": 1.0, "temperature": 1.0},
        )
        for number in (0.0, 0.25, 0.75, 0.9375)
    },
}
VISION: dict[str, Any] = {
    "config": {
        "model_type": "idefics2",
        "image_token_id": 9,
        "vision_config": {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_channels": 4,
            "image_size": 70,
            "patch_size": 14,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-3,
        },
        "perceiver_config": {
            "hidden_act": "gelu_new",
            "hidden_size": 64,
            "rms_norm_eps": 1e-4,
            "resampler_n_latents": 5,
            "resampler_depth": 2,
            "resampler_n_heads": 6,
            "resampler_head_dim": 8,
            "num_key_value_heads": 3,
        },
    },
    "hidden": 64,
    "eps": 1e-2,
}
IMAGES: dict[str, Any] = {
    "do_image_splitting": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "rescale_factor": 0.25,
    "image_mean": [0.5, 0.25, 0.75],
    "image_std": [0.5, 1.5, 2.0],
    "size": {"shortest_edge": 20, "longest_edge": 40},
}


def image_processor(config: dict[str, Any]) -> ImageProcessor:
    with TemporaryDirectory() as folder:
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(config))
        return ImageProcessor.of(folder)


VISION_CALLS: dict[str, Call] = {
    "vision_config": (vision_config, VISION),
    "vision_config of defaults": (vision_config, {**VISION, "config": {"model_type": "idefics2"}}),
    "ImageProcessor.of": (image_processor, {"config": IMAGES}),
    "ImageProcessor.of a shape": (image_processor, {"config": {"size": {"height": 30, "width": 50}}}),
    "ImageProcessor.expand": (
        image_processor(IMAGES).expand,
        {"text": "a <image> b<image>c", "images": 2, "vectors": 3},
    ),
    "ImageProcessor.expand whole images": (
        image_processor({}).expand,
        {"text": "<image><image> c", "images": 2, "vectors": 3},
    ),
    "ImageProcessor.count": (image_processor(IMAGES).count, {"images": 2}),
    "check_image_tokens": (
        partial(check_image_tokens, vision=vision_config(**VISION)),
        {"ids": [1, *[9] * 10, 2], "images": 2},
    ),
    "resized, wide": (resized, {"height": 30, "width": 70, "edges": (20, 40)}),
    "resized, high": (resized, {"height": 70, "width": 30, "edges": (10, 40)}),
}
EXPERT_CALLS: dict[str, Call] = {
    "GatedActivation": (GatedActivation, {"kind": "clamped_swiglu", "alpha": 1.5, "limit": 7.0}),
    "Routing": (Routing, ROUTED),
    **{
        f"Routing of {method}": (
            Routing,
            {"method": method, "experts": 6, "top_k": 2, "renormalized": False, "groups": 1, "top_groups": 1},
        )
        for method in ("softmax_top_k", "top_k_softmax", "top_k_sigmoid", "sigmoid_grouped")
    },
    "Routing.logits": (
        ROUTING.logits,
        {"x": float_range(3, 8), "weight": float_range(6, 8), "bias": float_range(6)},
    ),
    "Routing.route": (ROUTING.route, {"logits": float_range(3, 6).sin()}),
    "Routing.route corrected": (
        CORRECTED.route,
        {"logits": float_range(3, 6).sin(), "correction_bias": float_range(6)},
    ),
    "LocalExperts": (LocalExperts, {"start": 2, "stop": 5, "total": 9}),
    "local_experts": (local_experts, {"prefix": "mlp", "total": 9, "group": Rank(1, 4)}),
    "grid": (grid, {"split": "both", "group": Rank(5, 6), "expert_ranks": 3}),
    "grid of tensors": (grid, {"split": "tensor", "group": Rank(5, 6), "expert_ranks": None}),
    "check_expert_inputs": (
        partial(check_expert_inputs, weight=EXPERTS.get_experts("e", facts=FACTS)),
        {
            "x": torch.ones(3, 4),
            "topk_ids": torch.zeros(3, 2, dtype=torch.int32),
            "topk_weights": torch.ones(3, 2),
        },
    ),
}
KERNELS: dict[str, Call] = {
    "check_linear_inputs": (
        partial(check_linear_inputs, weight=WEIGHT),
        {"x": torch.ones(3, 128), "bias": torch.ones(64)},
    ),
    "choose_mp_linear_kernel for a layer": (
        lambda **entries: choose_mp_linear_kernel(replace(LINEAR, **entries), 80).__name__,
        {
            "partition_weight_shape": (128, 64),
            "act_type": torch.float16,
            "group_size": 32,
            "zero_points": False,
            "has_g_idx": False,
            "order": "gptq",
        },
    ),
    "choose_mp_linear_kernel": (
        partial(choose_mp_linear_kernel, LINEAR),
        {"compute_capability": 80},
    ),
    "read_layer": (
        partial(read_layer, LINEAR, "layer"),
        {
            "w_q": WORDS,
            "w_s": torch.ones(4, 64, dtype=torch.float16),
            "w_zp": None,
            "g_idx": torch.arange(128, dtype=torch.int32) // 32,
        },
    ),
    "read_layer of AWQ": (
        partial(read_layer, replace(LINEAR, order="awq"), "layer"),
        {"w_q": AWQ_WORDS, "w_s": torch.ones(4, 64, dtype=torch.float16), "w_zp": None, "g_idx": None},
    ),
    "read_layer of AWQ along K": (
        partial(read_layer, replace(LINEAR, order="awq"), "layer"),
        {"w_q": WORDS, "w_s": torch.ones(4, 64, dtype=torch.float16), "w_zp": None, "g_idx": None},
    ),
    "permute_param_layout_": (
        lambda **options: permute_param_layout_(WORDS.clone(), **options),
        {"input_dim": 0, "output_dim": 1},
    ),
    "MPLinearLayerConfig": (
        MPLinearLayerConfig,
        {
            "full_weight_shape": (128, 64),
            "partition_weight_shape": (128, 64),
            "weight_type": scalar_types.uint4b8,
            "act_type": torch.float16,
            "group_size": 32,
            "zero_points": False,
        },
    ),
    "is_dense": (
        compressed_tensors.is_dense,
        {"name": "a", "counts": [(12, 32), (12, 32)], "bits": 3, "claimed": None},
    ),
    "eetq.order": (eetq.order, {"capability": 80}),
    "marlin_24.rows": (marlin_24.rows, {"bits": 4}),
    "panels.rows": (panels.rows, {"bits": 4}),
    "strips.rows": (strips.rows, {"bits": 4}),
    "read_positions": (read_positions, {"meta": torch.zeros(16, 128, dtype=torch.int16)}),
    "choose_positions": (choose_positions, {"present": torch.arange(8)[:, None].expand(8, 6) % 4 < 2}),
    "WordSentence": (partial(WordSentence, i=8), {"bits": 4, "pattern": "(kp i) n -> kp n (i)"}),
    "parse_side": (parse_side, {"pattern": "(a b) c -> a (b c)", "side": "(a b) c"}),
}
SCHEMES: dict[str, ActivationScheme] = {
    "int8 of all tokens": ActivationScheme("int", 8, True, "tensor"),
    "int4 with zero points": ActivationScheme("int", 4, True, "token", symmetric=False),
    "int8 of groups with zero points": ActivationScheme("int", 8, True, "group", 4, symmetric=False),
    "fp8 of groups": ActivationScheme("float", 8, True, "group", 4),
    "fp8 of fbgemm": ActivationScheme("float", 8, True, "token", owner="fbgemm", upper_bound=2.0),
    "fp8 of modelopt": ActivationScheme("float", 8, True, "token", owner="modelopt"),
    "mxfp4": ActivationScheme("float", 4, True, "group", 4, scale_type="e8m0"),
    "mxfp8 of modelopt": ActivationScheme("float", 8, True, "group", 4, scale_type="e8m0", owner="modelopt"),
    "nvfp4": ActivationScheme("float", 4, True, "group", 4, scale_type="e4m3"),
    "nvfp4 of modelopt": ActivationScheme("float", 4, True, "group", 4, scale_type="e4m3", owner="modelopt"),
}
X = torch.tensor([[0.25, -1.5, 3.0, 0.75, 7.0, -2.5, 0.125, 1.0], [0.0, 0.5, -0.25, 6.0, 0.0, 0.0, 0.0, 0.0]])
QUANTIZED: dict[str, Call] = {
    f"quantize, {name}": (partial(quantize, scheme=scheme), {"x": X, "scale": torch.full((1,), 0.5)})
    for name, scheme in SCHEMES.items()
}
ASYMMETRIC = MadeInputs(quantize(X, SCHEMES["int4 with zero points"]))
PRODUCTS: dict[str, Call] = {
    "MadeInputs.codes": (ASYMMETRIC.codes, {"dtype": torch.int8, "rows": 5}),
    "MadeInputs.counted": (ASYMMETRIC.counted, {"dtype": torch.float16}),
    "MadeInputs.meant": (ASYMMETRIC.meant, {"dtype": torch.float16}),
    "in_slices": (
        partial(in_slices, weight=WEIGHT),
        {
            "x": float_range(3, 128).sin(),
            "bias": float_range(64),
            "factors": float_range(128).cos(),
            "dtype": torch.float32,
            "scratch": 16 * 128 * 4,
            "count": 20,
        },
    ),
    "transposed": (
        partial(transposed, weight=WEIGHT),
        {"y": float_range(3, 64).sin(), "factors": float_range(128).cos()},
    ),
    "a bounded product": (
        bounds_of.product,
        {
            "x": bounds_of.Bounded(X.double(), X.double().abs() / 1024),
            "matrix": float_range(3, 8).sin(),
            "bias": float_range(3),
            "dtype": torch.float16,
            "steps": 2,
            "more": 0.125,
        },
    ),
    "bias_for": (bias_for, {"bias": float_range(8), "dtype": torch.float16}),
    "vLLM's choice of a kernel": (
        lambda capability, **entries: getattr(
            kernel := choose_kernel(SimpleNamespace(**entries), capability), "__name__", kernel
        ),
        {
            "weight_type": "uint4b8",
            "capability": 80,
            "full_weight_shape": (256, 128),
            "partition_weight_shape": (128, 128),
            "act_type": torch.float16,
            "group_size": 64,
            "zero_points": False,
            "out_type": None,
        },
    ),
}


def threads_of(text: str) -> int | None:
    with mock.patch.dict(os.environ, {"QLOAD_NUM_THREADS": text}):
        return requested_threads()


def loaded_outputs(
    loaded: torch.Tensor, packed: int, shard_id: str | None, share: int, index: int
) -> torch.Tensor:
    """Return a rank's outputs, of q (of 8) and k (of 4), from words of `packed` codes."""
    param = empty_parameter((2, (share + 4) // max(packed, 1)), torch.float32)
    set_weight_attrs(param, {"output_dim": 1, "packed_dim": 1, "packed_factor": packed})
    load_outputs(param, loaded, [Shard("q", 8, share, index), Shard("k", 4, 4, 0)], shard_id, "qkv.weight")
    return param.data.nan_to_num(-1)


def loaded_inputs(loaded: torch.Tensor, share: int, place: int) -> torch.Tensor:
    param = empty_parameter((share, 3), torch.float32)
    set_weight_attrs(param, {"input_dim": 0})
    load_inputs(param, loaded, Rank(place, 2), "o.weight")
    return param.data


LOADED: dict[str, Call] = {
    "load_outputs of a shard": (
        loaded_outputs,
        {"loaded": float_range(2, 4), "packed": 2, "shard_id": "q", "share": 4, "index": 1},
    ),
    "load_outputs of all shards": (
        loaded_outputs,
        {"loaded": float_range(2, 12), "packed": 1, "shard_id": None, "share": 4, "index": 1},
    ),
    "load_inputs": (loaded_inputs, {"loaded": float_range(8, 3), "share": 4, "place": 1}),
    "divide": (divide, {"tensor": "a.weight", "dim": "N", "size": 24, "group": Rank(1, 3)}),
    "is_empty": (is_empty, {"values": float_range(3, 4), "tensor": "a.weight"}),
    "is_empty of words": (is_empty, {"values": torch.arange(12).int().view(3, 4), "tensor": "a.weight"}),
    "QLOAD_NUM_THREADS": (threads_of, {"text": "3"}),
    **{f"QLOAD_NUM_THREADS of {text!r}": (threads_of, {"text": text}) for text in ("0", "4096", "4097", "")},
}
MATRICES = {
    "a.weight": float_range(24, 16).sin(),
    "a.bias": float_range(24).cos(),
    "b.weight": float_range(12, 16).cos(),
    "b.bias": float_range(12).sin(),
    "c.weight": float_range(12, 16),
    "c.bias": float_range(12),
}
FUSED = {"qkv.weight": float_range(48, 16).sin(), "qkv.bias": float_range(48).cos()}
ONLY_A = {name: MATRICES[name] for name in ("a.weight", "a.bias")}


def described(layer: nn.Module, x: torch.Tensor) -> Any:
    """Return the text of a layer, its tensors, and its outputs where no other rank has a summand."""
    tensors = [*layer.parameters(), *layer.buffers()]
    alone = getattr(layer, "collectives", None) is None
    return layer.extra_repr(), tensors, layer(x) if alone else None


def on_ranks(
    load: Callable[[Weights], nn.Module], tensors: dict[str, torch.Tensor], world: int, K: int = 16
) -> Any:
    storage, loader = MemoryStorage(tensors), DefaultWeightsLoader()
    ranks = [Weights(storage, loader=loader, process_group=rank) for rank in FakeWorld(world)]
    x = torch.arange(3) % 12 if K == 0 else float_range(3, K)
    return [described(load(weights), x) for weights in ranks]


LAYERS: dict[str, Call] = {
    name: (partial(on_ranks, load, K=K), {"tensors": tensors, "world": world})
    for name, (load, tensors, K, world) in {
        "ReplicatedLinear.load": (lambda w: ReplicatedLinear.load(w, "a"), ONLY_A, 16, 2),
        "ColumnParallelLinear.load": (lambda w: ColumnParallelLinear.load(w, "a"), ONLY_A, 16, 2),
        "ColumnParallelLinear.load of heads": (
            lambda w: ColumnParallelLinear.load(w, "a", heads=Heads(6)),
            ONLY_A,
            16,
            2,
        ),
        "ColumnParallelLinear.load of all outputs": (
            lambda w: ColumnParallelLinear.load(w, "qkv", heads=Heads(8, 4), gather_output=True),
            FUSED,
            16,
            2,
        ),
        "RowParallelLinear.load": (
            lambda w: RowParallelLinear.load(w, "a", reduce_results=False),
            ONLY_A,
            8,
            2,
        ),
        "MergedColumnParallelLinear.load": (
            lambda w: MergedColumnParallelLinear.load(w, ["b", "c", "a"]),
            MATRICES,
            16,
            2,
        ),
        "MergedColumnParallelLinear.load of a fused layer": (
            lambda w: MergedColumnParallelLinear.load(w, "a"),
            ONLY_A,
            16,
            2,
        ),
        "QKVParallelLinear.load": (
            lambda w: QKVParallelLinear.load(w, ["a", "b", "c"], Heads(8, 4), head_size=3),
            MATRICES,
            16,
            2,
        ),
        "QKVParallelLinear.load of a fused layer": (
            lambda w: QKVParallelLinear.load(w, "qkv", Heads(8, 4), head_size=3),
            FUSED,
            16,
            2,
        ),
        "QKVParallelLinear.load of groups": (
            lambda w: QKVParallelLinear.load(
                w, "qkv", Heads(8, 4), head_size=2, v_head_size=6, interleaved=True
            ),
            FUSED,
            16,
            2,
        ),
        "VocabParallelEmbedding.load": (lambda w: VocabParallelEmbedding.load(w, "a"), ONLY_A, 0, 1),
        "ParallelLMHead.load": (lambda w: ParallelLMHead.load(w, "a", vocab=22), ONLY_A, 16, 1),
        "ParallelLMHead.load of an embedding": (
            lambda w: ParallelLMHead.load(w, "head", vocab=12, tied_to="c"),
            {"c.weight": MATRICES["c.weight"]},
            16,
            1,
        ),
    }.items()
}


def filled(make: Callable[[Any], Any], loaded: torch.Tensor, shard_id: Any, world: int, name: str) -> Any:
    """Return the parameter of a layer after it was filled on each rank."""
    found = []
    for rank in FakeWorld(world):
        layer = make(rank)
        param = getattr(layer, name)
        param.data.fill_(-1)
        layer.weight_loader(param, loaded, shard_id)
        found.append((layer.extra_repr(), param.data))
    return found


LAYERS |= {
    f"weight_loader of {name}, {shard_id}": (
        partial(filled, make, name="weight"),
        {"loaded": float_range(N, 16), "shard_id": shard_id, "world": 2},
    )
    for name, make, shard_id, N in (
        ("ReplicatedLinear", lambda rank: ReplicatedLinear(16, 24, process_group=rank), None, 24),
        ("ColumnParallelLinear", lambda rank: ColumnParallelLinear(16, 24, process_group=rank), None, 24),
        ("ColumnParallelLinear", lambda rank: ColumnParallelLinear(16, 24, process_group=rank), 0, 24),
        ("RowParallelLinear", lambda rank: RowParallelLinear(16, 24, False, process_group=rank), None, 24),
        (
            "MergedColumnParallelLinear",
            lambda rank: MergedColumnParallelLinear(16, (8, 12), process_group=rank, prefix="up"),
            1,
            12,
        ),
        (
            "MergedColumnParallelLinear",
            lambda rank: MergedColumnParallelLinear(16, (8, 12), process_group=rank),
            None,
            20,
        ),
        (
            "QKVParallelLinear",
            lambda rank: QKVParallelLinear(16, 3, 4, 2, process_group=rank, v_head_size=5),
            "v",
            10,
        ),
        ("QKVParallelLinear", lambda rank: QKVParallelLinear(16, 3, 4, process_group=rank), None, 36),
    )
}
Q_LAYER = Layer((64,), 128, (64, 128), "a")
MATRIX = float_range(64, 128).sin()
QUANTIZERS: dict[str, Call] = {
    "Fp8Quantizer": (Fp8Quantizer, {"per": "block", "block": (16, 32), "activation_scale_ub": 4.0}),
    "BNB4Quantizer": (BNB4Quantizer, {"quant_type": "nf4", "blocksize": 64, "double_quant": False}),
    **{
        f"{type(quantizer).__name__} of a matrix, {number}": (
            partial(quantizer.quantize, layer=Q_LAYER),
            {"weight": MATRIX, "dtype": torch.float16},
        )
        for number, quantizer in enumerate(
            (
                Fp8Quantizer(),
                Fp8Quantizer("tensor"),
                Fp8Quantizer("block", (16, 48)),
                EETQQuantizer(),
                BNB4Quantizer(),
                BNB4Quantizer("fp4", 32, double_quant=True),
                BNBInt8Quantizer(),
            )
        )
    },
}


def checked_call(check: Callable[[Any], Any], call: Any) -> Call:
    """Return the check of a kernel's call, with the operands of a lawful one."""
    operands = {each.name: getattr(call, each.name) for each in fields(call)}
    return lambda **changed: type(check(replace(call, **changed))).__name__, operands


IN_ORDER = layers.layer(192, 64, 64, 4, torch.float16, zeros=True)
ACT_ORDER = layers.layer(192, 64, 64, 8, torch.float16, act_order=True)
ROWS, BIAS = torch.ones(3, 192).half(), torch.ones(64).half()
LAUNCHES: dict[str, Call] = {
    "a call of marlin": checked_call(
        marlin_kernels.check, MarlinCall(*marlin_kernels.arguments(ROWS, IN_ORDER))
    ),
    "a call of marlin in act order": checked_call(
        marlin_kernels.check, MarlinCall(*marlin_kernels.arguments(ROWS, ACT_ORDER, BIAS))
    ),
    **{
        f"a call of bytes in strips, {kind}": checked_call(
            byte_strips.check,
            byte_strips.ByteStripsCall(*byte_strips.arguments(ROWS, layers.byte_layer(192, 72, kind))),
        )
        for kind in ("channel", "block")
    },
}
LAUNCHES["a call of exllama"] = checked_call(
    exllama.checked,
    exllama.ExllamaCall(
        *exllama.arguments(
            ROWS[:, :96].contiguous(),
            layers.layer(96, 64, 48, 4, torch.float16, "exllama", zeros=True, act_order=True),
            BIAS,
        )
    ),
)
METHODS: dict[str, Call] = {
    "AWQMarlinConfig": (AWQMarlinConfig, {"weight_bits": 4, "group_size": 32, "zero_point": True}),
    "AWQMarlinConfig.from_config": (
        AWQMarlinConfig.from_config,
        {
            "config": {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 32,
                "zero_point": True,
                "version": "gemm",
            }
        },
    ),
    "get_quantization_config": (get_quantization_config, {"name": "awq_marlin"}),
    "verify_marlin_supported": (
        verify_marlin_supported,
        {"quant_type": scalar_types.uint4b8, "group_size": 128, "has_zp": False},
    ),
    "verify_marlin_supports_shape": (
        verify_marlin_supports_shape,
        {
            "output_size_per_partition": 128,
            "input_size_per_partition": 256,
            "input_size": 512,
            "group_size": 64,
        },
    ),
    "marlin_permute_scales": (
        marlin_permute_scales,
        {"s": float_range(4, 128), "size_k": 256, "size_n": 128, "group_size": 64},
    ),
    "marlin_permute_bias": (marlin_permute_bias, {"b": float_range(128)}),
    "marlin_zero_points": (
        marlin_method.marlin_zero_points,
        {
            "zp": torch.arange(4 * 64, dtype=torch.int32).view(4, 64) % 16,
            "size_k": 4,
            "size_n": 64,
            "num_bits": 4,
        },
    ),
    "awq_to_marlin_zero_points": (
        marlin_method.awq_to_marlin_zero_points,
        {
            "q_zp_packed": torch.arange(4 * 8, dtype=torch.int32).view(4, 8),
            "size_k": 4,
            "size_n": 64,
            "num_bits": 4,
        },
    ),
    "pack_cols": (
        marlin_method.pack_cols,
        {
            "q_w": torch.arange(3 * 64, dtype=torch.int32).view(3, 64) % 16,
            "num_bits": 4,
            "size_k": 3,
            "size_n": 64,
        },
    ),
    "unpack_cols": (
        marlin_method.unpack_cols,
        {
            "packed_q_w": torch.arange(3 * 8, dtype=torch.int32).view(3, 8),
            "num_bits": 4,
            "size_k": 3,
            "size_n": 64,
        },
    ),
    "fill": (fill, {"target": torch.zeros(3, 4), "loaded": torch.ones(3, 4), "tensor": "a.weight"}),
    "Heads": (Heads, {"queries": 6, "keys": 2}),
    "split_blocks": (split_blocks, {"tensor": "a", "dim": 0, "total": 24, "blocks": (1, 2, 3)}),
}
OTHERS: dict[str, Call] = {
    "Rank": (Rank, {"place": 1, "world": 3}),
    "FakeWorld": (FakeWorld, {"world": 3}),
    "capability_of": (capability_of, {"arch": "sm90"}),
    "check_ranks": (check_ranks, {"tp": (2, 4), "ep": 2}),
    "mlp_only": (mlp_only, {"blocks": 5, "first_and_last": True}),
    "requantize": (
        lambda **tensors: requantize(Fp8Weight(config=Fp8Config("tensor"), **tensors)),
        {"weight": float_range(4, 6).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1)},
    ),
    "requantize with inverse scales": (
        lambda **tensors: requantize(Fp8Weight(config=Fp8Config("tensor", divide=True), **tensors)),
        {"weight": float_range(4, 6).to(torch.float8_e4m3fn), "weight_scale": torch.full((1,), 2.0)},
    ),
    "check_finite": (check_finite, {"weight": float_range(3, 4), "name": "a.weight"}),
    "parse_header": (
        parse_header,
        {"head": FILE[: 8 + int.from_bytes(FILE[:8], "little")], "file_size": len(FILE), "file": "x"},
    ),
    "bounds": (bounds, {"name": "a", "shape": (5, 7), "index": (slice(1, 3), slice(0, 7))}),
    "check_out": (
        check_out,
        {"name": "a", "out": torch.zeros(3, 4), "extents": (3, 4), "dtype": torch.float32},
    ),
    "check_rows": (
        check_rows,
        {"name": "a", "out": torch.zeros(3, 4), "shape": (3, 4), "dtype": torch.float32},
    ),
}


def share_of(
    K: int, parts: tuple[int, ...], N: int, inputs: int, prefix: str, world: int
) -> tuple[LayerShare, Any]:
    """Return the share of a module of a `world`, or, for 0, of one that states no rank."""
    module = SimpleNamespace(process_group=Rank(0, world)) if world else SimpleNamespace()
    share = LayerShare.from_layer(module, (K, parts), (N, inputs), prefix)  # type: ignore[arg-type]
    return share, share.split


def stored_parts(shapes: tuple[int, ...], **share: Any) -> Any:
    """Return the loads of parts with so many outputs each, and of one tensor with those of all."""
    layer, _ = share_of(**share)
    return layer.separate_parts([(N, layer.whole[1]) for N in shapes]), layer.joined_parts(
        (sum(shapes), layer.whole[1])
    )


QKV = {"K": 16, "parts": (8, 4, 4), "N": 32, "inputs": 16, "prefix": "m.qkv_proj", "world": 2}
SHARES: dict[str, Call] = {
    "LayerShare of outputs": (share_of, QKV),
    "LayerShare of inputs": (share_of, {**QKV, "parts": (16, 8, 8), "inputs": 48, "prefix": "m.o_proj"}),
    "LayerShare by its sizes": (share_of, {**QKV, "parts": (8,), "prefix": "m.o_proj", "world": 0}),
    "LayerShare of inputs by its sizes": (share_of, {**QKV, "N": 16, "inputs": 48, "world": 0}),
    "LayerShare.part_number": (share_of(**QKV)[0].part_number, {"shard_id": "k", "tensor": "qkv.weight"}),
    "the parts of a share": (partial(stored_parts, **QKV), {"shapes": (16, 8, 8)}),
    "the parts of a share with common keys": (partial(stored_parts, **QKV), {"shapes": (16, 4, 4)}),
    "the parts of a whole layer": (partial(stored_parts, **{**QKV, "world": 1}), {"shapes": (8, 4, 4)}),
}


def turned(positions: torch.Tensor, **rope: Any) -> tuple[torch.Tensor, ...]:
    return Rope(RopeConfig(**rope))(positions)


def padded(key: int, value: int, **sizes: Any) -> tuple[int, int]:
    return HeadSizes(**sizes).padded(key, value)


def check_stored(prefixes: Any, sizes: tuple[int, ...], features: int, padded: bool) -> None:
    weights = Weights(MemoryStorage(MATRICES), loader=DefaultWeightsLoader())
    check_matrix(weights, prefixes, sizes, features, padded=padded)


ROPE = {"positions": torch.tensor([0, 3, 50]), "type": "default", "theta": 1e4, "dim": 8, "pairs": False}
SCALED = {**ROPE, "factor": 8.0, "original": 16}
SIZES: dict[str, Call] = {
    "default rope": (turned, ROPE),
    "linear rope": (turned, {**SCALED, "type": "linear"}),
    "rope of llama3": (turned, {**SCALED, "type": "llama3", "low_freq_factor": 1.5, "high_freq_factor": 4.5}),
    "yarn": (turned, {**SCALED, "type": "yarn", "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}),
    "yarn with scales": (turned, {**SCALED, "type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.9}),
    "padded sizes of heads": (padded, {"key": 40, "value": 24, "multiple": 16, "largest": 64}),
    "equal sizes of heads": (padded, {"key": 40, "value": 72, "only": (64, 96, 80), "equal": True}),
    "check_matrix": (
        check_stored,
        {"prefixes": ["b", "c"], "sizes": (12, 12), "features": 16, "padded": False},
    ),
    "check_matrix of a fused layer": (
        check_stored,
        {"prefixes": "a", "sizes": (16, 8), "features": 16, "padded": False},
    ),
    "check_matrix of a vocabulary": (
        check_stored,
        {"prefixes": ["a"], "sizes": (20,), "features": 16, "padded": True},
    ),
    "SharedMatrix of two blocks": (SharedMatrix("a", "N", blocks=2).parts, {"N": 24, "ranks": 2}),
    "SharedMatrix of a vocabulary": (SharedMatrix("a", "N", short=True).parts, {"N": 25, "ranks": 2}),
    "SharedMatrix of heads": (SharedMatrix("a", "N", Heads(4)).parts, {"N": 24, "ranks": 2}),
    "token_blocks": (token_blocks, {"tokens": 900, "outputs": 1 << 18}),
}


def meant_rows(start: int, stop: int, **tensors: Any) -> Meaning:
    given = {"lookup": None, "k_group": None, "run": 2, "divide": False, "factor": 1.0}
    return Meaning(**given, **tensors).of_rows(slice(start, stop))


def together(group: Collectives, dim: int) -> tuple[torch.Tensor, ...]:
    mine = float_range(2, 3) - 5 * group.rank()
    joined = group.gathered(mine), group.gathered(mine, dim)
    return *joined, group.summed(mine), group.maximum(mine), group.first(mine)


def collected(world: int, dim: int) -> list[tuple[torch.Tensor, ...]]:
    return FakeWorld(world).run(lambda group: together(group, dim))


def threads_within(threads: int) -> tuple[int, int, int]:
    with using(threads=threads):
        inside = native_threads()
        with one_thread():
            return inside, native_threads(), requested_threads() or 0


TABLES = {"scales": float_range(6, 4), "zeros": float_range(6, 4).sin(), "n_group": None}
DEVICES: dict[str, Call] = {
    "some rows": (meant_rows, {"start": 1, "stop": 3, **TABLES}),
    "some rows of a shared table": (
        meant_rows,
        {"start": 1, "stop": 3, **TABLES, "n_group": torch.arange(12).int()},
    ),
    "group_runs": (group_runs, {"group": torch.tensor([0, 0, 1, 1, 2]), "K": 5}),
    "group_runs in disorder": (group_runs, {"group": torch.tensor([1, 0, 1, 0, 2]), "K": 5}),
    "writable": (
        partial(writable, torch.ones(2)),
        {"shape": (3, 4), "dtype": torch.float32, "out": torch.zeros(3, 4)},
    ),
    "check_writable": (check_writable, {"out": torch.zeros(3, 4), "argument": "y"}),
    "collectives of ranks in threads": (collected, {"world": 3, "dim": 0}),
    "collectives of one rank": (
        lambda world: together(collectives_of(Rank(world - 1, world)), 0),
        {"world": 1},
    ),
    "Modules.quantizes": (
        lambda prefix, block, **names: Modules(**names, plain_blocks=frozenset({block})).quantizes(prefix),
        {"prefix": "model.layers.3.mlp.up_proj", "block": 2, "only": ("mlp",), "without": ("router",)},
    ),
    "threads within a block": (threads_within, {"threads": 3}),
    "LaunchedRank.of": (
        LaunchedRank.of,
        {
            "environment": {
                "WORLD_SIZE": "4",
                "RANK": "3",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "node0",
                "MASTER_PORT": "29500",
            }
        },
    ),
    "LaunchedRank of one": (LaunchedRank.of, {"environment": {"WORLD_SIZE": "1", "RANK": "0"}}),
    "LaunchedRank.device": (LaunchedRank(1, 2).device, {"device": "cpu"}),
}
FUNCTIONS = {
    **SHARES,
    **SIZES,
    **DEVICES,
    **MODELS,
    **VISION_CALLS,
    **EXPERT_CALLS,
    **KERNELS,
    **QUANTIZED,
    **PRODUCTS,
    **LAUNCHES,
    **LOADED,
    **LAYERS,
    **QUANTIZERS,
    **METHODS,
    **OTHERS,
}
