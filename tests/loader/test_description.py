"""What a layer is told by: one name a tensor, indices within range, parts that agree."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qload import dtypes
from qload.detect import loader_from_config
from qload.errors import IndexValueError, MismatchError, QloadError, TwoFormatsError
from qload.formats import Fp8Config, Fp8Weight
from qload.loader import description
from qload.loader.description import LayerDescriber, check_alike
from qload.spec import FieldNames, Layer, Role, TensorSpec
from qload.spec.tensor import check_permutation
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

PERM = TensorSpec("perm", (dtypes.int32,), "K!", Role.INDEX, fact=True, permutation=True)


def weights(tensors: dict[str, Tensor], **config: object) -> Weights:
    return Weights(MemoryStorage(tensors), loader=loader_from_config(config))


@pytest.mark.parametrize(
    ("index", "value", "at", "count"),
    [
        pytest.param([0, 1, 9, 3], 9, 2, 1, id="beyond the end"),
        pytest.param([0, 1, 4, 3], 4, 2, 1, id="at the end"),
        pytest.param([0, 2**31 - 1, 1, 2], 2**31 - 1, 1, 1, id="the greatest"),
        pytest.param([-1, 1, 2, 3], -1, 0, 1, id="negative"),
        pytest.param([0, 3, 3, 9], 3, 1, 3, id="twice, and one beyond"),
    ],
)
def test_what_is_no_permutation_is_refused_by_name(index: list[int], value: int, at: int, count: int) -> None:
    with pytest.raises(IndexValueError) as caught:
        check_permutation(PERM, torch.tensor(index, dtype=torch.int32), FieldNames("a"))

    error = caught.value
    assert (error.tensor, error.value, error.at, error.limit, error.count) == ("a.perm", value, at, 4, count)


def test_a_permutation_is_let_through() -> None:
    check_permutation(PERM, torch.tensor([2, 0, 3, 1], dtype=torch.int32), FieldNames("a"))
    check_permutation(PERM, torch.tensor([], dtype=torch.int32), FieldNames("a"))


@pytest.mark.parametrize("block", [None, [2, 2]])
def test_a_scale_under_both_of_its_names_has_two_readings(block: list[int] | None) -> None:
    scale = torch.ones(2, 2) if block else torch.ones(1)
    tensors = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale": scale,
        "a.weight_scale_inv": 2 * scale,
    }

    with pytest.raises(TwoFormatsError, match=r"a\.weight_scale.*: stored under two names"):
        weights(tensors, quant_method="fp8", weight_block_size=block).get_weights("a")


def exl2(prefix: str, unit: float, bits: tuple[int, ...]) -> dict[str, Tensor]:
    """Groups of 32 inputs each, of the widths given."""
    starts = [sum(bits[:group]) for group in range(len(bits))]
    K = 32 * len(bits)
    return {
        f"{prefix}.q_weight": torch.zeros(sum(bits), 32, dtype=torch.int32),
        f"{prefix}.q_groups": torch.tensor(
            [value for pair in zip(bits, starts, strict=True) for value in pair], dtype=torch.int16
        ),
        f"{prefix}.q_invperm": torch.arange(K, dtype=torch.int32),
        f"{prefix}.q_scale": torch.zeros(len(bits), 4, dtype=torch.int32),
        f"{prefix}.q_scale_max": torch.full((len(bits),), unit, dtype=torch.float16),
    }


def test_parts_that_differ_in_a_fact_of_floats_are_told_by_their_values() -> None:
    both = weights({**exl2("q", 0.25, (4,)), **exl2("k", 0.75, (4,))}, quant_method="exl2")

    with pytest.raises(MismatchError, match=r"(?s)q_scale_max, from row 0 on.*0\.25 as in q.*0\.75"):
        both.get_multi_weights_col(["q", "k"])


def test_parts_whose_facts_have_other_lengths_are_refused_by_name() -> None:
    stored = weights(exl2("q", 1.0, (4, 2)), quant_method="exl2")
    layer = stored.loader.describe(stored, "q")
    shorter = {name: fact[:-1] for name, fact in layer.facts.items()}

    with pytest.raises(MismatchError, match=r"(?s)in the shape of q_groups.*\(4,\) as in q.*got +\(3,\)"):
        check_alike([layer, replace(layer, facts=shorter)])


def test_scales_of_fused_parts_are_counted_alike_when_loaded_and_by_hand() -> None:
    codes, scales = torch.ones(6, 4).to(torch.float8_e4m3fn), torch.ones(3)
    stored = weights({"a.weight": codes, "a.weight_scale": scales}, quant_method="fp8")

    def by_hand() -> None:
        Fp8Weight(
            config=Fp8Config("parts"), weight=codes, weight_scale=scales, layer=Layer((3, 3), 4, (6, 4), "a")
        )

    for load in (lambda: stored.get_weights_col_packed("a", 2), by_hand):
        with pytest.raises(QloadError, match="scales of fused parts") as caught:
            load()
        assert type(caught.value) is MismatchError


def test_equal_layers_share_a_description_and_unequal_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile checkpoint with ever new layers fills no memory."""
    monkeypatch.setattr(description, "MAX_DESCRIPTIONS", 3)
    monkeypatch.setattr(description, "MAX_FACT_KINDS", 2)
    stored = {name: t for at in range(5) for name, t in exl2(f"{at}", 1.0, (4,) * (1 + at)).items()}
    stored |= exl2("alike", 1.0, (4,))
    stored |= exl2("other", 2.0, (4,))
    source = weights(stored, quant_method="exl2")
    describer = LayerDescriber(source.loader.formats)

    found = {name: describer.describe(source, name) for name in ("0", "alike", "other")}
    assert found["0"].cuts is found["alike"].cuts
    assert found["0"].cuts is not found["other"].cuts
    assert [layer.names.full("q_weight") for layer in found.values()] == [
        "0.q_weight", "alike.q_weight", "other.q_weight",
    ]  # fmt: skip
    assert [float(layer.facts["q_scale_max"]) for layer in found.values()] == [1, 1, 2]
    for at in (1, 2, 3, 4, 0):
        layer = describer.describe(source, f"{at}")
        assert (32, 32 + 32 * at) == (layer.N, layer.K)
        assert len(describer._described) <= 3
        assert len(describer._chosen) <= 3
        assert len(describer._last) <= 2
    assert describer.describe(source, "alike").cuts is found["0"].cuts


def test_layers_that_fit_no_format_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "MAX_DESCRIPTIONS", 2)
    stored = {f"{at}.weight": torch.zeros(at + 1, dtype=torch.int32) for at in range(4)}
    source = weights(stored, quant_method="fp8")
    describer = LayerDescriber(source.loader.formats)

    for at in range(4):
        with pytest.raises(QloadError, match=rf"^{at}\.weight"):
            describer.describe(source, f"{at}")
    assert len(describer._unfit) == 2
