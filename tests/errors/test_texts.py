"""What an error says to someone who has only the log: every text is a golden, raised by a real mistake."""

import pickle
from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from qload import errors
from qload.checkpoint import check_all_read
from qload.configs import FoundConfig
from qload.detect import (
    AWQWeightsLoader,
    DefaultWeightsLoader,
    GPTQWeightsLoader,
    compare_configs,
    loader_from_config,
    read_claims,
)
from qload.errors import QloadError, UnreadTensorsError
from qload.formats import Fp8Config, Fp8Weight, GPTQConfig, GPTQWeight, UnquantizedWeight
from qload.kernel_formats import repack
from qload.kernels import ExllamaLinearKernel, MPLinearLayerConfig, choose_mp_linear_kernel, scalar_types
from qload.layouts import Order
from qload.methods import get_quantization_config
from qload.models.memory import check_memory
from qload.parallel import ALONE, Rank
from qload.parallel.launcher import RankWatchdog
from qload.storage import MemoryStorage, parse_header
from qload.weights import Weights
from tests.support.changed_values import changed_values
from tests.support.unread import stacks


def layer(**changes: Tensor) -> dict[str, Tensor]:
    tensors = {
        "qweight": torch.zeros(16, 32, dtype=torch.int32),
        "qzeros": torch.zeros(2, 4, dtype=torch.int32),
        "scales": torch.ones(2, 32, dtype=torch.float16),
        "g_idx": torch.arange(128, dtype=torch.int32) // 64,
    }
    return {f"model.q_proj.{name}": tensor for name, tensor in {**tensors, **changes}.items()}


def gptq(tensors: dict[str, Tensor], rank: Rank = ALONE, **options: Any) -> Weights:
    loader = GPTQWeightsLoader(bits=4, group_size=64)
    return Weights(MemoryStorage(tensors), loader=loader, process_group=rank, **options)


def load(**changes: Tensor) -> Any:
    return gptq(layer(**changes)).get_weights("model.q_proj")


def fp8(scale: float) -> Fp8Weight:
    ones = torch.ones(64, 128).to(torch.float8_e4m3fn)
    return Fp8Weight(config=Fp8Config(), weight=ones, weight_scale=torch.tensor([scale]))


def awq_row() -> Any:
    tensors = {
        "a.qweight": torch.zeros(384, 1, dtype=torch.int32),
        "a.qzeros": torch.zeros(3, 1, dtype=torch.int32),
        "a.scales": torch.ones(3, 8, dtype=torch.float16),
    }
    loader = AWQWeightsLoader(group_size=128)
    return Weights(MemoryStorage(tensors), loader=loader, process_group=Rank(1, 2)).get_weights_row("a")


def fuse() -> Any:
    other = {name.replace("q_proj", "k_proj"): tensor for name, tensor in layer().items()}
    other["model.k_proj.g_idx"] = torch.arange(128, dtype=torch.int32).flip(0) // 64
    return gptq({**layer(), **other}).get_multi_weights_col(["model.q_proj", "model.k_proj"])


def plain(value: float, **options: Any) -> Weights:
    storage = MemoryStorage({"norm.weight": torch.full((3,), value)})
    return Weights(storage, loader=DefaultWeightsLoader(), **options)


def fields(K: int, group: int, **changes: Tensor) -> dict[str, Tensor]:
    groups = K // group
    return {
        "qweight": torch.zeros(K // 8, 64, dtype=torch.int32),
        "qzeros": torch.full((groups, 8), 0x77777777, dtype=torch.int32),
        "scales": torch.ones(groups, 64, dtype=torch.float16),
        "g_idx": (torch.arange(K) // group).to(torch.int32),
        **changes,
    }


def sparse(word: int) -> GPTQWeight:
    words = torch.full((16, 64), word, dtype=torch.int64).to(torch.int32)
    return GPTQWeight(config=GPTQConfig(4, 64), **fields(128, 64, qweight=words))


def mlx(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": torch.ones(8, 1) for name in ("scales", "biases")}


def damaged(weight: Any) -> Any:
    return replace(weight, B_meta=weight.B_meta.clone().fill_(0))


def shuffled() -> GPTQWeight:
    index = (torch.arange(128, dtype=torch.int32) % 2).contiguous()
    return GPTQWeight(config=GPTQConfig(4, 64), **fields(128, 64, g_idx=index))


def repeated(weight: Any) -> Any:
    return replace(weight, q_perm=weight.q_perm.clone().fill_(3))


def cold() -> Any:
    config = replace(CODES, act_type=torch.float16)
    module = torch.nn.Module()
    for name, tensor in fields(128, 64).items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    kernel = ExllamaLinearKernel(config, "qweight", "scales")
    kernel.process_weights_after_loading(module)
    return kernel.apply_weights(module, torch.ones(1, 128).half())


def two_configs(other: dict[str, Any]) -> None:
    found = [
        FoundConfig("config.json", "quantization_config", GPTQ),
        FoundConfig("quantize_config.json", "", other),
    ]
    for conflict in compare_configs(found, read_claims(found[0]), MemoryStorage(layer())):
        if isinstance(conflict, QloadError):
            raise conflict


CODES = MPLinearLayerConfig((128, 64), (128, 64), scalar_types.uint4b8, torch.float64, 64, False)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MISTAKES: dict[str, Callable[[], Any]] = {
    "stacks that nobody reads": lambda: check_all_read(gptq({**layer(), **stacks("model.experts")})),
    "layers of MLX": lambda: loader_from_config(
        None, MemoryStorage({"a.weight": torch.zeros(8, 4).to(torch.uint32), **mlx("a")})
    ),
    "a layer that is not there": lambda: gptq(layer()).get_weights("model.k_proj"),
    "a tensor that is missing": lambda: gptq(
        {name: tensor for name, tensor in layer().items() if "scales" not in name}
    ).get_weights("model.q_proj"),
    "zero points of eight bits over codes of four": lambda: load(qzeros=torch.zeros(2, 8, dtype=torch.int32)),
    "another group size claimed": lambda: Weights(
        MemoryStorage(layer()), loader=GPTQWeightsLoader(bits=4, group_size=128)
    ).get_weights("model.q_proj"),
    "transposed scales": lambda: load(scales=torch.ones(32, 2, dtype=torch.float16)),
    "words of 64 bits": lambda: load(qweight=torch.zeros(16, 32, dtype=torch.int64)),
    "an index out of range": lambda: load(g_idx=torch.full((128,), 2, dtype=torch.int32)),
    "an index of zeros": lambda: load(g_idx=torch.zeros(128, dtype=torch.int32)),
    "columns cut inside of a word": lambda: gptq(layer(), Rank(0, 8)).get_weights_col("model.q_proj"),
    "rows that do not divide": lambda: gptq(layer(), Rank(0, 3)).get_weights_row("model.q_proj"),
    "rows cut inside of an AWQ group": awq_row,
    "fused layers in different order": fuse,
    "two formats at once": lambda: gptq({**layer(), "model.q_proj.weight": torch.ones(32, 128)}).get_weights(
        "model.q_proj"
    ),
    "a cast that overflows": lambda: plain(1e6, dtype=torch.float16).get_tensor("norm.weight"),
    "blocks that do not divide": lambda: plain(1).get_packed_sharded("norm.weight", 0, [1, 1]),
    "blocks of nothing": lambda: plain(1).get_packed_sharded("norm.weight", 0, []),
    "bits as text": lambda: loader_from_config({**GPTQ, "bits": "4"}),
    "bits and groups missing": lambda: loader_from_config({"quant_method": "gptq"}),
    "configs that disagree": lambda: two_configs({**GPTQ, "bits": 8}),
    "an unknown method": lambda: loader_from_config({"quant_method": "squeeze"}),
    "a planar gptq": lambda: loader_from_config({**GPTQ, "checkpoint_format": "gptq_p"}),
    "bits there are none of": lambda: GPTQConfig(bits=5, group_size=128),
    "act order as AWQ": lambda: repack(load(g_idx=torch.arange(128, dtype=torch.int32).flip(0) // 64), "awq"),
    "a layout there is none of": lambda: repack(load(), "marble"),
    "a plain weight repacked": lambda: repack(UnquantizedWeight(weight=torch.ones(8, 8)), "gptq"),
    "a sentence that is no permutation": lambda: Order("(a b) c -> a c", b=2),
    "a truncated file": lambda: parse_header(
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"I8","shape":[9],"data_offsets":[0,9]}}      ' + bytes(4),
        70,
        "x.safetensors",
    ),
    "three rows of four as 2:4": lambda: repack(sparse(0x76543210), "marlin_24"),
    "metadata that keeps one place twice": lambda: damaged(repack(sparse(0x88988898), "marlin_24")),
    "a scale that is not finite": lambda: load(
        scales=torch.ones(2, 32).half().index_fill(1, torch.tensor([7]), torch.nan)
    ),
    "an index that is no permutation": lambda: repeated(repack(shuffled(), "exllama")),
    "groups of 48 for Marlin": lambda: repack(
        GPTQWeight(config=GPTQConfig(4, 48), **fields(96, 48)), "marlin"
    ),
    "an FP8 scale beyond fp16": lambda: repack(fp8(300.0), "marlin", dtype=torch.float16, exponent_bias=True),
    "an FP8 scale that would be 0": lambda: repack(
        fp8(1e-12), "marlin", dtype=torch.float16, exponent_bias=False
    ),
    "a kernel that said no": lambda: ExllamaLinearKernel(CODES, "qweight", "scales"),
    "no kernel at all": lambda: choose_mp_linear_kernel(CODES, 75),
    "a call before warm-up": cold,
    "a model larger than the memory": lambda: check_memory(torch.device("cpu"), 16 << 30, 9 << 30),
    "a quantization method there is none of": lambda: get_quantization_config("awq_marble"),
    "a layer left out and quantized": lambda: Weights(
        MemoryStorage(layer()),
        loader=loader_from_config({**GPTQ, "group_size": 64, "modules_to_not_convert": ["q_proj"]}),
    ).get_weights("model.q_proj"),
    "an input of another width": lambda: load().get_linear()(torch.ones(1, 64)),
    "a rank that stays away": lambda: alone(),
}


def alone() -> None:
    """Rank 0 of two, whose other rank does not come."""
    watch = RankWatchdog(0, 2, lambda error: None)
    watch.start(SimpleNamespace(set=lambda key, value: None), "127.0.0.1", 0.01)  # type: ignore[arg-type]


def raised(mistake: Callable[[], Any]) -> QloadError:
    with pytest.raises(QloadError) as caught:
        mistake()
    return caught.value


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_text_of(mistake: str, golden: SnapshotAssertion) -> None:
    error = raised(MISTAKES[mistake])

    assert f"{type(error).__name__} ({error.rule})\n{error}" == golden


def test_the_texts_with_another_number_or_without_a_fact(golden: SnapshotAssertion) -> None:
    """Counts of one and missing facts change the sentence, and not the numbers alone."""
    errors = {type(error): error for mistake in MISTAKES.values() for error in [raised(mistake)]}
    lines = [
        f"{kind.__name__}, {each.name} {words}: {replace(error, **{each.name: other})}".replace("\n ", " |")
        for kind, error in errors.items()
        for each in dataclass_fields(error)  # type: ignore[arg-type]
        for value in [getattr(error, each.name)]
        for words, other in ([("nothing", "")] if isinstance(value, str) else changed_values(value))
    ]

    assert "\n".join(lines) == golden


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_names_and_reasons_of_unread_tensors_are_counted(count: int, golden: SnapshotAssertion) -> None:
    unread = {f"layers.{at}.w": f"reason {at}" for at in range(count)}

    assert str(UnreadTensorsError({**unread, "head": "reason 0"}, 8 * count)) == golden


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_facts_of_an_error_survive_the_trip_to_another_process(mistake: str) -> None:
    error = raised(MISTAKES[mistake])

    arrived = pickle.loads(pickle.dumps(error))

    assert (type(arrived), str(arrived), arrived.rule) == (type(error), str(error), error.rule)


class ErrorOfAnotherProject(QloadError):
    """An error without fields."""


@pytest.mark.parametrize("kind", [QloadError, ErrorOfAnotherProject])
def test_an_error_without_fields_survives_the_trip_too(kind: type[QloadError]) -> None:
    arrived = pickle.loads(pickle.dumps(kind("first", "second")))

    assert (type(arrived), arrived.args) == (kind, ("first", "second"))


def test_every_error_class_is_raised_by_one_of_these_mistakes() -> None:
    classes = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, QloadError)
    }

    assert {type(raised(mistake)) for mistake in MISTAKES.values()} == classes - {QloadError}


def test_a_file_is_named_where_there_is_one(fixtures: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from qload.checkpoint import open_checkpoint

    save_file(layer(qweight=torch.zeros(15, 32, dtype=torch.int32)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": ' + str(GPTQ).replace("'", '"') + "}")

    with open_checkpoint(tmp_path) as weights:
        assert "  in       model.safetensors" in str(raised(lambda: weights.get_weights("model.q_proj")))


@pytest.mark.parametrize(
    ("size", "cut", "near"),
    [
        pytest.param(384, 192, "128 or 256", id="between two multiples"),
        pytest.param(288, 280, "256 or 288", id="the end is as good as a multiple"),
        pytest.param(288, 288, "256", id="the end itself, where another part follows"),
    ],
)
def test_the_nearest_lawful_cuts_are_offered(size: int, cut: int, near: str) -> None:
    error = errors.CutError("a.scales", "K", size, cut, 128, "as scales is (K/128, N)")

    assert str(error).splitlines()[-1] == f"  nearest  {near}"


@pytest.mark.parametrize(("count", "tail"), [(1, ""), (2, " (2 in all)")], ids=["one", "two"])
def test_how_many_is_said_where_there_is_more_than_one(count: int, tail: str) -> None:
    g_idx = torch.arange(128, dtype=torch.int32) // 64
    g_idx[5 : 5 + count] = -3

    assert f"got      -3 at 5{tail}\n" in f"{raised(lambda: load(g_idx=g_idx))}\n"


@pytest.mark.parametrize(("count", "tail"), [(1, ""), (2, " (2 values in all)")], ids=["one", "two"])
def test_how_many_values_overflow_is_said(count: int, tail: str) -> None:
    mine = Weights(
        MemoryStorage({"t": torch.tensor([1.0, 1e9, 1e9])[: 1 + count]}),
        loader=DefaultWeightsLoader(),
        dtype=torch.float16,
    )

    assert f"got      1e+09{tail}\n" in str(raised(lambda: mine.get_tensor("t")))
