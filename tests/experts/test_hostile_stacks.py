"""Stacks that contradict the config, each other, or sense: bounded work, and only errors of qload's."""

import json
import struct
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload.checkpoint import LayerIndex, account, open_checkpoint
from qload.detect import loader_from_config
from qload.errors import QloadError, TwoFormatsError, UnsupportedFormatError
from qload.experts import stack_finder, with_experts
from qload.experts.stack_layouts import FIELDS, LAYERS
from qload.storage import MemoryStorage, SafetensorsStorage, TensorInfo
from qload.storage.header import MAX_EMPTY_SIDE
from qload.verify import verify
from qload.weights import Weights
from tests.example_counts import at_most
from tests.experts.expert_layers import FACTS
from tests.experts.mixtures import HIDDEN, INNER, KINDS, LAYER, E, config, drawn, lead, mixture

GATE_UP = f"{lead('qwen3_moe')}.gate_up_proj"
DOWN = f"{lead('qwen3_moe')}.down_proj"


class Headers:
    """Names with shapes and dtypes, and nothing that could be read."""

    def __init__(self, **infos: TensorInfo) -> None:
        self.infos = infos

    def keys(self) -> Any:
        return self.infos.keys()

    def info(self, name: str) -> TensorInfo:
        return self.infos[name]

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        raise AssertionError("no value says what a stack is")

    def close(self) -> None:
        """Nothing is open."""


def stack(*shape: int, dtype: torch.dtype = torch.bfloat16) -> TensorInfo:
    return TensorInfo(dtype, shape, "a.safetensors")


@pytest.mark.parametrize("count", [0, E + 1, stack_finder.MAX_EXPERTS + 1, 10**9, 1 << 62])
def test_more_experts_than_the_config_says_are_left_in_their_stack(count: int) -> None:
    for size in (INNER, 0):
        headers = Headers(**{DOWN: stack(count, HIDDEN, size)})
        assert list(with_experts(headers, config("qwen3_moe")).keys()) == [DOWN]


def test_scales_of_more_experts_than_the_config_says_are_not_read() -> None:
    scales = f"{DOWN}_scale_inv"
    weight = stack(HIDDEN, INNER, dtype=torch.float8_e4m3fn)
    headers = Headers(
        **{f"{lead('qwen3_moe')}.0.down_proj.weight": weight, scales: stack(E + 1, 1, 1, dtype=torch.float32)}
    )

    unread = stack_finder.search(headers, config("qwen3_moe")).unread

    assert unread.keys() == {scales}
    assert f"1 to {E} experts are expected" in unread[scales]


@pytest.mark.parametrize("said", [10**9, 1 << 62, "three", None, -1, 2.5])
def test_a_config_that_counts_any_number_of_experts_allows_no_more_than_there_may_be(said: Any) -> None:
    told = config("qwen3_moe", num_experts=said)
    few, many = stack(E, HIDDEN, INNER), stack(stack_finder.MAX_EXPERTS + 1, HIDDEN, INNER)

    assert len(with_experts(Headers(**{DOWN: few}), told).keys()) in (E, 1)
    assert len(with_experts(Headers(**{DOWN: many}), told).keys()) == 1


def test_names_beyond_a_header_of_them_are_not_made() -> None:
    count = stack_finder.MAX_EXPERTS
    names = [f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(4096)]
    headers = Headers(**{name: stack(count, 1, 1) for name in names})
    told = config("qwen3_moe", num_experts=count, num_hidden_layers=1 << 40)

    found = stack_finder.find_stacks(headers, told)

    assert sum(one.count * len(one.parts) for one in found) == stack_finder.MAX_NAMES


@pytest.mark.usefixtures("seen_texts")
def test_a_stack_and_an_expert_of_one_name_are_two_sources() -> None:
    both = mixture("qwen3_moe", "plain")
    own = f"{lead('qwen3_moe')}.1.up_proj.weight"

    with pytest.raises(TwoFormatsError, match=r"up_proj\.weight: held by two tensors\n.*gate_up_proj or"):
        with_experts(MemoryStorage({**both.stacks, own: both.each[own]}), config("qwen3_moe"))
    alone = {f"{lead('qwen3_moe')}.gate_proj": torch.zeros(E, INNER, HIDDEN)}
    with pytest.raises(TwoFormatsError, match=r"gate_proj\.weight: held by two tensors"):
        with_experts(MemoryStorage({**both.stacks, **alone}), config("qwen3_moe"))


def write(folder: Path, tensors: dict[str, Tensor], told: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.usefixtures("seen_texts")
def test_two_sources_are_an_error_of_opening_and_a_finding_of_verify(tmp_path: Path) -> None:
    both = mixture("qwen3_moe", "plain")
    own = f"{lead('qwen3_moe')}.0.down_proj.weight"
    folder = write(tmp_path, {**both.stacks, own: both.each[own]}, config("qwen3_moe"))

    with pytest.raises(TwoFormatsError):
        open_checkpoint(folder)
    report = verify(folder)
    assert report.verdict == "unreadable"
    assert [(each.rule, each.tensor) for each in report.findings] == [("two-formats", own)]


def test_experts_of_no_bytes_in_a_file_stay_in_their_stack(tmp_path: Path) -> None:
    shape = [MAX_EMPTY_SIDE, 0, 4]
    header = json.dumps({DOWN: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3_moe", num_experts=10**9)))

    with open_checkpoint(tmp_path) as weights:
        assert list(weights.storage.keys()) == [DOWN]
    assert verify(tmp_path).to_json()["coverage"]["total"] == 0


@pytest.mark.parametrize("kind", ["a_type_of_no_table", None, 3])
def test_plain_stacks_of_a_type_that_is_not_known_stay_as_they_are(kind: Any) -> None:
    both = mixture("gpt_oss", "plain")
    told = {**config("gpt_oss"), "model_type": kind}
    weights = Weights(with_experts(MemoryStorage(both.stacks), told), loader=loader_from_config(None))

    assert sorted(weights.storage.keys()) == sorted(both.stacks)
    report = weights.report()
    assert (report.unread, report.unused) == ({}, sorted(both.stacks))
    for name, tensor in both.stacks.items():
        assert torch.equal(weights.get_tensor(name), tensor)
    assert weights.report().complete
    coverage = account(LayerIndex(weights)).coverage
    assert (coverage.read, coverage.unread) == (coverage.total, 0)
    with pytest.raises(UnsupportedFormatError, match=rf"outputs and inputs.*{lead('gpt_oss')}"):
        weights.get_experts(lead("gpt_oss"), facts=FACTS)


def test_the_sizes_tell_which_way_halves_lie_and_turns_are_never_guessed() -> None:
    """Outputs first or inputs first: what the config's sizes say; of equal sizes, what the type says."""
    gate, up, down = (
        drawn((E, *shape), torch.float32, 1) for shape in ((INNER, HIDDEN),) * 2 + ((HIDDEN, INNER),)
    )
    halves = {
        GATE_UP: torch.cat([gate, up], 1).transpose(1, 2).contiguous(),
        DOWN: down.transpose(1, 2).contiguous(),
    }
    told = config("qwen3_moe")
    storage = with_experts(MemoryStorage(halves), told)
    assert torch.equal(storage.read(f"{lead('qwen3_moe')}.2.up_proj.weight"), up[2])
    assert torch.equal(storage.read(f"{lead('qwen3_moe')}.2.down_proj.weight"), down[2])

    turned = {
        name: tensor.transpose(1, 2).contiguous()
        for name, tensor in mixture("gpt_oss", "plain").stacks.items()
        if tensor.ndim == 3
    }
    assert sorted(with_experts(MemoryStorage(turned), config("gpt_oss")).keys()) == sorted(turned)


@pytest.mark.parametrize("kind", KINDS)
def test_where_inputs_and_outputs_are_as_many_a_stack_lies_as_its_type_has_it(kind: str) -> None:
    square, name = drawn((E, HIDDEN, HIDDEN), torch.float32, 2), f"{lead(kind)}.down_proj"
    told = config(kind, **{KINDS[kind].inner: HIDDEN})
    storage = with_experts(MemoryStorage({name: square}), told)

    for expert in range(E):
        want = square[expert].T if KINDS[kind].inputs_first else square[expert]
        assert torch.equal(storage.read(f"{lead(kind)}.{expert}.down_proj.weight"), want)


@pytest.mark.parametrize(
    ("inner", "block", "rows", "joined"),
    [
        (64, 64, 2, True),  # a row of blocks each
        (64, 128, 1, True),  # one row of blocks for both
        (96, 64, 3, None),  # the second row is the gate's and up's, which stay one layer
        (96, 128, 2, True),  # of parts shorter than a block there is a row each
        (48, 128, 2, True),
        (192, 128, 4, True),  # joined from two and two
        (200, 128, 4, False),
        (456, 128, 8, False),
    ],
)  # fmt: skip
def test_scales_of_blocks_that_gate_and_up_share_are_not_told_apart(
    inner: int, block: int, rows: int, joined: bool | None
) -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}}
    told = config("qwen3_moe", moe_intermediate_size=inner, **fp8)
    columns = -(-HIDDEN // block)
    weight = stack(E, 2 * inner, HIDDEN, dtype=torch.float8_e4m3fn)
    scale = stack(E, rows, columns, dtype=torch.float32)
    shown = with_experts(Headers(**{GATE_UP: weight, f"{GATE_UP}_scale_inv": scale}), told)
    own = {
        f"{lead('qwen3_moe')}.{e}.{part}_proj.weight": stack(inner, HIDDEN, dtype=torch.float8_e4m3fn)
        for e in range(E)
        for part in ("gate", "up")
    }
    beside = with_experts(Headers(**own, **{f"{GATE_UP}_scale_inv": scale}), told)

    if joined is None:
        info = shown.info(f"{lead('qwen3_moe')}.0.gate_up_proj.weight_scale_inv")
        assert info.shape == (rows, columns)
    for storage in (shown, beside):
        names = list(storage.keys())
        one_layer = joined is None and storage is shown
        assert (f"{GATE_UP}_scale_inv" in names) != (joined or one_layer)
        if joined:
            info = storage.info(f"{lead('qwen3_moe')}.0.up_proj.weight_scale_inv")
            assert info.shape == (max(1, rows // 2), columns)


@pytest.mark.parametrize(
    ("dtype", "beside"),
    [
        (torch.int32, []),  # packed integers, of which no owner stores stacks
        (torch.uint8, []),  # codes of which nothing says whether they are two inputs or two outputs
        (torch.uint8, ["_weight_scale"]),
        (torch.float8_e4m3fn, ["_weight_scale"]),  # of a shape that is none of a scale's
    ],
)
def test_a_form_that_is_not_known_stays_a_stack(dtype: torch.dtype, beside: list[str]) -> None:
    infos = {DOWN: stack(E, HIDDEN, INNER, dtype=dtype)}
    infos |= {f"{DOWN}{suffix}": stack(E, HIDDEN, INNER, 1, dtype=torch.float32) for suffix in beside}

    assert list(with_experts(Headers(**infos), config("qwen3_moe")).keys()) == list(infos)


SIDES = st.integers(0, 5) | st.sampled_from([HIDDEN, INNER, 16, 2 * INNER])
SHAPES = st.lists(SIDES, max_size=4).map(tuple).filter(lambda shape: prod(shape) <= 1 << 18)
DTYPES = st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32, torch.int32])
NAMES = st.sampled_from(
    [f"{matrix}{suffix}" for matrix in LAYERS for suffix in FIELDS] + ["0.up_proj.weight", "1.w2.weight"]
)


@at_most(100)
@given(
    kind=st.sampled_from([*KINDS, "llama", "?"]),
    drawn_infos=st.dictionaries(NAMES, st.tuples(SHAPES, DTYPES), max_size=6),
    sizes=st.dictionaries(
        st.sampled_from(["num_experts", "hidden_size", "num_local_experts"]), st.integers(-1, 99) | st.none()
    ),
    block=st.lists(st.integers(-1, 99), max_size=3) | st.none() | st.integers(),
)
def test_whatever_is_there_only_errors_of_qload_are_raised(
    kind: str, drawn_infos: dict[str, Any], sizes: dict[str, Any], block: Any
) -> None:
    module = f"{LAYER}.{KINDS[kind].lead}" if kind in KINDS else "experts"
    tensors = {
        f"{module}.{name}": torch.zeros(shape).to(dtype) for name, (shape, dtype) in drawn_infos.items()
    }
    told = {"model_type": kind, **sizes, "quantization_config": {"weight_block_size": block}}
    stored = MemoryStorage(tensors)
    try:
        storage = with_experts(stored, told)
    except QloadError:
        return
    for name in storage.keys():  # noqa: SIM118
        info = storage.info(name)
        read = storage.read(name)
        assert (read.dtype, tuple(read.shape)) == (info.dtype, info.shape)
    weights = Weights(storage, loader=loader_from_config({"quant_method": "mxfp4"}))
    weights.report()
    for part in ("gate_proj", "down_proj"):
        with suppress(QloadError):
            weights.get_weights(f"{module}.0.{part}")


def test_what_a_file_holds_is_read_by_the_same_view(tmp_path: Path) -> None:
    both = mixture("gpt_oss", "nvfp4")
    folder = write(tmp_path, both.stacks, config("gpt_oss"))

    with SafetensorsStorage(folder) as stored:
        storage = with_experts(stored, config("gpt_oss"))
        for name, tensor in both.each.items():
            assert torch.equal(
                storage.read(name).view(torch.uint8) if tensor.ndim else storage.read(name),
                tensor.view(torch.uint8) if tensor.ndim else tensor,
            )
            assert storage.info(name).file == "model.safetensors"
