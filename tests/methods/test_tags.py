"""Parameters keep their tags through what torch does to a module, or the layer is refused: never misread."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from qload.errors import ArgumentError, MismatchError
from qload.methods import AWQMarlinLinearMethod, ColumnParallelLinear, RowParallelLinear
from qload.testing import assert_reads_back, assert_same_bits
from tests.methods.engine import awq, config_of, load, ready

pytestmark = pytest.mark.usefixtures("seen_texts")

WEIGHT = awq(128, 64, 32)


def made(kind: type[Any] = ColumnParallelLinear, **options: Any) -> Any:
    config = config_of(WEIGHT, **options.pop("changes", {}))
    return kind(128, 64, bias=True, params_dtype=torch.float16, quant_config=config, **options)


def on_meta(**options: Any) -> Any:
    with torch.device("meta"):
        return made(**options)


def reached_by_assignment(module: nn.Module) -> nn.Module:
    module.load_state_dict(module.state_dict(), assign=True)
    return module


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "a deep copy": copy.deepcopy,
    "a deep copy of what holds it": lambda module: copy.deepcopy(nn.ModuleList([module]))[0],
    "pickling": lambda module: pickle.loads(pickle.dumps(module)),
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "to": lambda module: module.to("cpu"),
    "half": lambda module: module.half(),
    "an assigned state dict": reached_by_assignment,
}


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_parameter_keeps_every_tag(kind: type[Any], change: Callable[[Any], Any]) -> None:
    before = {name: set(vars(param)) for name, param in made(kind).named_parameters()}

    after = change(made(kind))

    assert {name: set(vars(param)) for name, param in after.named_parameters()} == before
    for name in before:
        assert getattr(after, name).weight_loader.__self__ is after
    assert (after.qweight.input_dim, after.qweight.output_dim, after.qweight.packed_dim) == (0, 1, 1)
    assert before["qweight"] >= {"input_dim", "output_dim", "packed_dim", "packed_factor", "weight_loader"}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_loaded_afterwards_is_read_right(change: Callable[[Any], Any]) -> None:
    module = change(made())
    load(module, {**WEIGHT.fields(), "bias": torch.zeros(64).half()})

    assert_reads_back(ready(module), WEIGHT, torch.float16)


def test_a_layer_made_on_meta_is_loaded_once_it_has_memory() -> None:
    module = on_meta().to_empty(device="cpu")
    load(module, {**WEIGHT.fields(), "bias": torch.zeros(64).half()})

    assert_reads_back(ready(module), WEIGHT, torch.float16)


@pytest.mark.parametrize("assign", [True, False], ids=["assigned", "copied"])
@pytest.mark.parametrize("meta", [True, False], ids=["meta", "cpu"])
def test_a_state_dict_of_the_checkpoint_is_read_right(assign: bool, meta: bool) -> None:
    module = on_meta() if meta else made()
    if meta and not assign:
        module = module.to_empty(device="cpu")

    module.load_state_dict({**WEIGHT.fields(), "bias": torch.zeros(64).half()}, assign=assign)

    assert_reads_back(ready(module), WEIGHT, torch.float16)


def test_memory_that_is_new_holds_nothing_yet() -> None:
    """`to_empty` hands out whatever was there: a weight, for all that its bits tell."""
    module, blank = on_meta(), made()

    module = module._apply(lambda t: torch.ones_like(t, device="cpu"))

    for name, param in module.named_parameters():
        assert_same_bits(param.data, getattr(blank, name).data)
    with pytest.raises(MismatchError, match="qweight: not loaded"):
        ready(module)


def test_zero_points_that_need_not_be_stored_survive_new_memory() -> None:
    module = on_meta(changes={"zero_point": False}).to_empty(device="cpu")
    fields = {**WEIGHT.fields(), "bias": torch.zeros(64).half()}
    fields.pop("qzeros")
    load(module, fields)

    zeros = ready(module).mp_linear_kernel.typed(module).codes().zeros

    assert zeros.unique().tolist() == [8]


def test_a_layer_on_meta_is_neither_loaded_nor_processed() -> None:
    module = on_meta()

    with pytest.raises(ArgumentError, match="qweight\n  expected a parameter with memory: to_empty before"):
        load(module, WEIGHT.fields())
    with pytest.raises(
        MismatchError, match="qweight: not loaded\n  expected values\n  got      a tensor on meta"
    ):
        ready(module)


def engines() -> Any:
    """A module of an engine's own, which has no hook of ours."""
    layer = nn.Module()
    layer.quant_method = AWQMarlinLinearMethod(config_of(WEIGHT))
    layer.quant_method.create_weights(layer, 128, [64], 128, 64, torch.float16)
    return layer


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(copy.deepcopy, id="a deep copy"),
        pytest.param(reached_by_assignment, id="an assigned state dict"),
        pytest.param(lambda module: module.to("meta").to_empty(device="cpu"), id="to_empty"),
    ],
)
def test_an_engines_own_module_is_read_right_although_its_tags_are_gone(
    change: Callable[[Any], Any],
) -> None:
    layer = change(engines())
    for name, tensor in WEIGHT.fields().items():
        getattr(layer, name).data.copy_(tensor)

    assert_reads_back(lambda x: layer.quant_method.apply(ready(layer), x), WEIGHT, torch.float16)


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.float, nn.Module.double])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_quantized_layer_follows_no_cast(cast: Callable[[Any], Any], when: str) -> None:
    weight = awq(128, 64, 32)
    weight.scales.fill_(1 + 2.0**-10)  # a bit that bfloat16 does not have
    module = made()
    load(module, {**weight.fields(), "bias": torch.zeros(64).half()})

    module = ready(cast(module)) if when == "before" else cast(ready(module))

    assert module.scales.dtype == torch.float16
    assert_reads_back(module, weight, torch.float16)


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
def test_nothing_is_loaded_into_a_layer_that_is_ready(name: str) -> None:
    """Scales have the same shape in both orders: they would be taken for the kernel's."""
    module = made()
    load(module, {**WEIGHT.fields(), "bias": torch.zeros(64).half()})
    ready(module)

    with pytest.raises(ArgumentError, match=f"{name}\n  expected a tensor loaded before process_weights"):
        load(module, {name: WEIGHT.fields()[name]})
    assert_reads_back(module, WEIGHT, torch.float16)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_kernel_reads_has_no_tags_of_the_checkpoint_and_no_copy_of_it_is_loaded(
    change: Callable[[Any], Any],
) -> None:
    module = made()
    load(module, {**WEIGHT.fields(), "bias": torch.zeros(64).half()})

    copied = change(ready(module))

    assert set(vars(copied.scales)) == {"weight_loader"}
    with pytest.raises(ArgumentError, match="scales\n  expected a tensor loaded before process_weights"):
        load(copied, {"scales": WEIGHT.scales})


def test_weights_are_not_created_in_a_layer_that_is_ready() -> None:
    layer = engines()
    load(layer, WEIGHT.fields())
    ready(layer)

    with pytest.raises(ArgumentError, match="qweight\n  expected a layer without weights"):
        layer.quant_method.create_weights(layer, 128, [64], 128, 64, torch.float16)


def test_a_plain_layer_follows_a_cast_and_keeps_its_tags() -> None:
    module = ColumnParallelLinear(4, 3, params_dtype=torch.float32)
    load(module, {"weight": torch.ones(3, 4), "bias": torch.zeros(3)})

    module = copy.deepcopy(module).bfloat16()

    assert (module.weight.dtype, module.bias.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (module.weight.input_dim, module.weight.output_dim, module.bias.output_dim) == (1, 0, 0)
    assert module(torch.ones(4).bfloat16()).tolist() == [4, 4, 4]
