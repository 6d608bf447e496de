"""Writing to `out`: after a refusal every element of its tensors is unchanged."""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from qload import native
from qload.errors import ArgumentError, QloadError, RepackError
from qload.formats import Fp8Config, Fp8Weight
from qload.kernel_formats import repack
from qload.layouts import Order, StoredMinusOneUnmasked, eetq, exllama, gptq, marlin
from qload.spec import Weight
from qload.testing import assert_same_bits
from tests.kernel_formats.marlin_layers import layer

repack_module = import_module("qload.kernel_formats.repack")  # whose name its function has
BOTH = pytest.mark.parametrize("how", [nullcontext, native.reference], ids=["native", "reference"])
LAYER = layer(128, 64, 32, sym=False)  # with a zero point of 0
FP8 = Fp8Weight(
    config=Fp8Config(), weight=torch.ones(64, 128).to(torch.float8_e4m3fn), weight_scale=torch.ones(1)
)
HALF: dict[str, Any] = {"dtype": torch.float16, "exponent_bias": True}


def marked(weight: Weight) -> Weight:
    """Return a weight of equal shapes, dtypes and facts, with other words and scales."""
    facts = {spec.name for spec in weight.tensors(weight.config) if spec.fact}
    return weight.holding(
        {name: t.clone() if name in facts else torch.full_like(t, 7) for name, t in weight.fields().items()}
    )


def assert_untouched(act: Callable[[], object], tensors: dict[str, Tensor], error: type[QloadError]) -> None:
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(error):
        act()
    for name, tensor in tensors.items():
        assert_same_bits(tensor.detach(), before[name].detach())


def other_dtype(out: Weight) -> Weight:
    return out.holding({"scales": out.fields()["scales"].bfloat16()})


def other_shape(out: Weight) -> Weight:
    return out.holding({"scales": out.fields()["scales"][:, :-1].contiguous()})


def one_place(out: Weight) -> Weight:
    scales = out.fields()["scales"]
    return out.holding({"scales": scales[:1, :1].clone().expand_as(scales)})


def gradients(out: Weight) -> Weight:
    return out.holding({"scales": out.fields()["scales"].requires_grad_()})


def on_meta(out: Weight) -> Weight:
    return out.holding({"scales": out.fields()["scales"].to("meta")})


def inside_of_words(out: Weight) -> Weight:
    scales, words = out.fields()["scales"], out.fields()["qweight"]
    inside = words.view(torch.uint8).flatten()[8 : 8 + scales.nbytes].view(scales.dtype)
    return out.holding({"scales": inside.view(scales.shape)})


WRONG = [other_dtype, other_shape, one_place, gradients, on_meta, inside_of_words]


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq", "exllama", "marlin", "strips", "panels"])
@BOTH
def test_an_unsuitable_out_stays_unchanged(layout: str, spoil: Callable[[Weight], Weight], how: Any) -> None:
    # GPTQ from GPTQ reuses the words and writes none.
    source = repack(LAYER, "exllama") if layout.startswith("gptq") else LAYER
    out = spoil(marked(repack(source, layout)))

    tensors = {name: tensor for name, tensor in out.fields().items() if not tensor.is_meta}
    with how():
        assert_untouched(lambda: repack(source, layout, out=out), tensors, ArgumentError)


def test_an_unsuitable_out_is_named_with_its_tensors(golden: SnapshotAssertion) -> None:
    errors = []
    for spoil in WRONG:
        with pytest.raises(ArgumentError) as caught:
            repack(LAYER, "marlin", out=spoil(marked(repack(LAYER, "marlin"))))
        errors.append(f"{spoil.__name__}: {caught.value}")

    assert "\n".join(errors) == golden


@pytest.mark.parametrize(("begin", "apart"), [(-2, False), (0, True)])
def test_scales_may_begin_where_words_end_and_no_element_before(begin: int, apart: bool) -> None:
    fresh = marked(repack(LAYER, "exllama"))
    words, scales = fresh.fields()["qweight"], fresh.fields()["scales"]
    arena = torch.zeros(words.nbytes + scales.nbytes, dtype=torch.uint8)
    start = words.nbytes + begin
    parts = {"qweight": (words, arena[: words.nbytes]), "scales": (scales, arena[start:][: scales.nbytes])}
    out = fresh.holding({name: at.view(old.dtype).view(old.shape) for name, (old, at) in parts.items()})

    if apart:
        assert_same_bits(repack(LAYER, "exllama", out=out).dequantize(), LAYER.dequantize())
    else:
        assert_untouched(lambda: repack(LAYER, "exllama", out=out), out.fields(), ArgumentError)


@pytest.mark.parametrize("spoil", [other_dtype, gradients], ids=lambda spoil: spoil.__name__)
def test_an_unsuitable_out_for_fp8_stays_unchanged(spoil: Callable[[Weight], Weight]) -> None:
    out = spoil(marked(repack(FP8, "marlin", **HALF)))

    assert_untouched(lambda: repack(FP8, "marlin", out=out, **HALF), out.fields(), ArgumentError)


def test_out_of_another_type_with_equal_tensors_is_refused() -> None:
    out = marked(repack(FP8, "marlin", **HALF))
    twin = type("OtherWeight", (type(out),), {})
    other = twin(out.config, **out.fields(), layer=out.layer)

    act = lambda: repack(FP8, "marlin", out=other, **HALF)  # noqa: E731
    assert_untouched(act, out.fields(), ArgumentError)


@pytest.mark.parametrize("layout", ["gptq", "exllama"])
def test_an_unsupported_zero_point_leaves_out_unchanged(layout: str) -> None:
    source = repack(LAYER, "exllama" if layout == "gptq" else "marlin")
    out = marked(repack(source, layout))

    act = lambda: repack(source, layout, out=out, zeros=StoredMinusOneUnmasked())  # noqa: E731
    assert_untouched(act, out.fields(), RepackError)


def test_out_may_be_slices_of_one_buffer() -> None:
    fresh = repack(LAYER, "marlin")
    arena = torch.zeros(sum(t.nbytes for t in fresh.fields().values()), dtype=torch.uint8)
    sizes = [tensor.nbytes for tensor in fresh.fields().values()]
    parts = [arena[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    pairs = zip(fresh.fields().items(), parts, strict=True)
    out = fresh.holding({name: part.view(t.dtype).view(t.shape) for (name, t), part in pairs})

    again = repack(LAYER, "marlin", out=out)

    for name, tensor in fresh.fields().items():
        assert_same_bits(again.fields()[name], tensor)
        assert again.fields()[name].data_ptr() == out.fields()[name].data_ptr()


BAD_CODES = [
    pytest.param(torch.full((128, 64), 16, dtype=torch.int32), id="too large"),
    pytest.param(torch.full((128, 64), -1, dtype=torch.int32), id="below 0"),
    pytest.param(torch.full((128, 64), 16, dtype=torch.uint8), id="too large, uint8"),
    pytest.param(torch.full((128, 64), 3.7), id="3.7"),
    pytest.param(torch.full((128, 64), float("nan")), id="NaN"),
    pytest.param(torch.full((128, 64), 3, dtype=torch.uint64), id="uint64"),
    pytest.param(torch.ones(128, 64, dtype=torch.bool), id="bool"),
]


@pytest.mark.parametrize("codes", BAD_CODES)
@pytest.mark.parametrize("order", [gptq.rows, exllama.rows, marlin.rows], ids=["gptq", "exllama", "marlin"])
@BOTH
def test_codes_out_of_range_are_refused_before_a_word_changes(order: Any, codes: Tensor, how: Any) -> None:
    packing = order(4)
    out = torch.full(packing.shape_of_words(codes.shape), 7, dtype=torch.int32)

    with how():
        assert_untouched(lambda: packing.pack(codes, out), {"out": out}, ArgumentError)
        with pytest.raises(ArgumentError, match="codes"):
            packing.pack(codes)


@pytest.mark.parametrize("codes", [3.7, float("nan"), True])
def test_eetq_packs_integers_only(codes: Any) -> None:
    with pytest.raises(ArgumentError, match="codes"):
        eetq.pack(torch.full((128, 64), codes))


@pytest.mark.parametrize(
    "out",
    [
        pytest.param([], id="a list"),
        pytest.param(torch.zeros(2, 3), id="another shape"),
        pytest.param(torch.zeros(3, 2, dtype=torch.float64), id="another dtype"),
        pytest.param(torch.zeros(2, 3).T, id="other strides"),
        pytest.param(torch.zeros(3, 2, requires_grad=True), id="gradients"),
        pytest.param(torch.zeros(3, 2).to_sparse(), id="sparse"),
    ],
)
@BOTH
def test_an_order_writes_only_to_a_tensor_of_its_result(out: Any, how: Any) -> None:
    with how(), pytest.raises(ArgumentError, match="out"):
        Order("a b -> b a").apply(torch.ones(2, 3), out)


DTYPES = [
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e8m0fnu,
    torch.qint8,
    "half",
    None,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["gptq", "exllama", "marlin"])
@BOTH
def test_a_weight_is_dequantized_to_float_dtypes_only(layout: str, dtype: Any, how: Any) -> None:
    weight = repack(LAYER, layout)

    with how():
        for means in (weight, weight.codes(), FP8, FP8.codes()):
            with pytest.raises(ArgumentError, match="dtype"):
                means.dequantize(dtype)


def test_a_repack_is_equal_with_and_without_out() -> None:
    for layout in ("gptq", "gptq_v2", "awq", "exllama", "marlin", "strips"):
        fresh = repack(LAYER, layout)
        packed = repack(LAYER, layout, out=marked(fresh))
        assert (type(packed), packed.config, packed.layer) == (type(fresh), fresh.config, fresh.layer)
        for name, tensor in fresh.fields().items():
            assert_same_bits(packed.fields()[name], tensor)


@pytest.mark.parametrize("layout", ["marlin", "strips", "exllama"])
def test_a_writer_writes_to_out_without_a_second_buffer(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, written = marked(repack(LAYER, layout)), list[Tensor]()
    write_into = repack_module._write_into

    def record(given: Weight, repacked: Weight, writes: Any) -> Weight:
        written.append(repacked.fields()["qweight"])
        return write_into(given, repacked, writes)

    monkeypatch.setattr(repack_module, "_write_into", record)
    repack(LAYER, layout, out=out)

    assert [tensor.data_ptr() for tensor in written] == [out.fields()["qweight"].data_ptr()]
