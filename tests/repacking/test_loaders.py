"""Loaders that repack for a kernel: the same meaning, whole and shared, and a reason where they do not."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qload.checkpoint import open_checkpoint
from qload.detect import loader_from_config
from qload.errors import ArgumentError, CutError, RepackError
from qload.formats import AWQWeight, GPTQWeight, Marlin24Weight, MarlinWeight, UnquantizedWeight
from qload.kernel_formats import ExllamaWeight, GPTQMarlinWeight, PanelsWeight, restore
from qload.parallel import FakeWorld, Rank
from qload.repacking import GPTQMarlinWeightsLoader, RepackingLoader
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits, layers
from qload.weights import Weights
from tests.example_counts import at_most
from tests.format_cases import CONFIGS
from tests.kernels.mp_layers import Case
from tests.paths import FIXTURES
from tests.support.owners import prefix_of

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def weights(case: Case, target: Any, **more: torch.Tensor) -> Weights:
    tensors = {f"a.{name}": tensor for name, tensor in case.weight().fields().items()}
    config = {**GPTQ, "checkpoint_format": "gptq_v2", "bits": case.bits, "group_size": case.group}
    storage = MemoryStorage({**tensors, **more})
    return Weights(storage, loader=loader_from_config(config, storage, target=target))


@pytest.mark.parametrize(
    ("target", "bits", "kind"),
    [
        pytest.param(None, 4, GPTQWeight, id="its own"),
        pytest.param("auto", 4, PanelsWeight, id="auto is panels without CUDA"),
        pytest.param("auto", 3, PanelsWeight, id="auto is panels of 3 bits too"),
        pytest.param("marlin", 8, GPTQMarlinWeight, id="Marlin"),
        pytest.param("exllama", 3, ExllamaWeight, id="ExLlama"),
    ],
)
def test_the_target_decides_what_is_loaded(target: Any, bits: int, kind: type) -> None:
    case = Case(bits=bits)

    loaded = weights(case, target).get_weights("a")

    assert type(loaded) is kind
    assert_same_bits(loaded.dequantize(), case.weight().dequantize())


@pytest.mark.usefixtures("seen_texts")
def test_auto_notes_why_a_layer_stays_and_marlin_raises_with_its_name() -> None:
    strict = weights(Case(bits=3), "marlin")
    with open_checkpoint(FIXTURES / "compressed_tensors/pack_w7_g128_dense", target="auto") as relaxed:
        prefix = prefix_of(min(relaxed.storage.keys()))
        relaxed.get_weights(prefix)
        notes = relaxed.report().notes

    assert notes == (f"{prefix}: stays ct_pack: other layouts have 2, 3, 4 or 8 bits, got 7",)
    with pytest.raises(RepackError, match="a: gptq to marlin: cannot repack"):
        strict.get_weights("a")


def test_plain_layers_stay_plain() -> None:
    loaded = weights(Case(), "marlin", **{"norm.weight": torch.ones(4)}).get_weights("norm")

    assert isinstance(loaded, UnquantizedWeight)


@pytest.mark.usefixtures("seen_texts")
def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"one of auto, marlin, strips, panels, exllama\n  got      'tpu'"
    ):
        weights(Case(), "tpu")


FORMATS_HERE = [GPTQWeight, AWQWeight, MarlinWeight]


@pytest.mark.parametrize("weight_type", FORMATS_HERE, ids=lambda weight_type: weight_type.format)
@given(data=st.data(), world=st.sampled_from([1, 2, 4]))
@pytest.mark.parametrize("layout", ["marlin", "strips", "panels"])
@at_most(20)
def test_shares_through_a_repacking_loader_are_the_whole(
    weight_type: Any, layout: str, data: Any, world: int
) -> None:
    stored = data.draw(
        layers(weight_type, CONFIGS[weight_type], N=256, K=1536 if weight_type is not GPTQWeight else 512)
    )
    loader = RepackingLoader(stored.loader(), layout, strict=False)
    whole = stored.weight().dequantize()

    for name, dim in (("get_weights_col", 0), ("get_weights_row", 1)):
        ranks = [Weights(stored.storage(), loader=loader, process_group=rank) for rank in FakeWorld(world)]
        try:
            parts = [getattr(each, name)("layer") for each in ranks]
        except CutError:
            assert dim == 1  # inside of a group, refused before anything is repacked
            continue
        assert_same_bits(torch.cat([part.dequantize() for part in parts], dim), whole)


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("gptq/model_g32_desc_act", PanelsWeight), ("awq/model_gemm_g64", PanelsWeight)],
)
def test_a_real_checkpoint_opens_for_a_cpu_and_comes_back(folder: str, kind: type) -> None:
    prefix = "model.layers.0.mlp.down_proj"
    with (
        open_checkpoint(FIXTURES / folder, target="auto") as packed,
        open_checkpoint(FIXTURES / folder) as plain,
    ):
        got, want = packed.get_weights(prefix), plain.get_weights(prefix)

        assert type(got) is kind
        assert_same_bits(got.dequantize(), want.dequantize())
        for name, tensor in restore(got).fields().items():
            assert_same_bits(tensor, want.fields()[name])
        assert packed.report().notes == plain.report().notes


@given(stored=layers(Marlin24Weight, CONFIGS[Marlin24Weight], most=1))
@settings(max_examples=3)
def test_a_sparse_layer_has_a_kernel_of_its_own_and_stays(stored: Any) -> None:
    loader = GPTQMarlinWeightsLoader(stored.loader())

    loaded = Weights(stored.storage(), loader=loader).get_weights("layer")
    assert isinstance(loaded, Marlin24Weight)
    assert loader.repacked(loaded) is loaded


class OneShare(MemoryStorage):
    """What a rank was sent: the first half of the outputs of a layer, and nothing else of its codes."""

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """As in memory, unless what was not sent is asked for."""
        made = super().read(name, index)
        assert not name.endswith(".weight") or len(made) <= self.info(name).shape[0] // 2
        return made


def test_a_share_whose_format_no_layout_has_needs_nothing_of_the_others() -> None:
    codes = torch.arange(8).repeat(256, 32).float().to(torch.float8_e4m3fn)
    storage = OneShare({"a.weight": codes, "a.weight_scale_inv": torch.ones(2, 2)})
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    loader = loader_from_config(config, storage, target="auto")

    share = Weights(storage, loader=loader, process_group=Rank(0, 2)).get_weights_col("a")

    assert_same_bits(share.dequantize(), codes[:128].float())
