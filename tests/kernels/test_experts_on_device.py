"""Experts in a CUDA graph: no number goes to the host, and the result is that of the sorted way."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.experts import ExpertsWeight, LocalExperts
from qload.kernels import cuda
from qload.kernels.experts_function import DeviceExperts, KeptExperts, experts, multiply
from qload.spec import ActivationScheme
from tests.gpu.expert_layers import drawn_numbers, typed_experts
from tests.paths import FIXTURES
from tests.support.fake_gpu import fake_capture, fake_like

pytestmark = pytest.mark.usefixtures("seen_texts")

MODELS = {
    "auto_round_qwen3_moe": "model.layers.1.mlp.experts",
    "fp8_channel_deepseek_v3": "model.layers.1.mlp.experts",
    "gptq_mixtral": "model.layers.1.mlp.experts",
    "mxfp4_gpt_oss": "model.layers.1.mlp.experts",
    "nvfp4_llama4_text": "model.layers.1.feed_forward.experts",
    "w4a16_deepseek_v2_lite": "model.layers.1.mlp.experts",
}
TOP = 2
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def experts_of(model: str) -> ExpertsWeight:
    with open_checkpoint(FIXTURES / "models" / model) as weights:
        return weights.get_experts(MODELS[model])


def choices(tokens: int, total: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(total, generator=chance)[:TOP] for _ in range(tokens)])
    return ids, torch.rand(tokens, TOP, generator=chance)


def on_fake_gpu(weight: ExpertsWeight) -> ExpertsWeight:
    """The same experts, whose tensors are fake ones on the GPU."""
    stacks = [
        stack.holding({field: fake_like(tensor) for field, tensor in stack.fields().items()})
        for stack in (weight.gate_up, weight.down)
    ]
    biases = [None if bias is None else fake_like(bias) for bias in (weight.gate_up_bias, weight.down_bias)]
    return ExpertsWeight(*stacks, weight.facts, weight.local, *biases)


@pytest.mark.parametrize("activations", ["declared", "unquantized"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("model", MODELS)
def test_a_capture_reads_nothing_on_the_host(
    model: str, tokens: int, dtype: torch.dtype, activations: Any
) -> None:
    weight = experts_of(model)
    with fake_capture():
        x = torch.empty(tokens, weight.shape[1], dtype=dtype, device="cuda")
        ids = torch.empty(tokens, TOP, dtype=torch.int64, device="cuda")
        own = torch.empty(tokens, TOP, device="cuda")
        y = multiply(x, ids, own, on_fake_gpu(weight), activations, None, KeptExperts())

    assert (y.shape, y.dtype, y.device.type) == (x.shape, dtype, "cuda")


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("per", ["channel", "e5m2", "block", "int8", "mxfp8", "nvfp4", "mxfp4", "nf4"])
def test_a_capture_of_strips_without_their_kernels_reads_nothing_on_the_host(per: str, tokens: int) -> None:
    group = {"block": 128, "mxfp8": 32, "nvfp4": 16, "mxfp4": 32}.get(per)
    scheme = ActivationScheme("float", 8, True, "group" if group else "token", group)
    weight = typed_experts(drawn_numbers(3, 256, 128, per, device="cpu"), scheme=scheme)
    with fake_capture():
        x = torch.empty(tokens, 256, dtype=torch.float16, device="cuda")
        ids = torch.empty(tokens, TOP, dtype=torch.int32, device="cuda")
        own = torch.empty(tokens, TOP, device="cuda")
        for activations in ("declared", "unquantized"):
            y = multiply(x, ids, own, on_fake_gpu(weight), activations, None, KeptExperts())  # type: ignore[arg-type]
            assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "cuda")


def test_the_log_has_the_reason_against_grouped_kernels_once(caplog: pytest.LogCaptureFixture) -> None:
    weight, kept = experts_of("gptq_mixtral"), KeptExperts()
    caplog.set_level("INFO", "qload")
    with fake_capture():
        for tokens in (1, 2, 2):
            x = torch.empty(tokens, weight.shape[1], dtype=torch.float16, device="cuda")
            ids = torch.empty(tokens, TOP, dtype=torch.int64, device="cuda")
            own = torch.empty(tokens, TOP, device="cuda")
            multiply(x, ids, own, on_fake_gpu(weight), "declared", None, kept)

    reason = cuda.why_no_experts(weight, torch.float16, torch.device("cuda"))
    assert [each.getMessage() for each in caplog.records] == [
        f"model.layers.1.mlp.experts: experts are multiplied one by one, without a grouped kernel: {reason}"
    ]


@pytest.mark.parametrize("model", MODELS)
def test_the_host_is_noticed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a capture the choice is sorted on the host, which a capture forbids."""
    weight = experts_of(model)
    with fake_capture():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        x = torch.empty(1, weight.shape[1], dtype=torch.float16, device="cuda")
        ids = torch.empty(1, TOP, dtype=torch.int64, device="cuda")
        given = x, ids, torch.empty(1, TOP, device="cuda"), on_fake_gpu(weight), "declared", None
        with pytest.raises((AssertionError, RuntimeError), match=r"host|numpy"):
            multiply(*given, KeptExperts())


def on_device(weight: ExpertsWeight, x: Tensor, ids: Tensor, own: Tensor) -> Tensor:
    return DeviceExperts(weight, "declared", None, x.dtype).multiply(x, ids, own)


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("model", MODELS)
def test_the_result_is_that_of_the_sorted_way(model: str, tokens: int) -> None:
    """In float64, in which both ways differ by their roundings alone."""
    weight = experts_of(model)
    x = torch.randn(tokens, weight.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids, own = choices(tokens, weight.local.total)
    want = experts(x, ids, own.double(), weight)
    got = on_device(weight, x, ids, own.double())

    magnitude = experts(x.abs(), ids, own.double(), weight).abs().max()
    assert (got - want).abs().max() <= magnitude * weight.shape[1] * torch.finfo(torch.float64).eps
    assert bool(want.ne(0).any())


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_elsewhere_add_nothing(tokens: int) -> None:
    whole = experts_of("gptq_mixtral")
    total = whole.local.total
    x = torch.randn(tokens, whole.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ids, own = choices(tokens, total)
    halves = []
    for start, stop in ((0, total // 2), (total // 2, total)):
        cut = [stack_part(stack, start, stop) for stack in (whole.gate_up, whole.down)]
        share = ExpertsWeight(*cut, whole.facts, LocalExperts(start, stop, total))
        halves.append(on_device(share, x, ids, own.double()))
    want = on_device(whole, x, ids, own.double())

    assert (halves[0] + halves[1] - want).abs().max() <= want.abs().max() * torch.finfo(torch.float64).eps * 4


def stack_part(stack: Any, start: int, stop: int) -> Any:
    tensors = {field: tensor[start:stop] for field, tensor in stack.fields().items()}
    return type(stack)(stack.weight_type, stack.config, stack.layer, stack.names[start:stop], tensors)


@pytest.mark.parametrize("wrong", [-1, 1 << 20])
@pytest.mark.parametrize("tokens", [1, 9])
def test_an_id_of_no_expert_makes_its_token_nan(tokens: int, wrong: int) -> None:
    weight = experts_of("gptq_mixtral")
    ids, own = choices(tokens, weight.local.total)
    ids[0, 1] = wrong
    y = on_device(weight, torch.ones(tokens, weight.shape[1]), ids, own)

    assert bool(y[0].isnan().all())
    assert bool(y[1:].isfinite().all())
