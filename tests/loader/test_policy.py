"""The format of a layer is what its tensors say; parts that do not fit together are not fused."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from qload import dtypes, spec
from qload.detect import AWQWeightsLoader, DefaultWeightsLoader, GPTQWeightsLoader, loader_from_config
from qload.errors import ArgumentError, CutError, MismatchError, MissingTensorError, TwoFormatsError
from qload.formats import UnquantizedWeight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.spec import Config, Role, TensorSpec
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

GPTQ = GPTQWeightsLoader(bits=4, group_size=8)


def gptq(
    prefix: str, N: int = 8, *, act_order: bool = False, dtype: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    g_idx = torch.arange(16, dtype=torch.int32) // 8
    return {
        f"{prefix}.qweight": torch.zeros(2, N, dtype=torch.int32),
        f"{prefix}.qzeros": torch.zeros(2, N // 8, dtype=torch.int32),
        f"{prefix}.scales": torch.ones(2, N, dtype=dtype),
        f"{prefix}.g_idx": g_idx.flip(0) if act_order else g_idx,
    }


def plain(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.weight": torch.ones(8, 16)}


def load(tensors: dict[str, Tensor], *prefixes: str, loader: Any = GPTQ) -> Any:
    return Weights(MemoryStorage(tensors), loader=loader).get_multi_weights_col(list(prefixes))


def test_a_layer_left_plain_in_a_quantized_checkpoint_is_plain() -> None:
    weights = Weights(MemoryStorage({**gptq("a"), **plain("lm_head")}), loader=GPTQ)

    assert isinstance(weights.get_weights("lm_head"), UnquantizedWeight)
    assert weights.get_weights("a").format == "gptq"


def test_a_layer_stored_in_two_formats_is_refused() -> None:
    with pytest.raises(TwoFormatsError, match="a: stored in two formats at once"):
        load({**gptq("a"), **plain("a")}, "a")


def test_the_default_loader_never_guesses_a_quantized_layer() -> None:
    with pytest.raises(MissingTensorError) as caught:
        load(gptq("a"), "a", loader=DefaultWeightsLoader())

    assert caught.value.tensor == "a.weight"
    assert "a.qweight" in caught.value.near


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        pytest.param(
            {**gptq("a"), **plain("b")},
            "differ in format\n  expected gptq as in a\n  got      unquantized",
            id="format",
        ),
        pytest.param(
            {**gptq("a"), **gptq("b", act_order=True)},
            "differ in config\n  expected positional = True as in a\n  got      positional = False",
            id="order and act order",
        ),
        pytest.param(
            {**gptq("a"), **gptq("b", dtype=torch.bfloat16)}, "differ in the dtype of scales", id="dtype"
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_not_fused(tensors: dict[str, Tensor], text: str) -> None:
    with pytest.raises(MismatchError, match="b: parts of a fused layer") as caught:
        load(tensors, "a", "b")

    assert text in str(caught.value)
    assert "load them as layers of their own" in str(caught.value)


@pytest.mark.parametrize("group_size", [8, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_layer_of_no_outputs_is_one(bits: int, group_size: int) -> None:
    groups = 4 if group_size == 8 else 1
    tensors = {
        "a.qweight": torch.zeros(bits, 0, dtype=torch.int32),
        "a.qzeros": torch.zeros(groups, 0, dtype=torch.int32),
        "a.scales": torch.zeros(groups, 0, dtype=torch.float16),
        "a.g_idx": torch.arange(32, dtype=torch.int32) * groups // 32,
    }

    weight = load(tensors, "a", loader=GPTQWeightsLoader(bits=bits, group_size=group_size))

    assert weight.dequantize().shape == (0, 32)


def test_a_layer_of_no_inputs_is_one() -> None:
    tensors = gptq("a")
    tensors["a.qweight"], tensors["a.g_idx"] = tensors["a.qweight"][:0], tensors["a.g_idx"][:0]
    tensors["a.qzeros"], tensors["a.scales"] = tensors["a.qzeros"][:1], tensors["a.scales"][:1]

    weight = load(tensors, "a", loader=GPTQWeightsLoader(bits=4, group_size=-1))

    assert weight.dequantize().shape == (8, 0)


def test_parts_in_different_act_order_are_not_fused() -> None:
    tensors = {**gptq("a", act_order=True), **gptq("b", act_order=True)}
    tensors["b.g_idx"] = tensors["b.g_idx"].clone()
    tensors["b.g_idx"][[3, 12]] = tensors["b.g_idx"][[12, 3]]

    with pytest.raises(MismatchError, match="differ in g_idx, from row 3 on"):
        load(tensors, "a", "b")


@pytest.mark.parametrize("lost", ["qweight", "qzeros", "scales", "g_idx"])
def test_a_missing_part_is_named_beside_what_there_is(lost: str) -> None:
    tensors = gptq("a")
    del tensors[f"a.{lost}"]

    with pytest.raises(MissingTensorError) as caught:
        load(tensors, "a", loader=GPTQWeightsLoader(bits=4, group_size=8, desc_act=True))

    assert caught.value.tensor == f"a.{lost}"
    assert len(caught.value.near) == 3


def test_a_layer_that_is_not_there_says_what_was_looked_for() -> None:
    with pytest.raises(MissingTensorError, match="looked for awq and unquantized"):
        load({}, "a", loader=AWQWeightsLoader(group_size=8))


@pytest.mark.parametrize(
    ("prefixes", "dim", "text"),
    [("a", 0, "prefixes"), ([], 0, "prefixes"), (["a"], 1, "dim")],
)
def test_arguments_of_a_fused_load_are_checked(prefixes: Any, dim: int, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Weights(MemoryStorage(gptq("a")), loader=GPTQ).get_multi_weights_col(prefixes, dim)


def test_a_layer_may_be_joined_with_itself() -> None:
    twice = Weights(MemoryStorage(gptq("a")), loader=GPTQ).get_multi_weights_col(["a", "a"])
    once = Weights(MemoryStorage(gptq("a")), loader=GPTQ).get_weights("a").dequantize()

    assert twice.dequantize().equal(torch.cat([once, once]))


def test_a_layer_with_a_scale_for_each_part_is_not_joined_with_itself() -> None:
    codes = torch.ones(4, 8).to(torch.float8_e4m3fn)
    storage = MemoryStorage({"a.weight": codes, "a.weight_scale": torch.tensor([1.0, 2.0])})
    weights = Weights(storage, loader=loader_from_config({"quant_method": "fp8"}))

    with pytest.raises(ArgumentError, match="each layer once"):
        weights.get_multi_weights_col(["a", "a"])


def test_parts_can_be_joined_along_a_negative_dimension() -> None:
    fused = Weights(MemoryStorage({**gptq("a"), **gptq("b")}), loader=GPTQ).get_multi_weights_col(
        ["a", "b"], -2
    )

    assert fused.shape == (16, 16)


# A format whose axes are rounded up: where its tail is padded, nothing can be joined behind it.


@dataclass(frozen=True)
class PaddedConfig(Config):
    name: ClassVar[str] = "padded"


@dataclass(frozen=True, eq=False, repr=False)
class PaddedWeight(spec.Weight):
    config: PaddedConfig
    rows: Tensor
    scale: Tensor

    format: ClassVar[str] = "padded"
    example: ClassVar[PaddedConfig] = PaddedConfig()

    @classmethod
    def tensors(cls, config: PaddedConfig) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("rows", (dtypes.int32,), "N K", Role.WORD),
            TensorSpec("scale", (dtypes.float32,), "N/4^ K!", Role.SCALE),
        )

    def codes(self) -> spec.Codes:
        scales = self.scale.repeat_interleave(4, 0)[: self.layer.N]
        return spec.Codes(8, self.rows, scales, None, torch.arange(self.layer.K))


def padded(prefix: str, N: int) -> dict[str, Tensor]:
    return {
        f"{prefix}.rows": torch.ones(N, 3, dtype=torch.int32),
        f"{prefix}.scale": torch.ones(-(-N // 4), 3),
    }


PADDED = FormatLoader(ConfiguredFormat(PaddedWeight, PaddedConfig()))


def test_the_end_of_a_part_that_another_follows_is_a_cut() -> None:
    tensors = {**padded("even", 8), **padded("ragged", 6)}

    assert load(tensors, "even", "ragged", loader=PADDED).shape == (14, 3)
    with pytest.raises(CutError, match="cannot cut N = 6 at 6"):
        load(tensors, "ragged", "even", loader=PADDED)


def test_a_ragged_tail_goes_to_the_last_rank_or_all_ranks_refuse() -> None:
    tensors = padded("a", 6)

    for rank in (Rank(0, 2), Rank(1, 2)):
        with pytest.raises(CutError, match=r"cannot cut N = 6 at 3 for 2 ranks"):
            Weights(MemoryStorage(tensors), loader=PADDED, process_group=rank).get_weights_col("a")


def test_an_axis_that_is_never_cut_says_so() -> None:
    weights = Weights(MemoryStorage(padded("a", 8)), loader=PADDED, process_group=Rank(0, 3))

    with pytest.raises(CutError, match=r"a\.scale: cannot cut K = 3 at 1 for 3 ranks\n  never cut"):
        weights.get_weights_row("a")
