"""What kernels leave on a module: several weights in one, nothing prepared twice, nothing cast, no alias."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, DtypeError, NotWarmError, ShapeError
from qload.formats import GPTQWeight
from qload.kernels import KERNELS, ExllamaLinearKernel, MarlinLinearKernel, MPLinearKernel, warm_up
from qload.layouts import Stored
from qload.testing import assert_reads_back, assert_same_bits
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.usefixtures("seen_texts")

every_kernel = pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.name)
FIELDS = ("qweight", "scales", "qzeros", "g_idx")


def put(module: nn.Module, case: Case, weight: GPTQWeight, name: str) -> dict[str, str]:
    """A weight's parameters under names of its own in a module -> these names by field."""
    layer, names = case.layer(weight), {field: f"{name}_{field}" for field in FIELDS}
    for field, parameter in layer.named_parameters():
        module.register_parameter(names[field], parameter)
    return names


def made(kind: type[MPLinearKernel], case: Case, names: dict[str, str]) -> Any:
    return kind(
        case.config,
        names["qweight"],
        names["scales"],
        names["qzeros"] if case.zeros else None,
        names["g_idx"] if case.act_order else None,
    )


def prepared(kind: type[MPLinearKernel], case: Case) -> tuple[Any, Any]:
    layer = case.layer(case.weight())
    kernel: Any = kind(case.config, "qweight", "scales", "qzeros", "g_idx")
    kernel.process_weights_after_loading(layer)
    warm_up(layer, 256)
    return kernel, layer


@every_kernel
@pytest.mark.parametrize(
    ("one", "two"),
    [
        pytest.param({"act_order": True}, {"act_order": True, "seed": 1}, id="act orders"),
        pytest.param({}, {"N": 96, "K": 160, "seed": 1}, id="shapes"),
        pytest.param({}, {"zeros": Stored(), "seed": 1}, id="zero points in one"),
        pytest.param({"act_order": True}, {"seed": 1}, id="an index in one"),
    ],
)
def test_two_weights_of_one_module_multiply_right(
    kind: type[MPLinearKernel], one: dict[str, Any], two: dict[str, Any]
) -> None:
    module, cases = nn.Module(), (Case(**one), Case(**two))
    kernels = [made(kind, case, put(module, case, case.weight(), f"w{i}")) for i, case in enumerate(cases)]

    for kernel in kernels:
        kernel.process_weights_after_loading(module)
    warm_up(module, 256)

    for case, kernel in zip(cases, kernels, strict=True):
        assert_reads_back(lambda x, k=kernel: k.apply_weights(module, x), case.weight(), torch.float16)  # type: ignore[misc]


def test_what_a_weight_needs_beside_its_own_has_its_name_in_front_where_another_has_it_plain() -> None:
    module, case = nn.Module(), Case(act_order=True)
    for name in ("w0", "w1"):
        made(MarlinLinearKernel, case, put(module, case, case.weight(), name)).process_weights_after_loading(
            module
        )

    assert {"perm", "w1_qweight_perm"} <= {name for name, _ in module.named_parameters()}
    assert {"workspace", "w1_qweight_workspace"} == {name for name, _ in module.named_buffers()}


def test_an_attribute_of_the_module_is_never_overwritten() -> None:
    case = Case(act_order=True)
    layer = case.layer(case.weight())
    layer.perm, layer.qweight_perm = "mine", "mine too"

    with pytest.raises(ArgumentError, match="qweight_perm\n  expected a name that is free on the module"):
        MarlinLinearKernel(case.config, "qweight", "scales", None, "g_idx").process_weights_after_loading(
            layer
        )

    assert (layer.perm, layer.qweight_perm) == ("mine", "mine too")


@every_kernel
def test_a_tensor_that_a_kernel_does_not_read_has_no_elements_left(kind: type[MPLinearKernel]) -> None:
    """Test with a `g_idx` in order, as in vLLM's layers."""
    case = Case()
    layer = case.layer(case.weight())
    in_order = (torch.arange(case.K) // case.group).int()
    layer.register_parameter("g_idx", nn.Parameter(in_order, requires_grad=False))
    kernel: Any = kind(case.config, "qweight", "scales", "qzeros", "g_idx")

    kernel.process_weights_after_loading(layer)

    empty = {name for name in FIELDS if not getattr(layer, name).numel()}
    assert empty == {*FIELDS} - {*kernel.typed(layer).fields()}


@every_kernel
@pytest.mark.parametrize("again", KERNELS, ids=lambda kind: f"then {kind.name}")
def test_a_prepared_layer_is_not_prepared_again_by_a_new_kernel(
    kind: type[MPLinearKernel], again: type[MPLinearKernel]
) -> None:
    case = Case()
    kernel, layer = prepared(kind, case)

    for module in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(
            ArgumentError, match="expected a checkpoint's tensor\n  got      what was prepared"
        ):
            again(case.config, "qweight", "scales").process_weights_after_loading(module)

    assert_reads_back(lambda x: kernel.apply_weights(layer, x), case.weight(), torch.float16)


def test_two_weights_do_not_share_a_tensor() -> None:
    module, case = nn.Module(), Case()
    put(module, case, case.weight(), "w0")
    names = put(module, case, case.weight(), "w1")
    MarlinLinearKernel(case.config, "w0_qweight", "w0_scales").process_weights_after_loading(module)

    with pytest.raises(ArgumentError, match=r"w0_scales\n.*\n.*prepared for w0_qweight already"):
        MarlinLinearKernel(case.config, names["qweight"], "w0_scales").process_weights_after_loading(module)


@every_kernel
def test_a_layer_that_is_not_prepared_is_not_called(kind: type[MPLinearKernel]) -> None:
    case = Case()
    kernel, _ = prepared(kind, case)

    with pytest.raises(ArgumentError, match="process_weights_after_loading before the first call"):
        kernel.apply_weights(case.layer(case.weight()), torch.ones(1, 256).half())


@every_kernel
def test_a_parameter_that_the_module_does_not_have_is_named(kind: type[MPLinearKernel]) -> None:
    layer = Case().layer(Case().weight())

    with pytest.raises(ArgumentError, match="a layer with a tensor w_s\n  got      NoneType"):
        kind(Case().config, "qweight", "w_s").process_weights_after_loading(layer)


@every_kernel
def test_a_layer_on_meta_has_no_weights_to_process(kind: type[MPLinearKernel]) -> None:
    layer = Case().layer(Case().weight()).to("meta")

    with pytest.raises(ArgumentError, match=r"qweight: weight\n  expected a tensor with values\n.*meta"):
        kind(Case().config, "qweight", "scales").process_weights_after_loading(layer)


CASTS: list[Callable[[nn.Module], nn.Module]] = [nn.Module.bfloat16, nn.Module.float, nn.Module.double]


@every_kernel
@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.__name__)
def test_a_cast_of_a_prepared_layer_is_noticed(
    kind: type[MPLinearKernel], cast: Callable[[nn.Module], nn.Module]
) -> None:
    kernel, layer = prepared(kind, Case())
    cast(layer)

    with pytest.raises(DtypeError, match=r"scales: wrong dtype\n  expected float16\n.*\n  remedy   move"):
        kernel.apply_weights(layer, torch.ones(1, 256).half())


@every_kernel
def test_a_cast_to_the_dtype_that_it_has_changes_nothing(kind: type[MPLinearKernel]) -> None:
    case = Case()
    kernel, layer = prepared(kind, case)

    assert_reads_back(lambda x: kernel.apply_weights(layer.half(), x), case.weight(), torch.float16)


def test_a_tensor_of_another_shape_under_a_prepared_name_is_noticed() -> None:
    kernel, layer = prepared(MarlinLinearKernel, Case())
    layer.scales = nn.Parameter(layer.scales[:1], requires_grad=False)

    with pytest.raises(ShapeError, match=r"scales: .*\n  expected \(8, 64\), as it was prepared"):
        kernel.apply_weights(layer, torch.ones(1, 256).half())


@every_kernel
def test_a_copy_of_kernel_and_layer_multiplies_alike(kind: type[MPLinearKernel]) -> None:
    case = Case(act_order=True)
    kernel, layer = prepared(kind, case)

    for copied in (copy.deepcopy((kernel, layer)), pickle.loads(pickle.dumps((kernel, layer)))):
        twin, module = copied
        assert_reads_back(lambda x, k=twin, m=module: k.apply_weights(m, x), case.weight(), torch.float16)  # type: ignore[misc]


@every_kernel
def test_a_result_is_the_callers_and_outlives_the_next_call(kind: type[MPLinearKernel]) -> None:
    kernel, layer = prepared(kind, Case())
    one, two = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0)).half()

    first = kernel.apply_weights(layer, one)
    kept = first.clone()
    second = kernel.apply_weights(layer, two)

    assert_same_bits(first, kept)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_exllama_multiplies_fp16_only(dtype: torch.dtype) -> None:
    """Its sums are float32 in scratch space: an input of that dtype would be handed the scratch itself."""
    kernel, layer = prepared(ExllamaLinearKernel, Case())

    with pytest.raises(DtypeError, match=f"qweight: x: wrong dtype\n.*float16\n.*{str(dtype)[6:]}"):
        kernel.apply_weights(layer, torch.ones(1, 256, dtype=dtype))


def test_scratch_space_is_given_for_every_weight_of_a_module() -> None:
    module, cases = nn.Module(), (Case(), Case(N=96, K=512))
    kernels = [
        made(ExllamaLinearKernel, case, put(module, case, case.weight(), f"w{i}"))
        for i, case in enumerate(cases)
    ]
    for kernel in kernels:
        kernel.process_weights_after_loading(module)
    x: Tensor = torch.ones(2, 256).half()
    with pytest.raises(NotWarmError, match="w0_qweight: no scratch"):
        kernels[0].apply_weights(module, x)

    given = warm_up(module, 4)

    assert given == {torch.device("cpu"): 2 * 96 * 512 + 4 * 96 * 4}


@pytest.mark.parametrize("model", [None, [nn.Linear(2, 2)], 5], ids=["None", "a list", "a number"])
def test_only_a_module_is_warmed_up(model: Any) -> None:
    with pytest.raises(ArgumentError, match=r"model\n  expected a torch\.nn\.Module"):
        warm_up(model, 4)
