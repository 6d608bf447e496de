"""bitsandbytes' quant_state is input from outside: whatever it says, a layer is read or refused by name."""

from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from qload.errors import ConfigError, DtypeError, MissingTensorError, ShapeError
from qload.formats import BNB4Config, BNBNF4Weight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.formats.bnb_layers import blob, layer, nested, whole

pytestmark = pytest.mark.usefixtures("seen_texts")

STATE = "a.weight.quant_state.bitsandbytes__nf4"
GOOD: dict[str, Any] = {"quant_type": "nf4", "blocksize": 4, "dtype": "float32", "shape": [4, 4]}


def changed(**changes: Any) -> dict[str, Any]:
    """A good state with other values; None: without the key."""
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("state", "key"),
    [
        pytest.param(changed(blocksize=None), "blocksize", id="nothing"),
        pytest.param(changed(blocksize=0), "blocksize", id="zero"),
        pytest.param(changed(blocksize=-64), "blocksize", id="negative"),
        pytest.param(changed(blocksize=2**31), "blocksize", id="huge"),
        pytest.param(changed(blocksize=10**3000), "blocksize", id="beyond all words"),
        pytest.param(changed(blocksize=4.5), "blocksize", id="fraction"),
        pytest.param(changed(blocksize=True), "blocksize", id="boolean"),
        pytest.param(changed(blocksize="4"), "blocksize", id="text"),
        pytest.param(changed(shape="4x4"), "shape", id="shape as text"),
        pytest.param(changed(shape=[16]), "shape.1", id="one dimension"),
        pytest.param(changed(shape=[4, 4, 1]), "shape", id="three dimensions"),
        pytest.param(changed(shape=[-4, 4]), "shape.0", id="negative shape"),
        pytest.param(changed(shape=[4, 0]), "shape.1", id="empty shape"),
        pytest.param(changed(shape=[2**62, 2**62]), "shape.0", id="huge shape"),
        pytest.param(changed(dtype="float64"), "dtype", id="dtype"),
        pytest.param(changed(dtype=["__class__"]), "dtype", id="dtype as a list"),
        pytest.param(changed(quant_type="fp4"), "quant_type", id="another type than the name's"),
        pytest.param(changed(nested_dtype="bfloat16"), "nested_dtype", id="nested dtype"),
        pytest.param(changed(nested_offset=1e300), "nested_offset", id="more than float32 holds"),
        pytest.param(changed(nested_offset=float("nan")), "nested_offset", id="NaN"),
        pytest.param(changed(nested_offset=float("-inf")), "nested_offset", id="infinity"),
        pytest.param(changed(zero_point=3), "zero_point", id="unknown key"),
        pytest.param([GOOD], "JSON", id="no object"),
        pytest.param(b"", "JSON", id="empty"),
        pytest.param(b'{"quant_type": "nf4"', "JSON", id="cut off"),
        pytest.param(b"\x80\xff\x00", "JSON", id="no text"),
        pytest.param(b"[" * 4000, "JSON", id="deep"),
    ],
)
def test_a_state_that_is_none_is_refused_with_the_key(
    state: Any, key: str, golden: SnapshotAssertion
) -> None:
    with pytest.raises(ConfigError) as caught:
        whole({**layer(4, 4, 4), STATE: blob(state)})

    assert (caught.value.file, caught.value.key) == (STATE, key)
    assert len(str(caught.value)) < 400
    assert str(caught.value).partition("JSON: ")[0] == golden  # pydantic words the rest


def test_a_state_of_a_megabyte_is_not_parsed() -> None:
    padded = b" " * (1 << 20) + b"{}"

    with pytest.raises(ShapeError, match=r"expected at most 4096 bytes\n  got      \(1048578,\)"):
        whole({**layer(4, 4, 4), STATE: blob(padded)})


@pytest.mark.parametrize("shape", [[4, 5], [4, 3], [2**31 - 1, 2**31 - 1]])
def test_a_shape_that_the_codes_deny_is_refused_before_anything_is_made(shape: list[int]) -> None:
    with pytest.raises(ShapeError, match=r"a\.weight: wrong shape"):
        whole({**layer(4, 4, 4), STATE: blob(changed(shape=shape))})


@pytest.mark.parametrize("blocksize", [1, 2, 3, 8, 2**31 - 1])
def test_a_block_size_that_the_scales_deny_is_refused(blocksize: int) -> None:
    with pytest.raises(ShapeError, match=r"a\.weight\.absmax: wrong shape"):
        whole({**layer(4, 4, 4), STATE: blob(changed(blocksize=blocksize))})


@pytest.mark.parametrize("lost", ["nested_absmax", "nested_quant_map"])
def test_quantized_scales_without_their_statistics_are_refused(lost: str) -> None:
    tensors = nested(4, 4, 2)
    del tensors[f"a.weight.{lost}"]

    with pytest.raises(MissingTensorError, match=rf"a\.weight\.{lost}: not in the checkpoint"):
        whole(tensors)


@pytest.mark.parametrize("lost", ["nested_blocksize", "nested_offset"])
def test_quantized_scales_of_which_the_state_is_silent_are_refused(lost: str) -> None:
    said = {"nested_blocksize": 3, "nested_dtype": "float32", "nested_offset": 0.5, lost: None}

    with pytest.raises(ConfigError, match=f"{lost}\n  expected a value, as absmax is quantized"):
        whole({**nested(4, 4, 2), STATE: blob(changed(blocksize=2, **said))})


def test_a_run_of_scales_too_many_is_refused() -> None:
    tensors = {**nested(4, 4, 2), "a.weight.nested_absmax": torch.ones(4)}

    with pytest.raises(ShapeError, match=r"expected \(3,\) = \(blocks/3\^,\)"):
        whole(tensors)


@pytest.mark.parametrize("make", [layer, nested])
def test_scales_are_bytes_where_they_are_quantized_and_only_there(make: Any) -> None:
    tensors = make(4, 4, 2)
    scales = tensors["a.weight.absmax"]
    tensors["a.weight.absmax"] = scales.float() if scales.dtype == torch.uint8 else scales.byte()

    with pytest.raises(DtypeError, match=r"a\.weight\.absmax: wrong dtype"):
        whole(tensors)


@pytest.mark.parametrize(
    ("claim", "make", "told"),
    [
        (True, layer, "is true, scales are not quantized"),
        (True, nested, ""),
        (False, nested, "is false, scales are quantized"),
        (False, layer, ""),
        (None, nested, ""),
    ],
)
def test_a_claim_of_double_quant_that_is_wrong_is_noted(claim: bool | None, make: Any, told: str) -> None:
    loader = FormatLoader(ConfiguredFormat(BNBNF4Weight, BNB4Config("nf4", double_quant=claim)))
    load = Weights(MemoryStorage(make(4, 4, 2)), loader=loader)

    load.get_weights("a")

    note = f"a: bnb_4bit_use_double_quant {told} and are believed"
    assert load.report().notes == ((note,) if told else ())
