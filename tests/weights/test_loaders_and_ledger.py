"""Which loader serves a load, and what became of every tensor."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from qload.detect import DefaultWeightsLoader, GPTQWeightsLoader
from qload.errors import ArgumentError, MissingTensorError
from qload.loader import Part, Split, TensorSource, WeightsLoader
from qload.parallel import Rank
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

PLAIN, GPTQ = DefaultWeightsLoader(), GPTQWeightsLoader(bits=4, group_size=-1)


class Wrapping(WeightsLoader):
    """Hands everything on, and counts."""

    def __init__(self, inner: WeightsLoader) -> None:
        self.inner, self.loads = inner, 0

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        self.loads += 1
        return self.inner.load(weights, parts, split)

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        return self.inner.shape(weights, prefix)


@pytest.fixture
def weights() -> Weights:
    tensors = {
        "a.weight": torch.arange(32.0).reshape(4, 8),
        "b.weight": torch.ones(4, 8),
        "b.bias": torch.ones(4),
    }
    return Weights(MemoryStorage(tensors), loader=GPTQ, process_group=Rank(0, 2))


def test_use_loader_nests_and_restores(weights: Weights) -> None:
    with weights.use_loader(PLAIN):
        with weights.use_loader(GPTQ):
            assert weights.loader is GPTQ
        assert weights.loader is PLAIN

    assert weights.loader is GPTQ


def test_use_loader_restores_after_an_exception(weights: Weights) -> None:
    def fail() -> None:
        with weights.use_loader(PLAIN):
            weights.get_weights("nowhere")

    with pytest.raises(MissingTensorError):
        fail()

    assert weights.loader is GPTQ


def test_use_loader_restores_when_a_generator_is_closed(weights: Weights) -> None:
    def layers() -> Iterator[Weight]:
        with weights.use_loader(PLAIN):
            yield weights.get_weights("a")
            yield weights.get_weights("b")

    running = layers()
    next(running)
    assert weights.loader is PLAIN
    running.close()

    assert weights.loader is GPTQ


def test_a_wrapping_loader_serves_all_five_loads_itself(weights: Weights) -> None:
    wrapping = Wrapping(PLAIN)

    with weights.use_loader(PLAIN):  # not the one that is asked
        for load in (wrapping.get_weights, wrapping.get_weights_col, wrapping.get_weights_row):
            load(weights, "a")
        wrapping.get_weights_col_packed(weights, "a", 2)
        wrapping.get_multi_weights_col(weights, ["a", "b"])

    assert wrapping.loads == 5


def test_the_shortcuts_for_fused_layers_are_packed_loads(weights: Weights) -> None:
    gate_up = weights.get_weights_col_packed_gate_up("a")
    qkv = weights.get_weights_col_packed("a", (2, 2))

    assert gate_up.dequantize()[:, 0].tolist() == [0, 16] == qkv.dequantize()[:, 0].tolist()
    with Weights(weights.storage, loader=PLAIN) as alone:
        assert alone.get_weights_col_packed_qkv("a", 2, 1).layer.parts == (2, 1, 1)


def test_the_ledger_accounts_for_every_tensor(weights: Weights) -> None:
    weights.get_weights("a")
    weights.get_weights_col("a")
    weights.exempt("*.bias", reason="this model has no biases")

    report = weights.report()

    assert (report.used, report.unused, dict(report.twice)) == (["a.weight"], ["b.weight"], {"a.weight": 2})
    assert report.exempted == {"b.bias": "this model has no biases"}
    assert not report.complete
    assert str(report).splitlines() == [
        "1 used, 1 unused, 1 more than once, 1 exempted",
        "  unused    b.weight",
        "  2 times   a.weight",
        "  exempted  b.bias: this model has no biases",
    ]


def test_a_fused_load_uses_each_tensor_once(weights: Weights) -> None:
    weights.get_weights_col_packed("a", 2)
    weights.get_multi_weights_col(["b"])
    weights.get_sharded("b.bias", 0)

    assert weights.report().complete


def test_a_load_that_fails_leaves_no_entry(weights: Weights) -> None:
    with pytest.raises(MissingTensorError):
        weights.get_multi_weights_col(["a", "nowhere"])

    assert not weights.report().used


def test_an_exemption_needs_a_reason(weights: Weights) -> None:
    with pytest.raises(ArgumentError, match="why these tensors may stay unused"):
        weights.exempt("b.bias", reason="")


def test_a_flag_that_disagrees_is_a_note() -> None:
    tensors = {
        "a.qweight": torch.zeros(2, 8, dtype=torch.int32),
        "a.qzeros": torch.zeros(2, 1, dtype=torch.int32),
        "a.scales": torch.ones(2, 8, dtype=torch.float16),
        "a.g_idx": torch.tensor([0, 1] * 8, dtype=torch.int32),
    }
    loader = GPTQWeightsLoader(bits=4, group_size=8, desc_act=False)
    weights = Weights(MemoryStorage(tensors), loader=loader)

    weights.get_weights("a")

    assert weights.report().notes == ("a: desc_act is false, g_idx is in act order and is believed",)


def test_a_block_of_use_loader_is_that_of_its_thread(weights: Weights) -> None:
    """Threads that share weights: while one has a block open, the others keep their own loaders."""
    entered = Barrier(2, timeout=60)

    def within(loader: WeightsLoader) -> WeightsLoader:
        with weights.use_loader(loader):
            entered.wait()
            seen = weights.loader
            entered.wait()
        return seen

    mine, other = Wrapping(PLAIN), Wrapping(PLAIN)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(within, other)
        seen = within(mine)

    assert (seen, theirs.result()) == (mine, other)
    assert weights.loader is GPTQ


def test_a_thread_without_a_block_keeps_the_first_loader(weights: Weights) -> None:
    with ThreadPoolExecutor(1) as pool, weights.use_loader(PLAIN):
        assert pool.submit(lambda: weights.loader).result() is GPTQ


def test_blocks_of_generators_end_in_any_order(weights: Weights) -> None:
    def held(loader: WeightsLoader) -> Iterator[None]:
        with weights.use_loader(loader):
            yield

    inner = Wrapping(PLAIN)
    first, second = held(PLAIN), held(inner)
    next(first)
    next(second)
    first.close()
    assert weights.loader is inner
    second.close()

    assert weights.loader is GPTQ
