"""Where every format is cut, for every rank of several worlds: what it reads of each axis, or the refusal."""

from collections.abc import Iterator
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from qload.errors import QloadError
from qload.formats import (
    AWQConfig,
    AWQWeight,
    BNB4Config,
    BNBNF4Weight,
    CTIntConfig,
    CTIntWeight,
    EETQConfig,
    EETQWeight,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    MarlinConfig,
    MarlinWeight,
    UnquantizedConfig,
    UnquantizedWeight,
)
from qload.loader import ConfiguredFormat, Part
from qload.loader.description import LayerDescription
from qload.loader.sharding import granule, share
from qload.parallel import FakeWorld
from qload.spec import FieldNames

pytestmark = pytest.mark.usefixtures("seen_texts")

# Format, N, K and other sizes of a layer.
LAYERS: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "unquantized": (UnquantizedWeight, UnquantizedConfig(), {"N": 12, "K": 10}),
    "gptq": (GPTQWeight, GPTQConfig(4, 32), {"N": 96, "K": 192, "G": 6}),
    "gptq of 3 bits": (GPTQWeight, GPTQConfig(3, 32), {"N": 96, "K": 192, "G": 6}),
    "gptq in order": (GPTQWeight, GPTQConfig(4, 64, positional=True), {"N": 96, "K": 256, "G": 4}),
    "gptq, a short group": (GPTQWeight, GPTQConfig(4, 128, positional=True), {"N": 96, "K": 288, "G": 3}),
    "awq": (AWQWeight, AWQConfig(32), {"N": 96, "K": 96}),
    "marlin": (MarlinWeight, MarlinConfig(128), {"N": 512, "K": 512}),
    "eetq": (EETQWeight, EETQConfig(), {"N": 128, "K": 192}),
    "ct_int": (CTIntWeight, CTIntConfig((1, 8)), {"N": 6, "K": 24, "P": 1}),
    "fp8 of blocks": (Fp8Weight, Fp8Config("block", (16, 8)), {"N": 40, "K": 24, "P": 1}),
    "fp8 of parts": (Fp8Weight, Fp8Config("parts", axes="P"), {"N": 12, "K": 8, "P": 2}),
    "nf4": (BNBNF4Weight, BNB4Config("nf4", K=32, N=6), {"N": 6, "K": 32}),
    "nf4, rows that end inside of blocks": (BNBNF4Weight, BNB4Config("nf4", K=48, N=8), {"N": 8, "K": 48}),
}
LOADS: dict[str, tuple[Part, Any, bool]] = {
    "columns": (Part("a"), "N", False),
    "rows": (Part("a"), "K", False),
    "a vocabulary": (Part("a", short=True), "N", False),
    "the second half, another follows": (Part("a", start=-2), "N", True),
    "on two ranks each": (Part("a", copies=2), "N", False),
    "all": (Part("a"), None, True),
}


def described(name: str, prefix: str = "a") -> LayerDescription:
    kind, config, sizes = LAYERS[name]
    specs = tuple(spec for spec in kind.tensors(config) if not spec.spent)
    return LayerDescription(prefix, ConfiguredFormat(kind, config), specs, sizes, {}, {}, FieldNames(prefix))


def cut(layer: LayerDescription, load: str, world: int) -> str:
    """The bounds of each rank, and what it reads of each axis of each tensor; or the error."""
    part, split, joined = LOADS[load]
    if part.start:
        part = Part("a", layer.N // 2, layer.N)
    if world % part.copies:
        return "no such load"
    said = []
    for rank in FakeWorld(world):
        try:
            one = share(layer, part, split, rank, joined=joined, number=rank.rank() % layer.sizes.get("P", 1))
        except QloadError as error:
            return " ".join(str(error).split())
        pieces = [[one.span(axis) for axis in spec.places] for spec in layer.specs]
        extents = [one.extent(axis) for spec in layer.specs for axis in spec.places if axis.follows("N")]
        here = one.bounds
        said.append(f"{here.n0}:{here.n1} {here.k0}:{here.k1} {pieces} {extents}".replace("None", "-"))
    return "\n    ".join(said)


def told(name: str) -> Iterator[str]:
    layer = described(name)
    yield f"cut at multiples of {granule(layer, 'N')} of N, {granule(layer, 'K')} of K"
    for load in LOADS:
        for world in (1, 2, 3, 4):
            if world > 1 or load in ("columns", "the second half, another follows"):
                yield f"{load} / {world}\n    {cut(layer, load, world)}"


@pytest.mark.parametrize("name", LAYERS)
def test_what_each_rank_reads(name: str, golden: SnapshotAssertion) -> None:
    assert "\n".join(told(name)) == golden


def test_a_vocabulary_that_does_not_divide_is_told_of_another_load() -> None:
    for prefix, remedy in (("model.lm_head", True), ("wte", True), ("model.q_proj", False)):
        with pytest.raises(QloadError) as caught:
            share(described("unquantized", prefix), Part(prefix), "N", next(iter(FakeWorld(5))))
        assert ("get_partial_weights_col" in str(caught.value)) == remedy
