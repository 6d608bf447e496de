"""What each target makes of every kind of layer, and what it can be told."""

from typing import Any

import pytest
import torch

from qload.checkpoint import open_checkpoint
from qload.detect import KernelTarget, loader_from_config
from qload.errors import ArgumentError, RepackError
from qload.formats import (
    FORMATS,
    BNBNF4Weight,
    BNBWeight,
    CTMXFP4Weight,
    CTPackWeight,
    EETQWeight,
    Exl2Weight,
    Fp8Weight,
    GPTQWeight,
    HQQWeight,
    MarlinWeight,
    MXFP8Weight,
)
from qload.kernel_formats import (
    Exl2KernelWeight,
    ExllamaWeight,
    Fp4MarlinWeight,
    Fp4StripsWeight,
    Fp8MarlinWeight,
    Fp8StripsWeight,
    GPTQMarlinWeight,
    Int8StripsWeight,
    Mxfp8StripsWeight,
    PanelsWeight,
    StripsWeight,
    TableStripsWeight,
    restore,
)
from qload.kernel_formats.repack import LAYOUTS, can_restore, options, targets
from qload.layouts import STORED_MINUS_ONE, Stored, StoredMinusOneUnmasked
from qload.loader import Split, TensorSource, WeightsLoader
from qload.parallel import Rank
from qload.repacking import GPTQMarlinWeightsLoader, loaders
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.kernels.mp_layers import Case
from tests.paths import FIXTURES
from tests.repacking.test_loaders import GPTQ
from tests.support.owners import prefix_of

HALF = KernelTarget("auto", dtype=torch.float16)
BRAIN = KernelTarget("marlin", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("folder", "target", "kind"),
    [
        ("compressed_tensors/pack_w4_g128", "auto", PanelsWeight),
        ("compressed_tensors/pack_w4_g128", "panels", PanelsWeight),
        ("compressed_tensors/pack_w4_g128", "marlin", GPTQMarlinWeight),
        ("compressed_tensors/pack_w4_g128", "strips", StripsWeight),
        ("compressed_tensors/pack_w4_g128", "exllama", ExllamaWeight),
        ("compressed_tensors/pack_w6_g128_dense", "auto", PanelsWeight),
        ("compressed_tensors/pack_w7_g128_dense", "auto", CTPackWeight),
        ("mlx/w2_g32_fp16", "auto", PanelsWeight),
        ("hqq/b4_g64", "auto", PanelsWeight),
        ("hqq/b2_g16_axis0", "auto", HQQWeight),
        ("quanto/qint4", "auto", PanelsWeight),
        ("torchao/int4_g32", "auto", PanelsWeight),
        ("exl2/b6_g128_256x32", "auto", Exl2Weight),
        ("exl2/b6_g128_256x32", "exllama", Exl2KernelWeight),
        ("eetq/128x64", "auto", EETQWeight),
        ("fp8/block_132x32", "auto", Fp8Weight),
        ("fp8/block_132x32", HALF, Fp8MarlinWeight),
        ("fp8/inverse_tensor_e5m2_16x64", HALF, Fp8Weight),
        ("compressed_tensors/nvfp4", HALF, Fp4MarlinWeight),
        ("modelopt/w4a16_nvfp4_8x96", BRAIN, Fp4MarlinWeight),
        ("compressed_tensors/mxfp4", BRAIN, Fp4MarlinWeight),
        ("compressed_tensors/mxfp4", HALF, CTMXFP4Weight),
        ("compressed_tensors/mxfp4", "auto", CTMXFP4Weight),
        ("marlin/g128_256x128", "auto", PanelsWeight),
        ("marlin/g128_256x128", None, MarlinWeight),
    ],
)
def test_every_kind_of_layer_is_repacked_or_stays_with_a_note(folder: str, target: Any, kind: type) -> None:
    with (
        open_checkpoint(FIXTURES / folder) as plain,
        open_checkpoint(FIXTURES / folder, target=target) as source,
    ):
        prefix = prefix_of(min(plain.storage.keys()))
        want, got = plain.get_weights(prefix), source.get_weights(prefix)
        stays = source.report().notes != plain.report().notes

    assert type(got) is kind
    assert stays == (target is not None and type(got) is type(want))
    for name, tensor in restore(got).fields().items():
        assert_same_bits(tensor.view(torch.uint8), want.fields()[name].view(torch.uint8))


@pytest.mark.parametrize(
    ("folder", "target", "capability", "kind"),
    [
        ("gptq/b4_g64_sym_noact_v1", "auto", 90, StripsWeight),
        ("gptq/b4_g64_sym_noact_v1", "auto", 100, StripsWeight),
        ("gptq/b4_g64_sym_noact_v1", "auto", 80, StripsWeight),
        ("gptq/b4_g64_sym_noact_v1", "auto", 75, GPTQMarlinWeight),
        ("gptq/b4_g64_sym_noact_v1", "marlin", 90, GPTQMarlinWeight),
        ("fp8/block_132x32", HALF, 90, Fp8StripsWeight),
        ("activations/fp8_block_group_dynamic", "auto", 90, Fp8StripsWeight),
        ("compressed_tensors/naive_fp8_channel", "auto", 90, Fp8StripsWeight),
        ("compressed_tensors/naive_fp8_channel", "auto", 80, Fp8StripsWeight),
        ("activations/fp8_token_dynamic", "auto", 90, Fp8StripsWeight),
        ("activations/fp8_token_dynamic", "strips", 90, Fp8StripsWeight),
        ("eetq/128x64", "auto", 90, Int8StripsWeight),
        ("bnb/int8_16x128", "auto", 90, Int8StripsWeight),
        ("bnb/int8_16x128", "auto", None, BNBWeight),
        ("activations/w8a8_int8_token_dynamic_sym", "auto", 90, Int8StripsWeight),
        ("activations/w8a8_int8_tensor_static_sym", "auto", 90, Int8StripsWeight),
        ("activations/mxfp8_dynamic", "auto", 90, Mxfp8StripsWeight),
        ("modelopt/mxfp8_16x96", "auto", 90, Mxfp8StripsWeight),
        ("modelopt/mxfp8_16x96", "auto", 80, Mxfp8StripsWeight),
        ("modelopt/mxfp8_16x96", "auto", 75, MXFP8Weight),
        ("compressed_tensors/mxfp4", "auto", 90, Fp4StripsWeight),
        ("modelopt/w4a16_nvfp4_8x96", "auto", 90, Fp4StripsWeight),
        ("modelopt/w4a16_nvfp4_8x96", HALF, 90, Fp4StripsWeight),
        ("modelopt/w4a16_nvfp4_8x96", BRAIN, 89, Fp4MarlinWeight),
        ("compressed_tensors/nvfp4", "strips", 90, Fp4StripsWeight),
        ("bnb/nf4_nested_bf16_storage_128x256", "auto", 90, TableStripsWeight),
        ("bnb/nf4_odd_33x65", "auto", 90, BNBNF4Weight),
        ("gptq/b4_g64_sym_noact_v1", "auto", None, PanelsWeight),
        ("exl2/b6_g128_256x32", "auto", 90, Exl2Weight),
    ],
)
def test_auto_is_the_order_that_a_device_reads_fastest(
    monkeypatch: pytest.MonkeyPatch, folder: str, target: Any, capability: int | None, kind: type
) -> None:
    monkeypatch.setattr(loaders, "compute_capability", lambda device: capability)
    with open_checkpoint(FIXTURES / folder, target=target) as source:
        assert type(source.get_weights(prefix_of(min(source.storage.keys())))) is kind


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(Case(bits=3), StripsWeight, id="3 bits"),
        pytest.param(Case(bits=2, act_order=True), StripsWeight, id="2 bits, act order"),
        pytest.param(Case(group=16), ExllamaWeight, id="groups of 16"),
        pytest.param(Case(group=48, K=384, act_order=True), ExllamaWeight, id="groups of 48, act order"),
        pytest.param(Case(group=256, K=1024), StripsWeight, id="groups of 256"),
        pytest.param(Case(group=96, K=384, act_order=True), StripsWeight, id="groups of 96, act order"),
    ],
)
@pytest.mark.parametrize("capability", [None, 75, 80, 90, 100])
def test_auto_takes_a_layer_to_a_kernel_wherever_there_is_one(
    monkeypatch: pytest.MonkeyPatch, case: Case, kind: type, capability: int | None
) -> None:
    monkeypatch.setattr(loaders, "compute_capability", lambda device: capability)
    stored = case.weight()
    config = {**GPTQ, "bits": case.bits, "group_size": case.group, "desc_act": case.act_order, "sym": False}
    tensors = {f"a.{name}": tensor for name, tensor in stored.fields().items()}
    loader = loader_from_config(config, target="auto").with_config(zeros=stored.config.zeros)  # type: ignore[attr-defined]
    source = Weights(MemoryStorage(tensors), loader=loader)

    got = source.get_weights("a")

    in_marlin = kind is StripsWeight and case.bits == 4
    elsewhere: type = GPTQMarlinWeight if in_marlin else GPTQWeight
    if capability is None:
        elsewhere = PanelsWeight
    has_kernel = capability is not None and capability >= (90 if kind is ExllamaWeight else 80)
    there = kind if has_kernel else elsewhere
    assert type(got) is there
    assert bool(source.report().notes) == (there is GPTQWeight)
    assert_same_bits(got.dequantize(), stored.dequantize())
    for name, tensor in restore(got).fields().items():
        assert_same_bits(tensor, stored.fields()[name])
    told = loader.made(loader.describe(source, "a"), torch.device("cpu"))
    assert told == there.format or case.bits == 4 or there is GPTQWeight


def test_auto_says_with_marlins_reason_why_a_layer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "compute_capability", lambda device: 75)
    monkeypatch.setattr(loaders, "known", lambda *asked: True)
    config = {**GPTQ, "bits": 3}
    words, ones = torch.zeros(9, 32, dtype=torch.int32), torch.ones(3, 32).half()
    tensors = {"a.qweight": words, "a.qzeros": torch.zeros(3, 3, dtype=torch.int32), "a.scales": ones}
    source = Weights(MemoryStorage(tensors), loader=loader_from_config(config, target="auto"))
    monkeypatch.setattr(loaders, "convert", _refusing(RepackError("gptq", "exllama", "no")))

    assert type(source.get_weights("a")) is GPTQWeight
    assert source.report().notes[-1] == "a: stays gptq: Marlin's kernel reads 4 or 8 bits, got 3"


def _refusing(error: RepackError) -> Any:
    inner = loaders.convert

    def in_layout(weight: Weight, layout: str, *rest: Any, **named: Any) -> Weight:
        if layout == "exllama":
            raise error
        return inner(weight, layout, *rest, **named)

    return in_layout


def test_auto_leaves_shares_of_an_act_order_to_marlins_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "compute_capability", lambda device: 90)
    folder, prefix = FIXTURES / "gptq" / "model_g32_desc_act", "model.layers.0.mlp.down_proj"
    with open_checkpoint(folder, target="auto", process_group=Rank(1, 2)) as source:
        whole, share = source.get_weights(prefix), source.get_weights_row(prefix)

        assert (type(whole), type(share)) == (StripsWeight, GPTQMarlinWeight)
        assert not source.report().notes


@pytest.mark.usefixtures("seen_texts")
def test_fp8_for_marlin_says_what_is_missing() -> None:
    folder = FIXTURES / "fp8" / "block_132x32"
    with open_checkpoint(folder, target="marlin") as source, pytest.raises(RepackError) as caught:
        source.get_weights(prefix_of(min(source.storage.keys())))

    assert "need the dtype of the activations" in caught.value.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_marlin_hears_the_dtype_that_a_checkpoint_is_opened_in(dtype: torch.dtype) -> None:
    folder, said = FIXTURES / "fp8" / "block_132x32", KernelTarget("marlin", dtype=torch.bfloat16)
    with (
        open_checkpoint(folder, target="marlin", dtype=dtype) as heard,
        open_checkpoint(folder, target=said, dtype=dtype) as told,
        open_checkpoint(folder, target="auto", dtype=dtype) as fastest,
    ):
        prefix = prefix_of(min(heard.storage.keys()))

        weight: Any = heard.get_weights(prefix)
        assert (type(weight), weight.scales.dtype) == (Fp8MarlinWeight, dtype)
        assert told.get_weights(prefix).fields()["scales"].dtype == torch.bfloat16
        assert type(fastest.get_weights(prefix)) is Fp8Weight


@pytest.mark.parametrize("zeros", [STORED_MINUS_ONE, Stored()])
def test_exllama_stores_zero_points_as_it_is_told(zeros: Any) -> None:
    folder, target = FIXTURES / "awq" / "g128_256x512", KernelTarget("exllama", zeros=zeros)
    with open_checkpoint(folder, target=target) as source:
        weight: Any = source.get_weights(prefix_of(min(source.storage.keys())))

    assert weight.config.zeros == zeros


@pytest.mark.parametrize(
    "target", ["auto", "marlin", "strips", "panels", "exllama", KernelTarget("exllama", zeros=Stored())]
)
def test_a_target_loader_can_be_told_another_config(target: Any) -> None:
    loader: Any = loader_from_config(GPTQ, target=target)

    changed = loader.with_config(zeros=StoredMinusOneUnmasked())

    assert (type(changed), changed.layout, changed.strict) == (type(loader), loader.layout, loader.strict)
    assert changed.inner.formats[0].config.zeros == StoredMinusOneUnmasked()
    assert loader.inner.formats[0].config.zeros == STORED_MINUS_ONE


class Nothing(WeightsLoader):
    """A loader without a config."""

    def load(self, weights: TensorSource, parts: Any, split: Split | None) -> Weight:
        raise AssertionError(parts)

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        return 0, 0


@pytest.mark.usefixtures("seen_texts")
def test_a_loader_around_one_without_a_config_says_so() -> None:
    with pytest.raises(ArgumentError, match="changes\n  expected none, as the inner loader has no config"):
        GPTQMarlinWeightsLoader(Nothing()).with_config(bits=8)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"kernel": "tpu"}, "one of auto, marlin, strips, panels, exllama"),
        ({"kernel": "marlin", "zeros": Stored()}, "only exllama has a choice"),
        ({"kernel": "exllama", "dtype": torch.float16}, "only FP8 and FP4 for Marlin take one"),
    ],
)
def test_a_target_that_cannot_be_is_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        KernelTarget(**asked)


@pytest.mark.parametrize("weight_type", FORMATS, ids=lambda weight_type: weight_type.format)
def test_a_kind_has_targets_where_it_can_be_restored_and_options_only_for_them(
    weight_type: type[Weight],
) -> None:
    assert bool(targets(weight_type)) == can_restore(weight_type)
    assert all(not options(weight_type, layout) for layout in {*LAYOUTS} - {*targets(weight_type)})
