"""AWQ layers whose kernel is not Marlin's, and whose group size a layer has to explain."""

from typing import Any

import pytest
import torch

from qload.errors import ArgumentError, CutError
from qload.formats import AWQWeight
from qload.kernels import (
    DequantizeLinearKernel,
    ExllamaLinearKernel,
    StripsLinearKernel,
    warm_up,
)
from qload.methods import AWQMarlinConfig, ColumnParallelLinear, RowParallelLinear, awq_marlin
from qload.testing import assert_reads_back
from tests.methods.engine import awq, config_of, load, ranks, ready

pytestmark = pytest.mark.usefixtures("seen_texts")


def made(weight: AWQWeight, dtype: torch.dtype | None, **changes: Any) -> Any:
    N, K = weight.shape
    config = config_of(weight, **changes)
    module = ColumnParallelLinear(K, N, bias=False, params_dtype=dtype, quant_config=config)
    load(module, weight.fields())
    return ready(module)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_default_dtype_of_torch_is_multiplied_too(bits: int) -> None:
    """float32, for which Marlin has no kernel."""
    weight = awq(128, 64, 32, bits)

    module = made(weight, None)

    assert type(module.mp_linear_kernel) is DequantizeLinearKernel
    assert_reads_back(module, weight, torch.float32)


@pytest.mark.parametrize("zero_point", [True, False], ids=["zero points", "symmetric"])
@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        pytest.param(90, StripsLinearKernel, id="Hopper"),
        pytest.param(80, StripsLinearKernel, id="Ampere"),
        pytest.param(75, ExllamaLinearKernel, id="Turing"),
        pytest.param(50, DequantizeLinearKernel, id="Maxwell"),
    ],
)
def test_a_device_below_marlins_gets_another_kernel(
    monkeypatch: pytest.MonkeyPatch, capability: int, kind: type[Any], zero_point: bool
) -> None:
    monkeypatch.setattr(awq_marlin, "compute_capability", lambda device: capability)
    weight = awq(128, 64, 32)
    if not zero_point:
        weight.qzeros.fill_(-0x77777778)  # type: ignore[union-attr]

    module = made(weight, torch.float16, zero_point=zero_point)
    warm_up(module, 128)

    assert type(module.mp_linear_kernel) is kind
    assert bool(module.g_idx.numel()) == (kind is not StripsLinearKernel)
    assert_reads_back(module, weight, torch.float16)


@pytest.mark.parametrize("group", [256, 384])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear], ids=lambda kind: kind.__name__)
def test_a_group_size_that_is_all_inputs_is_one_group(kind: type[Any], group: int) -> None:
    weight = awq(group, 64, -1)

    def make(rank: Any) -> Any:
        config = AWQMarlinConfig.from_config({"bits": 4, "group_size": group, "zero_point": True})
        options = {"params_dtype": torch.float16, "quant_config": config, "process_group": rank}
        module = kind(group, 64, bias=False, **options)
        load(module, weight.fields())
        return ready(module)

    modules = ranks(2, make)
    if kind is ColumnParallelLinear:
        assert_reads_back(lambda x: torch.cat([m(x) for m in modules], -1), weight, torch.float16)
    else:
        halves = lambda x: sum(m(p) for m, p in zip(modules, x.chunk(2, -1), strict=True))  # noqa: E731
        assert_reads_back(halves, weight, torch.float16)


@pytest.mark.parametrize("K", [512, 128, 257])
def test_a_group_size_beyond_marlins_is_refused_by_a_layer_that_has_several(K: int) -> None:
    config = AWQMarlinConfig(4, 256, True)

    with pytest.raises(
        ArgumentError, match=rf"a\.scales: group_size\n.*or all {K} inputs as one group\n.*256"
    ):
        ColumnParallelLinear(K, 64, params_dtype=torch.float16, quant_config=config, prefix="a")


@pytest.mark.parametrize("group", [0, -2, 16, 48, 96, 127])
def test_a_group_size_below_marlins_is_refused_by_the_config(group: int) -> None:
    with pytest.raises(ArgumentError, match=rf"group_size\n.*-1, 32, 64, 128\n.*{group}"):
        AWQMarlinConfig(4, group, True)


def test_a_cut_between_two_groups_only() -> None:
    config = AWQMarlinConfig(4, 128, True)

    with pytest.raises(CutError, match="cuts must be multiples of 128"):
        ranks(2, lambda rank: RowParallelLinear(384, 64, quant_config=config, process_group=rank))
