"""Experts of a stack have the tensors that each would have if it were stored by itself."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import NonfiniteScaleError
from qload.experts import ExpertFacts, ExpertStacks, GatedActivation, with_experts
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.example_counts import at_most
from tests.experts.mixtures import (
    CASES,
    CONFIGS,
    HIDDEN,
    INNER,
    KINDS,
    E,
    config,
    drawn,
    fused,
    laid,
    lead,
    mixture,
)
from tests.format_cases import lawful

every_case = pytest.mark.parametrize(("kind", "form"), CASES)


def config_of(kind: str, form: str) -> dict[str, Any]:
    return config(kind) if CONFIGS[form] is None else config(kind, quantization_config=CONFIGS[form])


def opened(kind: str, form: str, tensors: dict[str, Tensor], **options: Any) -> Weights:
    storage = with_experts(MemoryStorage(tensors), config_of(kind, form))
    return Weights(storage, loader=loader_from_config(CONFIGS[form]), **options)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal shapes, dtypes and bytes."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (one, other)))


@every_case
def test_a_stack_is_shown_as_the_tensors_of_each_expert(kind: str, form: str) -> None:
    both = mixture(kind, form)
    beside = {"model.norm.weight": torch.ones(HIDDEN)}
    storage = with_experts(MemoryStorage({**both.stacks, **beside}), config_of(kind, form))

    assert sorted(storage.keys()) == sorted([*both.each, *beside])
    assert len(storage.keys()) == len(both.each) + 1
    for name, tensor in {**both.each, **beside}.items():
        info = storage.info(name)
        assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes)
        got = storage.read(name)
        assert same(got, tensor)
        assert got.is_contiguous()
    held = sum(info.nbytes for name in storage.keys() if not (info := storage.info(name)).shared)  # noqa: SIM118
    assert held == sum(tensor.nbytes for tensor in (*both.stacks.values(), *beside.values()))


@every_case
def test_a_stack_is_still_known_by_its_own_name(kind: str, form: str) -> None:
    both = mixture(kind, form)
    storage = with_experts(MemoryStorage(both.stacks), config_of(kind, form))

    for name, tensor in both.stacks.items():
        assert name in storage.keys()  # noqa: SIM118
        assert storage.info(name).shape == tensor.shape
        assert same(storage.read(name), tensor)


@every_case
@at_most(20)
@given(data=st.data())
def test_any_rectangle_is_that_of_the_experts_tensor(kind: str, form: str, data: Any) -> None:
    both = mixture(kind, form)
    storage = with_experts(MemoryStorage(both.stacks), config_of(kind, form))
    for _ in range(3):
        name = data.draw(st.sampled_from(sorted(both.each)))
        tensor = both.each[name]
        index = tuple(rectangle(data, tensor.shape))
        got = storage.read(name, index)
        assert same(got, tensor[index])
        got.zero_()  # a copy, so that nobody else has it
        assert same(storage.read(name, index), tensor[index])


def rectangle(data: Any, shape: tuple[int, ...]) -> Iterator[slice]:
    for size in shape:
        start = data.draw(st.integers(0, size))
        yield slice(start, data.draw(st.integers(start, size)))


@every_case
def test_every_expert_loads_as_if_it_were_stored_by_itself_whole_and_cut(kind: str, form: str) -> None:
    both = mixture(kind, form)
    for part in ("gate_proj", "up_proj", "down_proj"):
        prefix = f"{lead(kind)}.{E - 1}.{part}"
        one, other = (opened(kind, form, tensors).get_weights(prefix) for tensors in (both.stacks, both.each))
        assert (type(one), one.config, one.layer) == (type(other), other.config, other.layer)
        assert one.fields().keys() == other.fields().keys()
        assert all(same(one.fields()[name], other.fields()[name]) for name in one.fields())
        for axis, load in enumerate((Weights.get_weights_col, Weights.get_weights_row)):
            for world in (2, 4):
                if lawful(one.config, "NK"[axis], one.shape[axis], world, one.shape[1]):
                    weights = (
                        opened(kind, form, both.stacks, process_group=rank) for rank in FakeWorld(world)
                    )
                    shares = [load(each, prefix).dequantize() for each in weights]
                    assert same(torch.cat(shares, axis), one.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_up_of_stacks_of_their_own(kind: str) -> None:
    gate, up = (drawn((E, INNER, HIDDEN), torch.float16, seed) for seed in (1, 2))
    first = KINDS[kind].inputs_first
    stacks = {
        f"{lead(kind)}.{name}": one.transpose(1, 2).contiguous() if first else one
        for name, one in (("gate_proj", gate), ("up_proj", up))
    }
    storage = with_experts(MemoryStorage(stacks), config(kind))

    assert len(storage.keys()) == 2 * E
    for expert in range(E):
        assert same(storage.read(f"{lead(kind)}.{expert}.gate_proj.weight"), gate[expert])
        assert same(storage.read(f"{lead(kind)}.{expert}.up_proj.weight"), up[expert])


def test_scales_of_outputs_are_told_by_their_shape_where_they_lie_otherwise_than_the_weight() -> None:
    """As transformers stores Llama 4 in fbgemm's FP8: (E, 1, 2 I) of gate and up, and (E, H, 1) of down."""
    both, module = mixture("llama4_text", "fp8_channel_matrix"), lead("llama4_text")
    stacks = {name.replace("_weight_scale", "_scale"): tensor for name, tensor in both.stacks.items()}
    stacks[f"{module}.down_proj_scale"] = stacks[f"{module}.down_proj_scale"].transpose(1, 2).contiguous()
    assert stacks[f"{module}.gate_up_proj_scale"].shape == (E, 1, 2 * INNER)
    assert stacks[f"{module}.down_proj_scale"].shape == (E, HIDDEN, 1)
    storage = with_experts(MemoryStorage(stacks), config("llama4_text"))

    assert sorted(storage.keys()) == sorted(both.each)
    assert all(same(storage.read(name), tensor) for name, tensor in both.each.items())


def test_of_one_scale_for_each_part_gate_has_the_first_and_up_the_second() -> None:
    """As transformers stores FP8 of one scale a matrix."""
    module = lead("qwen3_moe")
    scale = torch.arange(2.0 * E).reshape(E, 2, 1)
    stacks = {
        f"{module}.gate_up_proj": drawn((E, 2 * INNER, HIDDEN), torch.float8_e4m3fn, 1),
        f"{module}.gate_up_proj_scale_inv": scale,
    }
    storage = with_experts(MemoryStorage(stacks), config("qwen3_moe"))

    for expert in range(E):
        for place, part in enumerate(("gate_proj", "up_proj")):
            got = storage.read(f"{module}.{expert}.{part}.weight_scale_inv")
            assert same(got, torch.tensor([[2.0 * expert + place]]))


@every_case
def test_an_expert_is_read_and_no_other(kind: str, form: str) -> None:
    """What a rank of expert parallel asks for, counted by the storage below."""
    both = mixture(kind, form)
    spoilt = {name: tensor.clone() for name, tensor in both.stacks.items()}
    for tensor in spoilt.values():
        if tensor.ndim:
            tensor[1:].zero_()
    stored = MemoryStorage(spoilt)
    storage = with_experts(stored, config_of(kind, form))
    mine = [name for name in both.each if f"{lead(kind)}.0." in name]

    assert all(same(storage.read(name), both.each[name]) for name in mine)
    of_one = sum(
        tensor.nbytes // (E if tensor.ndim else 1) * (2 if tensor.ndim < 2 and "gate_up" in name else 1)
        for name, tensor in both.stacks.items()
    )
    turns = KINDS[kind].interleaved
    assert stored.bytes_read <= of_one * (2 if turns else 1)
    assert turns or stored.bytes_read == of_one


@every_case
@pytest.mark.parametrize("first", [0, 1])
def test_rows_of_all_experts_are_those_that_single_reads_return(kind: str, form: str, first: int) -> None:
    both = mixture(kind, form)
    storage: Any = with_experts(MemoryStorage(both.stacks), config_of(kind, form))
    start = f"{lead(kind)}.0."
    for rest in [name.removeprefix(start) for name in both.each if name.startswith(start)]:
        names = [f"{lead(kind)}.{expert}.{rest}" for expert in range(first, E)]
        whole = storage.info(names[0]).shape
        for index in ((), tuple(slice(0, -(-size // 2)) for size in whole)):
            wanted = torch.stack([storage.read(name, index) for name in names])
            rows = torch.empty_like(wanted)
            columns = torch.empty((*wanted.shape, 2), dtype=wanted.dtype)[..., 0]  # rows with gaps

            storage.read_rows([(names, index, rows), (names[::-1], index, columns)])

            assert same(rows, wanted)
            assert same(columns.contiguous(), wanted.flip(0))


@every_case
def test_a_stack_is_read_once_for_all_experts(kind: str, form: str) -> None:
    both = mixture(kind, form)
    stored = MemoryStorage(both.stacks)
    weights = opened(kind, form, {})
    weights.storage = with_experts(stored, config_of(kind, form))

    weights.get_experts(lead(kind), facts=ExpertFacts(GatedActivation("silu")))

    matrices = [name for name, tensor in both.stacks.items() if tensor.ndim > 2]
    small = sum(tensor.nbytes for tensor in both.stacks.values() if tensor.ndim < 3)
    assert max(stored.reads[name] for name in matrices) <= 2  # of gate, and of up
    assert stored.bytes_read <= sum(both.stacks[name].nbytes for name in matrices) + 2 * E * small


@pytest.mark.parametrize("cut", [Weights.get_weights_col, Weights.get_weights_row], ids=["col", "row"])
def test_a_scale_that_is_not_finite_is_refused_by_all_ranks_of_a_stack(cut: Any) -> None:
    kind, form = "qwen3_moe", "fp8_channel_matrix"
    both, name = mixture(kind, form), f"{lead(kind)}.down_proj"
    both.stacks[f"{name}_weight_scale"][E - 1, HIDDEN - 1] = torch.nan  # of the last rank's outputs
    texts = set()
    for rank in FakeWorld(2):
        with pytest.raises(NonfiniteScaleError) as caught:
            cut(opened(kind, form, both.stacks, process_group=rank), name)
        texts.add(str(caught.value))

    (text,) = texts
    assert text.startswith(f"{lead(kind)}.{E - 1}.down_proj.weight_scale: ")


def test_of_gate_and_up_in_turns_no_byte_is_read_twice_in_a_row() -> None:
    both = mixture("gpt_oss", "plain")
    stored = MemoryStorage(both.stacks)
    weights = opened("gpt_oss", "plain", {})
    weights.storage = with_experts(stored, config("gpt_oss"))
    prefix = lead("gpt_oss")
    for expert in range(E):
        for part in ("gate_proj", "up_proj", "down_proj"):
            weights.get_weights(f"{prefix}.{expert}.{part}")

    stacks = [both.stacks[f"{prefix}.{name}"] for name in ("gate_up_proj", "down_proj")]
    assert stored.bytes_read == sum(tensor.nbytes for tensor in stacks)


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text"])
def test_columns_of_long_rows_are_read_many_at_once(kind: str) -> None:
    """As `verify` reads a matrix: some outputs, then the next ones."""
    inner, hidden, step = 9000, 16, 100
    told = config(kind, hidden_size=hidden, **{KINDS[kind].inner: inner})
    gate, up = (drawn((E, inner, hidden), torch.bfloat16, seed) for seed in (1, 2))
    stack = laid(kind, fused(kind, gate, up))
    stored = MemoryStorage({f"{lead(kind)}.gate_up_proj": stack})
    storage = with_experts(stored, told)
    for name, want in (("gate_proj", gate), ("up_proj", up)):
        for start in range(0, inner, step):
            run = storage.read(f"{lead(kind)}.1.{name}.weight", (slice(start, start + step),))
            assert same(run, want[1, start : start + step])

    assert stored.bytes_read <= 2 * stack[1].nbytes
    assert sum(stored.reads.values()) < 2 * inner / step / 10


def test_a_user_may_ask_for_a_whole_stack_of_mxfp4() -> None:
    both = mixture("gpt_oss", "mxfp4")
    weights = opened("gpt_oss", "mxfp4", both.stacks)
    prefix = f"{lead('gpt_oss')}.gate_up_proj"

    stack = weights.get_weights(prefix)

    assert stack.format == "mxfp4_experts"
    assert stack.shape == (E, 2 * INNER, HIDDEN)
    experts = [weights.get_weights(f"{lead('gpt_oss')}.{expert}.up_proj").dequantize() for expert in range(E)]
    assert same(stack.dequantize()[:, 1::2].contiguous(), torch.stack(experts))


def test_what_a_stack_held_is_used_once_the_stack_is_loaded() -> None:
    both = mixture("gpt_oss", "mxfp4")
    weights = opened("gpt_oss", "mxfp4", both.stacks)
    assert weights.report().unused == sorted(both.each)

    weights.get_weights(f"{lead('gpt_oss')}.gate_up_proj")
    assert weights.report().unused == sorted(name for name in both.each if "down_proj" in name)

    for name in both.stacks:
        if "down_proj" in name:
            weights.get_tensor(name)
    assert weights.report().complete


def test_a_storage_without_stacks_is_left_as_it_is() -> None:
    stored = MemoryStorage(mixture("qwen3_moe", "plain").each)

    assert with_experts(stored, config("qwen3_moe")) is stored
    assert with_experts(stored, {}) is stored


def test_closing_it_closes_what_is_below() -> None:
    class Closing(MemoryStorage):
        closed = False

        def close(self) -> None:
            self.closed = True

    stored = Closing(mixture("qwen3_moe", "plain").stacks)
    storage = with_experts(stored, config("qwen3_moe"))
    storage.close()

    assert isinstance(storage, ExpertStacks)
    assert stored.closed


def test_a_stack_is_found_below_the_prefix_of_a_view() -> None:
    kind, form = "qwen3_moe", "fp8_channel"
    stacks, name = mixture(kind, form).stacks, f"{lead(kind)}.gate_up_proj"
    outer, inner = name.split(".", 1)

    stack = opened(kind, form, stacks, prefix=outer).get_weights(inner)

    assert same(stack.dequantize(), opened(kind, form, stacks).get_weights(name).dequantize())
