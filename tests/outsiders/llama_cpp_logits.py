"""Models in GGUF files of llama.cpp's converter: logits of qload, transformers and llama.cpp.

transformers runs the tensors that were converted, rounded to Q8_0 by gguf-py. llama.cpp also rounds inputs of
products to Q8_0. To first order a logit changes by the sum of all roundings times its derivatives, and
Hoeffding's inequality bounds this sum of independent terms. Only `nox -s outsiders` collects this file.
"""

import ctypes
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from qload import convert
from qload.checkpoint import Checkpoint
from qload.models import Engine, load_model
from qload.testing import assert_same_bits
from tests.models.with_transformers.twins import assert_close, twin
from tests.paths import FIXTURES

gguf = pytest.importorskip("gguf")
MODELS = ("llama_q8_0", "qwen2_q8_0", "mixtral_q8_0", "qwen3_moe_q8_0")
TOKENS = [1, 5, 9, 3, 60, 22, 41]
BLOCK, LARGEST_CODE = 32, 127  # of Q8_0
HALF_UNIT, HALF_SUBNORMAL = 2.0**-11, 2.0**-25  # largest roundings to float16: of a number, of a tiny one
FALSE_ALARM = 2.0**-40  # chance that sound logits exceed their bound
FLOAT32, NO_FLASH_ATTENTION = 0, 0  # of `enum ggml_type` and `enum llama_flash_attn_type`


def path_of(name: str) -> Path:
    return FIXTURES / "gguf" / name / "model.gguf"


def rounded(tensor: Tensor) -> Tensor:
    """Return the values of Q8_0 of gguf-py."""
    kind = gguf.GGMLQuantizationType.Q8_0
    rows = tensor.float().reshape(-1, tensor.shape[-1]).numpy()
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)).reshape(
        tensor.shape
    )


def source(name: str) -> dict[str, Tensor]:
    """Return the converted tensors by their own names, rounded where the file has Q8_0."""
    tensors = load_file(FIXTURES / "gguf" / name / "expected" / "source.safetensors")
    plain = ("norm.weight", "mlp.gate.weight", "block_sparse_moe.gate.weight", ".bias")
    return {key: value.float() if key.endswith(plain) else rounded(value) for key, value in tensors.items()}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """The name of a file, and the model of transformers that was converted."""
    tensors = source(request.param)
    with Checkpoint.open(path_of(request.param)) as checkpoint:
        config = checkpoint.model_config
    for tensor in gguf.GGUFReader(path_of(request.param)).tensors:
        if tensor.name == "output.weight":  # which one source lacks
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            tensors["lm_head.weight"] = torch.from_numpy(values)
    return request.param, twin(tmp_path_factory.mktemp("twin"), tensors, config)


def logits(path: Path) -> Tensor:
    engine = Engine(load_model(path), max_tokens=16, page_size=16)
    with torch.no_grad():
        return engine.prefill(TOKENS).reshape(-1)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_has_the_tensors_of_its_source(name: str) -> None:
    with Checkpoint.open(path_of(name)) as checkpoint:
        for key, want in source(name).items():
            prefix, _, suffix = key.rpartition(".")
            weights = checkpoint.weights
            got = weights.get_tensor(key) if suffix == "bias" else weights.get_weights(prefix).dequantize()
            assert_same_bits(got, want)


def test_logits_are_those_of_transformers(model: tuple[str, Any]) -> None:
    name, theirs = model
    with torch.no_grad():
        want = theirs(torch.tensor([TOKENS])).logits[0, -1]

    assert_close(logits(path_of(name)), want)


class RoundedInputs(TorchFunctionMode):
    """Add zeros to the inputs of products that llama.cpp rounds; keep them and the largest roundings."""

    def __init__(self, exact: set[int]) -> None:
        super().__init__()
        self.exact = exact
        self.zeros: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of an input, which stays alive
        self.roundings: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is functional.linear and args[1].data_ptr() not in self.exact:
            x, *others = args
            if id(x) not in self.zeros:  # several products share their inputs
                self.zeros[id(x)] = x, torch.zeros_like(x, requires_grad=True)
                self.roundings.append(largest_roundings(x.detach()))
            args = (x + self.zeros[id(x)][1], *others)
        return function(*args, **(kwargs or {}))


def largest_roundings(x: Tensor) -> Tensor:
    """Return half a step of each block, and the rounding of the step to float16 times the largest code."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    step = (blocks.abs().amax(-1, keepdim=True) / LARGEST_CODE).expand_as(blocks).flatten(-2)
    return step / 2 + LARGEST_CODE * (step * HALF_UNIT).clamp(min=HALF_SUBNORMAL)


def bound(theirs: Any) -> Tensor:
    """Return the bound of each logit's change; the experts of a token share the roundings of its inputs."""
    names = dict(theirs.named_parameters()).items()
    with RoundedInputs({value.data_ptr() for name, value in names if name.endswith("gate.weight")}) as inputs:
        outputs = theirs(torch.tensor([TOKENS])).logits[0, -1]
    zeros = [zero for _, zero in inputs.zeros.values()]
    squares = []
    for output in outputs:
        slopes = torch.autograd.grad(output, zeros, retain_graph=True, materialize_grads=True)
        terms = (slope * most for slope, most in zip(slopes, inputs.roundings, strict=True))
        squares.append(torch.stack([term.square().sum() for term in terms]).sum())
    shared = getattr(theirs.config, "num_experts_per_tok", 1)
    return (2 * math.log(2 / FALSE_ALARM) * shared * torch.stack(squares)).sqrt()


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a file in llama.cpp, without a vocabulary and with a cache of float32: its module and context."""
    llama_cpp = pytest.importorskip("llama_cpp")
    with Checkpoint.open(path) as checkpoint:
        size = checkpoint.model_config["vocab_size"]
    architecture = gguf.GGUFReader(path).fields["general.architecture"].contents()
    overrides = (llama_cpp.llama_model_kv_override * 3)()  # the last one, without a key, ends the list
    overrides[0].key, overrides[0].tag = b"tokenizer.ggml.model", llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
    overrides[0].value.val_str = b"none"
    overrides[1].key = f"{architecture}.vocab_size".encode()
    overrides[1].tag, overrides[1].value.val_i64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, size
    params = llama_cpp.llama_model_default_params()
    params.kv_overrides = overrides
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.type_k, settings.type_v = 64, FLOAT32, FLOAT32
    settings.flash_attn_type = NO_FLASH_ATTENTION
    context = llama_cpp.llama_init_from_model(model, settings)
    try:
        yield llama_cpp, context
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def logits_of_llama_cpp(path: Path, count: int) -> Tensor:
    with opened(path) as (llama_cpp, context):
        tokens = (llama_cpp.llama_token * len(TOKENS))(*TOKENS)
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(TOKENS))) == 0
        values = llama_cpp.llama_get_logits_ith(context, -1)
        return torch.tensor(ctypes.cast(values, ctypes.POINTER(ctypes.c_float))[:count])


def test_logits_of_llama_cpp_lie_within_its_rounding(model: tuple[str, Any]) -> None:
    name, theirs = model
    got = logits(path_of(name))
    want = logits_of_llama_cpp(path_of(name), len(got))
    most = bound(theirs)

    assert bool(((want - got).abs() <= most).all())
    assert most.max() < got.std()  # a wrong order of rows or heads changes logits by more


def test_llama_cpp_computes_the_same_with_a_file_of_convert(tmp_path: Path) -> None:
    """Test gpt-oss bit for bit, with a file that llama.cpp's converter wrote of the same checkpoint."""
    theirs, ours = path_of("gpt_oss_mxfp4"), tmp_path / "out" / "model.gguf"
    convert(FIXTURES / "models" / "mxfp4_gpt_oss", ours.parent, to="gguf", rounding=True)
    count = len(logits(theirs))

    assert_same_bits(logits_of_llama_cpp(ours, count), logits_of_llama_cpp(theirs, count))
