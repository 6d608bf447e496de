"""Loads of experts that are repacked: runs of experts become one layer, and few calls convert all of them."""

import gc
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from torch import Tensor

from qload import (
    ExpertsWeight,
    FakeWorld,
    MemoryStorage,
    RepackingLoader,
    Weights,
    WeightsLoader,
    loader_from_config,
    native,
)
from qload.errors import MismatchError, RepackError
from qload.experts import load as loading
from qload.experts import with_experts
from qload.testing import assert_same_bits
from qload.weights.prefetch import RowReads
from tests.bench.expert_formats import FORMATS
from tests.experts.expert_layers import FACTS, NAMES, PREFIX

COUNT, INNER, HIDDEN = 5, 128, 256
EACH: Mapping[str, str] = {"gptq": "panels", "fp8": "strips", "fp8 channel": "strips", "mxfp4": "strips"}
EACH = {**EACH, "nvfp4": "strips", "gptq 32": "marlin"}
STRIPS = {"gptq": "strips", "gptq 32": "strips", "fp8": "fp8_strips", "fp8 channel": "fp8_strips"}
STRIPS |= {"mxfp4": "fp4_strips", "nvfp4": "fp4_strips"}
formats = pytest.mark.parametrize("name", EACH)


def drawn(name: str, hidden: int = HIDDEN, inner: int = INNER) -> dict[str, Tensor]:
    """Tensors of some experts, random but for zero points."""
    torch.manual_seed(0)
    matrices = dict(zip(NAMES, [(inner, hidden), (inner, hidden), (hidden, inner)], strict=True))
    return {
        f"{PREFIX}.{expert}.{matrix}.{suffix}": tensor
        for expert in range(COUNT)
        for matrix, (N, K) in matrices.items()
        for suffix, tensor in FORMATS[name].draw(N, K, "cpu").items()
    }


def experts(name: str, tensors: Mapping[str, Tensor], layout: str | None = None, **how: Any) -> ExpertsWeight:
    """The experts as stored, or repacked by the loader."""
    loader = loader_from_config(dict(FORMATS[name].config))
    loader = loader if layout is None else RepackingLoader(loader, layout, **how)
    return Weights(MemoryStorage(tensors), loader=loader).get_experts(PREFIX, facts=FACTS)


def counted(function: Callable[[], ExpertsWeight]) -> tuple[ExpertsWeight, int]:
    """The result, and how many layers were converted, without native code."""
    repack = RepackingLoader._repack
    repacks = mock.patch.object(RepackingLoader, "_repack", autospec=True, side_effect=repack)
    with native.reference(), repacks as calls:
        return function(), calls.call_count


def assert_equal(one: ExpertsWeight, other: ExpertsWeight) -> None:
    for stack in ("gate_up", "down"):
        a, b = getattr(one, stack), getattr(other, stack)
        assert (a.weight_type, a.config, a.layer, a.names) == (b.weight_type, b.config, b.layer, b.names)
        assert a.tensors.keys() == b.tensors.keys()
        for field, tensor in a.tensors.items():
            assert_same_bits(tensor, b.tensors[field])


@formats
def test_the_first_expert_is_converted_and_the_others_at_once(name: str) -> None:
    tensors = drawn(name)

    made, calls = counted(lambda: experts(name, tensors, EACH[name]))

    assert calls == 4  # the first expert and the others, of gate and up, and of down
    assert_equal(made, experts(name, tensors).repack(EACH[name]))


@formats
def test_runs_are_as_long_as_their_bytes_allow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = drawn(name)
    down = [tensor.nbytes for key, tensor in tensors.items() if key.startswith(f"{PREFIX}.0.down_proj.")]
    monkeypatch.setattr(loading, "RUN_BYTES", 2 * sum(down))

    made, calls = counted(lambda: experts(name, tensors, EACH[name]))

    assert calls == 5 + 3  # of gate and up each expert alone; of down the first, and two runs of two
    assert_equal(made, experts(name, tensors).repack(EACH[name]))


@formats
def test_shares_of_the_other_experts_are_converted_at_once(name: str) -> None:
    tensors = drawn(name, inner=2 * INNER)
    loader = loader_from_config(dict(FORMATS[name].config))

    for group in FakeWorld(2):

        def share(by: WeightsLoader, group: Any = group) -> ExpertsWeight:
            weights = Weights(MemoryStorage(tensors), loader=by, process_group=group)
            return weights.get_experts(PREFIX, facts=FACTS, split="tensor")

        made, calls = counted(lambda share=share: share(RepackingLoader(loader, EACH[name])))  # type: ignore[misc]

        assert calls == 4
        assert_equal(made, share(loader).repack(EACH[name], whole=experts(name, tensors)))


def test_a_run_is_read_while_the_one_before_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, begin, fold = list[str](), Weights.begin_rows, loading.fold

    def began(self: Weights, asked: Any) -> Any:
        turns.append("read")
        return begin(self, asked)

    def folded(*stacks: Any) -> Any:
        turns.append("convert")
        return fold(*stacks)

    monkeypatch.setattr(Weights, "begin_rows", began)
    monkeypatch.setattr(loading, "fold", folded)
    monkeypatch.setattr(loading, "RUN_BYTES", 1)

    experts("mxfp4", drawn("mxfp4"), "strips")

    assert turns == 2 * ["read", *(COUNT - 2) * ["read", "convert"], "convert"]


def test_a_refused_run_ends_the_reads_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, close = list[object](), RowReads.close

    def closed(self: RowReads) -> None:
        ended.append(self)
        close(self)

    monkeypatch.setattr(RowReads, "close", closed)
    monkeypatch.setattr(loading, "RUN_BYTES", 1)
    tensors = drawn("mxfp4")
    tensors[f"{PREFIX}.2.gate_proj.weight_scale"][7, :2] = torch.tensor([1, 254])

    with pytest.raises(RepackError, match=r"experts\.2\.gate_proj"):
        experts("mxfp4", tensors, "strips")

    assert len(set(map(id, ended))) == 3  # of experts 0 and 1, of 2, and of 3


@pytest.mark.usefixtures("cpu_module")
@pytest.mark.parametrize("layout", ["panels", "marlin"])
@pytest.mark.parametrize("alike", [True, False], ids=["symmetric", "one with zero points"])
def test_native_moves_repack_all_but_the_first_expert(layout: str, alike: bool) -> None:
    tensors = drawn("gptq")
    if not alike:  # the zero points of the first expert are stored too
        for expert in (0, 3):
            for name in NAMES:
                tensors[f"{PREFIX}.{expert}.{name}.qzeros"][0, 0] = 0x12345678
    repack = RepackingLoader._repack
    repacks = mock.patch.object(RepackingLoader, "_repack", autospec=True, side_effect=repack)

    with repacks as calls:
        made = experts("gptq", tensors, layout)

    assert calls.call_count == (2 if alike else 4)
    want = experts("gptq", tensors)
    for expert in range(COUNT):
        assert_same_bits(made.gate_up.dequantize(expert), want.gate_up.dequantize(expert))
        assert_same_bits(made.down.dequantize(expert), want.down.dequantize(expert))
    if alike:
        assert_equal(made, want.repack(layout))


@pytest.mark.usefixtures("cpu_module")
def test_native_moves_do_not_drop_the_zero_points_of_an_expert() -> None:
    tensors = drawn("gptq")
    tensors[f"{PREFIX}.3.down_proj.qzeros"][0, 0] = 0x12345678

    with pytest.raises(MismatchError, match=r"experts\.3\.down_proj"):
        experts("gptq", tensors, "panels")


@pytest.mark.parametrize("name", ["fp8 channel", "mxfp4", "nvfp4"])
def test_experts_that_share_a_tile_are_converted_alone(name: str) -> None:
    tensors = drawn(name, hidden=96)  # strips have 64 columns

    made, calls = counted(lambda: experts(name, tensors, "strips"))

    assert calls == 2 + COUNT  # gate and up at once, and each down
    assert_equal(made, experts(name, tensors).repack("strips"))


def test_experts_in_act_order_are_converted_alone() -> None:
    tensors = drawn("gptq")
    for at, key in enumerate(key for key in tensors if key.endswith("gate_proj.g_idx")):
        turned = tensors[key].roll(at + 1)
        tensors |= {key: turned, key.replace("gate", "up"): turned}

    made, calls = counted(lambda: experts("gptq", tensors, "panels"))

    assert calls == COUNT + COUNT  # facts of some matrices differ
    assert_equal(made, experts("gptq", tensors).repack("panels"))


def test_an_expert_beyond_the_layout_is_refused_by_its_name() -> None:
    tensors = drawn("mxfp4")
    tensors[f"{PREFIX}.3.down_proj.weight_scale"][7, 0] = 1
    tensors[f"{PREFIX}.3.down_proj.weight_scale"][7, 1] = 254

    with pytest.raises(RepackError, match=r"experts\.3\.down_proj: (?s:.*)too small for float16"):
        experts("mxfp4", tensors, "strips")
    with pytest.raises(MismatchError, match=r"experts\.3\.down_proj"):
        experts("mxfp4", tensors, "strips", strict=False)


@formats
def test_auto_repacks_experts_for_the_kernels_of_a_gpu(name: str) -> None:
    loader: Any = loader_from_config(dict(FORMATS[name].config), target="auto")
    weights = Weights(MemoryStorage(drawn(name)), loader=loader.for_chip(90))

    made = weights.get_experts(PREFIX, facts=FACTS)

    assert [stack.format for stack in (made.gate_up, made.down)] == 2 * [STRIPS[name]]


def test_experts_that_stay_as_stored_are_freed_with_their_last_reference() -> None:
    """The refusal of a repack has a traceback, whose frames have the experts."""
    loader = loader_from_config(dict(FORMATS["fp8"].config), target="auto")  # no CPU kernel repacks FP8
    weights = Weights(MemoryStorage(drawn("fp8")), loader=loader)
    gc.collect()
    gc.disable()
    try:
        made = weights.get_experts(PREFIX, facts=FACTS)
        assert made.gate_up.format == "fp8"
        known = ref(made)
        del made
        assert known() is None
    finally:
        gc.enable()


def test_a_block_of_gate_and_up_is_read_once() -> None:
    """gpt-oss stores their outputs in turns."""
    shape = COUNT, 2 * INNER, HIDDEN // 32
    stored = {
        f"{PREFIX}.gate_up_proj_blocks": torch.randint(256, (*shape, 16), dtype=torch.uint8),
        f"{PREFIX}.gate_up_proj_scales": torch.full(shape, 120, dtype=torch.uint8),
        f"{PREFIX}.down_proj_blocks": torch.zeros(COUNT, HIDDEN, INNER // 32, 16, dtype=torch.uint8),
        f"{PREFIX}.down_proj_scales": torch.full((COUNT, HIDDEN, INNER // 32), 120, dtype=torch.uint8),
    }
    sizes = {"num_local_experts": COUNT, "hidden_size": HIDDEN, "intermediate_size": INNER}
    storage = MemoryStorage(stored)
    stacks = with_experts(storage, {"model_type": "gpt_oss", **sizes})
    weights = Weights(stacks, loader=loader_from_config({"quant_method": "mxfp4"}))

    made = weights.get_experts(PREFIX, facts=FACTS)

    assert storage.reads == dict.fromkeys(stored, 1)
    codes = made.gate_up.tensors["weight_packed"].view(COUNT, 2, INNER, HIDDEN // 2)
    blocks = stored[f"{PREFIX}.gate_up_proj_blocks"].view(COUNT, INNER, 2, HIDDEN // 2)
    assert_same_bits(codes, blocks.transpose(1, 2).contiguous())
