"""The call that doors share, without Inductor: what goes where, copies, gradients, and plans by hand."""

import copy
import math
import pickle
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qload import Linear
from qload.devices import tensors as device_tensors
from qload.errors import ArgumentError, DtypeError, ShapeError
from qload.formats import UnquantizedWeight
from qload.kernels import plans
from qload.kernels.cuda.linear import CudaPlan, plan_of
from qload.kernels.cuda.linear import linear as decided_anew
from qload.spec import ActivationScheme
from qload.testing import assert_same_bits
from tests.kernels.cuda_by_hand import STREAM, Hand
from tests.kernels.cuda_layers import _operators, byte_layer, hand, layer
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.usefixtures("seen_texts")

__all__ = ["_operators", "hand"]  # fixtures
CUDA_LINEAR = import_module("qload.kernels.cuda.linear")  # whose name a function of the package has, too
HOPPER = pytest.mark.parametrize("chip", [(9, 0)], ids=["9.0"])
WEIGHT = Case(group=64).weight()
TOKENS = ActivationScheme("int", 8, True, "token")
KEY = "from tests.kernels.mp_layers import Case; print(Case(group=64).weight().get_linear()._key)"


class Seen(TorchDispatchMode):
    """The names of operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def inputs(M: int = 3, K: int = 256, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(dtype)


def test_who_watches_sees_one_operator() -> None:
    module, x = WEIGHT.get_linear(), inputs()
    with Seen() as seen:
        y = module(x)

    assert seen.names == ["qload.linear.default"]
    assert_same_bits(y, module(x))


def test_a_plain_layer_of_the_dtype_of_x_is_one_product() -> None:
    w = torch.randint(-9, 9, (8, 16)).float()
    module = UnquantizedWeight(weight=w).get_linear(torch.ones(8))
    x = inputs(3, 16, torch.float32).requires_grad_()
    with Seen() as seen:
        y = module(x)

    assert not [name for name in seen.names if "qload" in name]
    assert_same_bits(y, nn.functional.linear(x, w, torch.ones(8)))
    y.sum().backward()
    assert_same_bits(x.grad, w.sum(0).expand(3, 16).contiguous())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_are_those_of_the_dequantized_weight(dtype: torch.dtype) -> None:
    bias = torch.zeros(64, dtype=dtype, requires_grad=True)
    x, g = inputs(dtype=dtype).requires_grad_(), inputs(3, 64, dtype)

    WEIGHT.get_linear(bias)(x).backward(g)

    wide, w = torch.promote_types(dtype, torch.float32), WEIGHT.dequantize(dtype)
    assert_same_bits(x.grad, (g.to(wide) @ w.to(wide)).to(dtype))
    assert_same_bits(bias.grad, g.sum(0, dtype=wide).to(dtype))


@pytest.mark.parametrize("shape", [(256,), (3, 256), (2, 3, 256)])
def test_what_is_written_to_an_output_has_gradients(shape: tuple[int, ...]) -> None:
    module, gradients = WEIGHT.get_linear(), []
    for relu in (nn.ReLU(), nn.ReLU(inplace=True)):
        x = torch.linspace(-1, 1, math.prod(shape)).view(shape).requires_grad_()
        relu(module(x)).sum().backward()
        gradients.append(x.grad)

    assert_same_bits(*gradients)


@pytest.mark.parametrize("activations", ["declared", "unquantized"])
def test_gradients_have_gradients(activations: Any) -> None:
    weight = replace(WEIGHT, layer=replace(WEIGHT.layer, activations=TOKENS))
    module, w = weight.get_linear(activations=activations), weight.dequantize(torch.float64)
    x = inputs(dtype=torch.float64).requires_grad_()

    first = torch.autograd.grad(
        module(x), x, g := inputs(3, 64, torch.float64).requires_grad_(), create_graph=True
    )
    (second,) = torch.autograd.grad(first[0].square().sum(), g)

    assert_same_bits(first[0].detach(), g.detach() @ w)
    assert_same_bits(second, 2 * first[0].detach() @ w.T)


def test_nothing_is_kept_for_gradients_that_nobody_wants() -> None:
    module, x = WEIGHT.get_linear(), inputs().requires_grad_()
    with torch.no_grad():
        assert not module(x).requires_grad
    assert module(x).requires_grad


def test_operators_keep_what_they_promise() -> None:
    module = Linear(WEIGHT, torch.zeros(64).half())
    held = [module.get_buffer(name) for name in module._call.names]
    rest = held, module.bias, module._key, 64
    operators = torch.ops.qload
    checks = "test_schema", "test_autograd_registration", "test_faketensor"  # without Inductor
    torch.library.opcheck(operators.linear.default, (inputs(), *rest), test_utils=checks)
    torch.library.opcheck(
        operators.linear_with_gradients.default, (inputs().requires_grad_(), *rest), test_utils=checks
    )
    gradient = inputs(3, 64), held, module._key, 256
    torch.library.opcheck(operators.linear_gradient.default, gradient, test_utils=checks)


def key(activations: Any = "declared", **changed: Any) -> str:
    weight = replace(WEIGHT, layer=replace(WEIGHT.layer, **changed))
    return Linear(weight, activations=activations)._key


def test_layers_that_differ_in_name_alone_mean_the_same() -> None:
    assert key(name="one") == key(name="other") == key()


@pytest.mark.parametrize("changed", [{"whole": (128, 256)}, {"activations": "unquantized"}])
def test_layers_that_differ_in_more_do_not(changed: dict[str, Any]) -> None:
    assert key(**changed) != key()


@pytest.mark.slow
def test_a_key_is_the_same_in_another_process() -> None:
    """A graph may have been compiled there."""
    run = subprocess.run([sys.executable, "-c", KEY], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == Linear(WEIGHT)._key


def test_a_key_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a layer that this process has made"):
        plans.known("gptq 1 x 1")


def test_copies_of_a_layer_multiply_alike() -> None:
    module, x = WEIGHT.get_linear(), inputs()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_bits(twin(x), module(x))
        assert twin._key == module._key


def test_a_layer_whose_tensors_are_replaced_multiplies_by_the_new_ones() -> None:
    module, x = WEIGHT.get_linear(), inputs()
    module(x)
    module.load_state_dict({**module.state_dict(), "qweight": ~WEIGHT.qweight}, assign=True)

    assert_same_bits(module(x), WEIGHT.holding({"qweight": ~WEIGHT.qweight}).get_linear()(x))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.ones(2, 255), ShapeError),
        (torch.ones(()), ShapeError),
        (torch.ones(2, 256, dtype=torch.complex64), DtypeError),
        (torch.ones(2, 256, device="meta"), ArgumentError),
    ],
)
def test_what_does_not_fit_is_told_whoever_multiplies(x: Tensor, error: type[Exception], grad: bool) -> None:
    with pytest.raises(error, match="x"):
        WEIGHT.get_linear()(x.requires_grad_(grad))


@HOPPER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["strips", "block", "nvfp4"])
def test_a_plan_launches_what_is_decided_anew(
    hand: Hand, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, weight = planned(layout, dtype, monkeypatch)
    held = list(weight.fields().values())
    bias = torch.arange(72).to(dtype)
    for M in (1, 16, 17, 24, 25, 64, 65, 256):
        for added in (None, bias):
            x = inputs(M, 256, dtype)
            hand.called.clear()
            got = [plan.multiply(x, added, held) for _ in (0, 1)]
            launched = list(hand.called)
            hand.called.clear()
            want = decided_anew(x, weight, added)
            assert launched == hand.called * 2
            for y in got:
                assert y is not None
                assert_same_bits(y, want)


@HOPPER
@pytest.mark.parametrize("layout", ["marlin", "strips", "block", "nvfp4"])
def test_a_plan_leaves_what_it_does_not_know(
    hand: Hand, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, weight = planned(layout, torch.float16, monkeypatch)
    held = list(weight.fields().values())

    def called(x: Tensor) -> Tensor | None:
        return plan.multiply(x, None, held)

    odd = torch.ones(257).half()[1:]
    assert called(odd) is None
    between = torch.empty(held[0].numel() + 1, dtype=held[0].dtype)[1:].view(held[0].shape)
    assert between.data_ptr() % 16
    assert plan.multiply(inputs(), None, [between, *held[1:]]) is None
    assert called(inputs(0)) is None
    assert called(inputs(3, 128)) is None
    assert called(torch.ones(()).half()) is None
    y = called(inputs(6).view(2, 3, 256))
    assert y is not None
    assert y.shape == (2, 3, 72)


def planned(layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[CudaPlan, Any]:
    """A layer on the CPU that says it lies on CUDA, so far as plans ask."""
    if layout in ("block", "nvfp4"):
        weight = byte_layer(256, 72, layout)
    else:
        weight = layer(256, 72, 64, 4, dtype, layout, zeros=True)
    monkeypatch.setattr(CUDA_LINEAR, "why_not_linear", lambda weight, dtype: None)
    monkeypatch.setattr(CUDA_LINEAR, "raw_stream", lambda index: STREAM)
    monkeypatch.setattr(CUDA_LINEAR, "current_device", lambda: None)  # the index of a CPU
    plan = plan_of(weight, dtype)
    assert plan is not None
    return plan, weight


def test_an_order_of_inputs_and_other_formats_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDA_LINEAR, "why_not_linear", lambda weight, dtype: None)
    monkeypatch.setattr(CUDA_LINEAR, "raw_stream", lambda index: STREAM)

    assert plan_of(WEIGHT, torch.float16) is None
    assert plan_of(layer(256, 64, 64, 4, torch.float16, "strips", act_order=True), torch.float16) is None


@pytest.mark.parametrize("wrong", ["shape", "dtype", "stride"])
def test_tensors_are_looked_at_before_pointers_are_taken(wrong: str) -> None:
    known = Linear(WEIGHT)._call.signature
    held = list(WEIGHT.fields().values())
    assert known.fits(inputs(), None, held)
    first = held[0]
    held[0] = {
        "shape": first[:1],
        "dtype": first.view(torch.float32),
        "stride": torch.empty(first.shape[::-1], dtype=first.dtype).T,
    }[wrong]

    assert not known.fits(inputs(), None, held)
    assert not known.fits(inputs(), torch.ones(1), list(WEIGHT.fields().values()))


@pytest.mark.parametrize("other", [torch.bfloat16, None], ids=["dtype", "shape"])
def test_tensors_are_looked_at_again_where_others_lie(other: torch.dtype | None) -> None:
    call, held, looked = (
        Linear(WEIGHT)._call,
        [each.clone() for each in WEIGHT.fields().values()],
        list[int](),
    )
    at = next(i for i, each in enumerate(held) if each.dtype == torch.float16)
    answer = SimpleNamespace(multiply=lambda x, bias, tensors: x)
    call.signature = SimpleNamespace(  # type: ignore[assignment]
        plain=False, plan=lambda x, bias, tensors, kept: looked.append(1) or answer
    )
    for _ in range(2):
        call(inputs(), held, None)
    assert len(looked) == 1

    held[at] = held[at].view(other) if other else held[at][:, : held[at].shape[1] // 2]
    call(inputs(), held, None)

    assert len(looked) == 2


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("change", ["shape", "stride", "dtype", "type", "gradients"])
def test_a_guard_sees_each_change_of_a_tensor_at_its_address(
    change: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(device_tensors, "_TensorGuards", None)
    first, other = torch.ones(4, 4), torch.ones(2)
    check = device_tensors.guard([first, other])
    assert check(first, other)
    assert check(torch.zeros(4, 4), other)

    if change == "gradients":
        first.requires_grad_()
    elif change == "type":
        first = nn.Parameter(first, requires_grad=False)
    else:
        first.data = {"shape": first[:2], "stride": first.T, "dtype": first.view(torch.int32)}[change]
    assert not check(first, other)


def test_a_function_for_all_ranks_is_a_layers_own() -> None:
    one, other = (Linear(WEIGHT, maximum=lambda largest: largest) for _ in range(2))

    assert one._call.signature is not other._call.signature
    assert_same_bits(one(inputs()), plans.multiply(inputs(), WEIGHT))


@pytest.mark.slow
def test_a_layer_that_is_not_compiled_brings_in_no_compiler() -> None:
    program = (
        "import sys, torch; from qload import UnquantizedWeight, open_checkpoint; import qload.repacking; "
        "UnquantizedWeight(weight=torch.ones(2, 2)).get_linear()(torch.ones(2)); "
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_declined_call_is_planned_again_except_on_a_cpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same plan would decline again on a CPU; on a GPU `multiply` has more ways."""
    module, linear = WEIGHT.get_linear(), import_module("qload.kernels.linear")
    x, ways = torch.zeros(2, WEIGHT.layer.K, dtype=torch.float16, device=device), list[str]()
    for name in ("multiply", "multiply_in_torch"):
        monkeypatch.setattr(linear, name, lambda *_, name=name: ways.append(name))
    tensors = [tensor.to(device) for tensor in WEIGHT.fields().values()]

    module._call._multiply(x, tensors, None, declined=True)

    assert ways == ["multiply_in_torch" if device == "cpu" else "multiply"]
