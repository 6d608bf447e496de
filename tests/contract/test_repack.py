"""Inverse of every layout, and equal values in every layout."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.errors import ArgumentError, CutError, RepackError
from qload.formats import (
    AWQConfig,
    AWQWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackWeight,
    Exl2Config,
    Exl2Weight,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    Marlin24Weight,
    MarlinWeight,
    ModelOptNVFP4Weight,
    UnquantizedWeight,
)
from qload.kernel_formats import repack, restore
from qload.kernel_formats.repack import targets
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from qload.weights import Weights
from tests.example_counts import at_most
from tests.format_cases import CONFIGS


def assert_same_weight(got: Weight, want: Weight) -> None:
    assert (type(got), got.config, got.layer) == (type(want), want.config, want.layer)
    assert got.fields().keys() == want.fields().keys()
    for name, tensor in want.fields().items():
        assert_same_bits(got.fields()[name].view(torch.uint8), tensor.view(torch.uint8))


MARLIN_GROUPS = (-1, 32, 64, 128)
DEFAULT_PLACES = {(): (2, 3), (0,): (0, 2), (1,): (1, 2), (2,): (2, 3), (3,): (2, 3)}
SIZES = {
    GPTQWeight: [None, 288, 384],
    AWQWeight: [None, 384],
    MarlinWeight: [384],
    Marlin24Weight: [384],
    CTPackWeight: [None, 100, 384],
}


def can_say(weight: Weight, layout: str) -> bool:
    """Return whether a layout can represent a weight, by the facts of the formats and not by qload."""
    if TARGETS.get(layout) is type(weight):
        return True
    codes = weight.codes()
    assert codes.zeros is not None
    assert codes.k_group is not None
    (N, K), bits, groups, highest = weight.shape, codes.bits, codes.scales.shape[1], int(codes.zeros.max())
    if weight.format == "marlin_24" and not has_default_places(weight):
        return False
    if bits not in ((2, 3, 4, 5, 6, 8) if layout in ("panels", "strips") else (2, 3, 4, 8)):
        return False
    fill = 32 if bits == 3 else 32 // bits
    if weight.format == "ct_pack" and not says_all_bits(weight):
        return False
    if layout in ("gptq", "gptq_v2", "exllama") and (K % fill or N % fill):  # these pad no word
        return False
    if layout == "awq" and N % fill:
        return False
    fits, in_order = highest < 2**bits, torch.equal(codes.k_group, torch.arange(K) // -(-K // groups))
    if layout == "awq":
        return bits in (4, 8) and fits and K % groups == 0 and in_order
    if layout == "panels":
        size = weight.config.group_size
        whole = groups == 1 or torch.equal(codes.k_group.sort().values, torch.arange(K) // size)
        return highest < 256 and whole
    if layout in ("marlin", "strips"):
        size = weight.config.group_size
        whole = groups == 1 or torch.equal(codes.k_group.sort().values, torch.arange(K) // size)
        width = (4 if bits <= 4 else 8) if layout == "strips" else bits  # of a code in the order
        moved = highest + 2 ** (width - 1) - 2 ** (bits - 1)
        return (
            width in (4, 8)
            and moved < 2**width
            and (groups == 1 or size in MARLIN_GROUPS)
            and (layout == "marlin" or whole)
        )
    if layout == "marlin_24":
        tiles = bits in (4, 8) and K % 32 == 0 and N % 64 == 0 and K % groups == 0 and in_order
        sparse = tiles and int((codes.plain() != 2 ** (bits - 1)).reshape(N, -1, 4).sum(-1).max()) <= 2
        return sparse and bool((codes.zeros == 2 ** (bits - 1)).all())
    return fits or layout == "exllama"


def says_all_bits(weight: Weight) -> bool:
    """Return whether the unused bits of last words are 0: `restore` cannot recover any other value."""
    (N, K), fields = weight.shape, weight.fields()
    zeros = fields.get("weight_zero_point")
    last = [(K, fields["weight_packed"][:, -1])] + ([] if zeros is None else [(N, zeros[-1])])
    rests = [(count * weight.config.bits % 32, words.long() % 2**32) for count, words in last]
    return all(rest == 0 or bool((words < 2**rest).all()) for rest, words in rests)


def has_default_places(weight: Weight) -> bool:
    """Return whether quads with fewer than two codes keep the default rows of every packer."""
    present = (weight.codes().plain() != 2 ** (weight.config.bits - 1)).T.reshape(-1, 4, weight.layer.N)
    places = weight.positions().reshape(-1, 2, weight.layer.N)  # type: ignore[attr-defined]
    for held in torch.tensor(list(DEFAULT_PLACES_MASKS)):
        mask = (present == held[None, :, None]).all(1)
        want = torch.tensor(DEFAULT_PLACES[tuple(held.nonzero().flatten().tolist())])
        if not bool((places.movedim(1, 2)[mask] == want).all()):
            return False
    return True


DEFAULT_PLACES_MASKS = [[i in held for i in range(4)] for held in DEFAULT_PLACES]
TARGETS = {"awq": AWQWeight, "marlin_24": Marlin24Weight}
FORMATS_HERE = [GPTQWeight, AWQWeight, MarlinWeight, Marlin24Weight, CTPackWeight]


@pytest.mark.parametrize("layout", targets(GPTQWeight))
@pytest.mark.parametrize("weight_type", FORMATS_HERE, ids=lambda weight_type: weight_type.format)
@given(data=st.data())
@at_most(25)
def test_a_repacked_weight_means_the_same_and_can_be_restored(
    weight_type: type[Weight], layout: str, data: Any
) -> None:
    K = data.draw(st.sampled_from(SIZES[weight_type]))
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], K=K, most=2)).weight()
    try:
        packed = repack(weight, layout)
    except RepackError:
        assert not can_say(weight, layout)
        return

    assert can_say(weight, layout)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_weight(restore(packed), weight)


@pytest.mark.parametrize("layout", ["marlin", "exllama"])
@pytest.mark.parametrize("dim", ["N", "K"])
@given(data=st.data(), world=st.sampled_from([2, 3, 4]))
@at_most(25)
def test_a_repacked_share_means_the_same_and_can_be_restored(
    layout: str, dim: str, data: Any, world: int
) -> None:
    """Test each cut of the groups: between two groups, inside of one, or under an act order."""
    config = st.builds(
        lambda bits, group: GPTQConfig(bits, group, positional=True),
        st.sampled_from([4, 8]), st.sampled_from([32, 64, 128]),
    )  # fmt: skip
    K = 128 * 3 * data.draw(st.sampled_from([1, 2]))
    stored = data.draw(layers(GPTQWeight, config, N=96, K=K))
    load = Weights.get_weights_col if dim == "N" else Weights.get_weights_row
    for rank in FakeWorld(world):
        share = load(Weights(stored.storage(), loader=stored.loader(), process_group=rank), "layer")

        packed = repack(share, layout)

        assert_same_bits(packed.dequantize(), share.dequantize())
        assert_same_weight(restore(packed), share)


OTHERS: list[tuple[type[Weight], Any, str, dict[str, Any]]] = [
    (CTPackWeight, CONFIGS[CTPackWeight], "gptq_v2", {}),
    (CTPackWeight, CONFIGS[CTPackWeight], "marlin", {}),
    (Exl2Weight, st.just(Exl2Config()), "exllama", {}),
    (Fp8Weight, CONFIGS[Fp8Weight], "marlin", {"dtype": torch.bfloat16, "exponent_bias": False}),
    (CTNVFP4Weight, CONFIGS[CTNVFP4Weight], "marlin", {"dtype": torch.float16}),
    (ModelOptNVFP4Weight, CONFIGS[ModelOptNVFP4Weight], "marlin", {"dtype": torch.bfloat16}),
    (CTMXFP4Weight, CONFIGS[CTMXFP4Weight], "marlin", {"dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(
    ("weight_type", "config", "layout", "asked"),
    OTHERS,
    ids=[f"{each[0].format}-{each[2]}" for each in OTHERS],
)
@given(data=st.data(), world=st.sampled_from([2, 4]), load=st.sampled_from(["col", "row"]))
@at_most(40)
def test_a_share_of_every_other_format_is_restored(
    weight_type: type[Weight],
    config: Any,
    layout: str,
    asked: dict[str, Any],
    data: Any,
    world: int,
    load: str,
) -> None:
    stored = data.draw(layers(weight_type, config, N=256, K=1536))
    ranks = [Weights(stored.storage(), loader=stored.loader(), process_group=r) for r in FakeWorld(world)]
    try:
        shares = [getattr(each, f"get_weights_{load}")("layer") for each in ranks]
        packed = [repack(share, layout, **asked) for share in shares]
    except CutError:
        assert load == "row"
        return
    except RepackError as error:
        assert any(word in error.reason for word in ("bits", "reads", "negative", "NaN"))  # noqa: PT017
        return

    for share, each in zip(shares, packed, strict=True):
        assert_same_weight(restore(each), share)
        if weight_type is not Fp8Weight:  # its scales are rounded
            assert_same_bits(each.dequantize(), share.dequantize())


@pytest.mark.parametrize("layout", ["exllama", "gptq_v2", "marlin"])
@given(data=st.data())
@at_most(20)
def test_out_is_overwritten_and_returned(layout: str, data: Any) -> None:
    weight = data.draw(layers(AWQWeight, st.just(AWQConfig(128)), K=768)).weight()
    out = repack(weight, layout)
    fresh = {name: tensor.clone() for name, tensor in out.fields().items()}
    places = {name: tensor.data_ptr() for name, tensor in out.fields().items()}
    for name in ("qweight", "qzeros"):
        out.fields()[name].fill_(-1)

    again = repack(weight, layout, out=out)

    assert {name: tensor.data_ptr() for name, tensor in again.fields().items()} == places
    for name, tensor in again.fields().items():
        assert_same_bits(tensor, fresh[name])


@given(data=st.data())
@at_most(10)
def test_a_repacked_weight_shares_no_memory_with_its_source(data: Any) -> None:
    first = data.draw(layers(GPTQWeight, CONFIGS[GPTQWeight])).weight()
    for layout in ("exllama", "gptq_v2", "marlin"):
        try:
            packed = repack(first, layout)
        except RepackError:
            continue
        for weight in (packed, restore(packed)):
            shared = {t.data_ptr() for t in weight.fields().values()} & {
                t.data_ptr() for t in first.fields().values()
            }
            assert not shared


@given(data=st.data())
@at_most(5)
def test_out_of_another_shape_is_refused(data: Any) -> None:
    small, large = (data.draw(layers(AWQWeight, st.just(AWQConfig(128)), K=768, N=n)) for n in (32, 64))

    with pytest.raises(ArgumentError, match="out\n  expected ExllamaWeight with"):
        repack(large.weight(), "exllama", out=repack(small.weight(), "exllama"))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        pytest.param(
            lambda w: repack(w, "marvellous"), "one of gptq, gptq_v2, awq, exllama, marlin", id="unknown"
        ),
        pytest.param(lambda w: repack(w, "gptq"), "has no codes to repack", id="plain"),
    ],
)
def test_what_cannot_be_repacked_is_refused_with_the_reason(call: Any, text: str) -> None:
    with pytest.raises((ArgumentError, RepackError), match=text):
        call(UnquantizedWeight(weight=torch.zeros(8, 8)))


@pytest.mark.parametrize("call", [lambda each: repack(each, "marlin"), restore], ids=["repack", "restore"])
@pytest.mark.parametrize("untyped", [None, torch.zeros(8, 8)], ids=["None", "a tensor"])
def test_what_is_no_typed_weight_is_refused(call: Any, untyped: Any) -> None:
    with pytest.raises(ArgumentError, match="weight\n  expected Weight"):
        call(untyped)
