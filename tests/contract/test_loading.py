"""Contract of every format for loading, for each source of the tensors."""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from qload.errors import DtypeError, IndexValueError, MissingTensorError, QloadError, ShapeError
from qload.formats import FORMATS, CTPackWeight
from qload.kernel_formats import repack, restore
from qload.kernel_formats.repack import targets
from qload.parallel import FakeWorld
from qload.spec import Role, TensorSpec, Weight, named
from qload.storage import MemoryStorage, SafetensorsStorage
from qload.testing import assert_same_bits, layer_of, layers
from qload.testing.random_layer import PREFIX, DrawnLayer
from qload.testing.traits import CONTRACTS, Traits, contract
from qload.weights import Weights
from tests.example_counts import at_most
from tests.format_cases import CONFIGS, every_format

few = at_most(15)


@every_format
@given(data=st.data())
@few
def test_files_and_memory_give_the_same_weight(
    weight_type: type[Weight], data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))
    file = tmp_path_factory.mktemp("files") / "model.safetensors"
    save_file(stored.named(), file)

    with Weights(SafetensorsStorage(file), loader=stored.loader()) as weights:
        from_file = weights.get_weights("layer")
    from_memory = Weights(stored.storage(), loader=stored.loader()).get_weights("layer")

    for name, tensor in from_memory.fields().items():
        assert_same_bits(from_file.fields()[name], tensor)
    assert from_file.config == from_memory.config


@every_format
@given(data=st.data())
@few
def test_loading_twice_gives_the_same_and_the_ledger_says_so(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))
    weights = Weights(stored.storage(), loader=stored.loader())

    first = weights.get_weights("layer")
    assert weights.report().complete
    second = weights.get_weights("layer")

    assert_same_bits(first.dequantize(), second.dequantize())
    assert set(weights.report().twice) == set(stored.named())


@every_format
@given(data=st.data())
@few
def test_a_loaded_weight_holds_what_is_stored(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))

    weight = Weights(stored.storage(), loader=stored.loader(), dtype=torch.bfloat16).get_weights("layer")

    specs = [spec for spec in weight_type.tensors(stored.config) if not spec.spent]
    for spec in (spec for spec in specs if spec.name in stored.tensors):
        want, got = stored.tensors[spec.name], weight.fields()[spec.name]
        if want.dtype == got.dtype or spec.role is Role.FLOAT:  # or the loader has resolved the dtype
            assert_same_bits(got, want.bfloat16() if spec.role is Role.FLOAT else want)


@every_format
@given(data=st.data())
@few
def test_a_missing_tensor_is_named(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))
    lost = data.draw(st.sampled_from(sorted(stored.named())))
    tensors = {name: tensor for name, tensor in stored.named().items() if name != lost}

    with pytest.raises(MissingTensorError) as caught:
        Weights(MemoryStorage(tensors), loader=stored.loader()).get_weights("layer")

    assert caught.value.tensor == lost


@every_format
@given(data=st.data())
@few
def test_a_wrong_dtype_is_named(weight_type: type[Weight], data: Any) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))
    name = data.draw(st.sampled_from(sorted(stored.named())))
    tensors = {**stored.named(), name: stored.named()[name].to(torch.bool)}

    with pytest.raises(DtypeError) as caught:
        Weights(MemoryStorage(tensors), loader=stored.loader()).get_weights("layer")

    assert (caught.value.tensor, caught.value.got) == (name, "bool")


@every_format
@given(data=st.data())
@few
def test_one_more_column_is_a_wrong_shape(weight_type: type[Weight], data: Any) -> None:
    if weight_type.format in ("unquantized", "bitnet"):
        pytest.skip("one tensor has nothing to disagree with")
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))
    if weight_type is CTPackWeight:  # for other widths, one more word may be the other packing
        assume(stored.config.bits in (2, 4, 8))
    specs = [spec for spec in weight_type.tensors(stored.config) if spec.name in stored.tensors]
    names = [named("layer", spec.suffix) for spec in specs if is_told(spec, specs)]
    assume(names)
    name = data.draw(st.sampled_from(names))
    longer = torch.cat([stored.named()[name], stored.named()[name][..., :1]], dim=-1)

    with pytest.raises(ShapeError):
        Weights(MemoryStorage({**stored.named(), name: longer}), loader=stored.loader()).get_weights("layer")


def is_told(spec: TensorSpec, specs: list[TensorSpec]) -> bool:
    """Return whether other tensors, or a fixed size, determine the number of columns of a tensor."""
    last = spec.axes[-1]
    others = [axis for other in specs if other is not spec for axis in other.axes]
    return last.dim.isdigit() or last.flat or any(axis.dim == last.dim and not axis.rounds for axis in others)


@every_format
@given(data=st.data(), beyond=st.sampled_from([-1, 0, 5]))
@few
def test_an_index_out_of_range_is_named(weight_type: type[Weight], data: Any, beyond: int) -> None:
    stored = data.draw(layers(weight_type, CONFIGS[weight_type]))
    specs = [spec for spec in weight_type.tensors(stored.config) if spec.name in stored.tensors]
    indices = [spec for spec in specs if spec.index_of]
    for spec in indices:
        limit = int(stored.tensors[spec.name].max()) + 1
        stored.tensors[spec.name][-1] = beyond if beyond < 0 else limit + beyond

        with pytest.raises(IndexValueError) as caught:
            Weights(stored.storage(), loader=stored.loader()).get_weights("layer")

        assert (caught.value.tensor, caught.value.at) == (f"layer.{spec.name}", stored.K - 1)


@pytest.mark.parametrize("weight_type", FORMATS, ids=lambda weight_type: weight_type.format)
def test_a_format_documents_every_tensor_it_declares(weight_type: type[Weight]) -> None:
    text = inspect.getdoc(sys.modules[weight_type.__module__]) or ""

    documented = {line.split()[0] for line in text.splitlines() if line.startswith("    ") and line.split()}

    assert {spec.suffix for spec in weight_type.tensors(weight_type.example)} <= documented


def test_every_room_has_a_row_in_the_table_of_configs() -> None:
    assert set(CONFIGS) == set(FORMATS)


def test_a_weight_made_by_hand_is_checked_like_a_loaded_one(fixtures: Path) -> None:
    weight_type = FORMATS[1]
    with pytest.raises(ShapeError, match=r"qzeros: wrong shape\n  expected \(1, 1\)"):
        weight_type(
            config=weight_type.example,
            qweight=torch.zeros(1, 8, dtype=torch.int32),
            qzeros=torch.zeros(1, 2, dtype=torch.int32),
            scales=torch.ones(1, 8, dtype=torch.float16),
            g_idx=torch.zeros(8, dtype=torch.int32),
        )


CORNERS = [each for name in CONTRACTS for each in contract(name).corners(name)]
LOADS: dict[str, Any] = {
    **dict.fromkeys(("get_weights", "get_weights_col", "get_weights_row"), PREFIX),
    "get_multi_weights_col": [PREFIX, "other"],
}


def results(layer: DrawnLayer) -> Iterator[tuple[str, Weight | str]]:
    """Yield the loaded shares, and the whole layer in all layouts and back; the text of a refusal."""

    def outcome(call: Callable[[], Weight]) -> Weight | str:
        try:
            return call()
        except QloadError as error:
            return str(error)

    storage = MemoryStorage({**layer.named(), **layer.named("other")})
    for load, names in LOADS.items():
        for rank in FakeWorld(2):
            weights = Weights(storage, loader=layer.loader(), process_group=rank)
            yield f"{load} {rank.rank()}", outcome(partial(getattr(weights, load), names))
    for layout in targets(layer.weight_type):
        options = {"dtype": torch.float16} if "vllm" in layout else {}
        repacked = outcome(partial(repack, layer.weight(), layout, **options))
        yield layout, repacked
        if isinstance(repacked, Weight):
            yield f"{layout}, restored", restore(repacked)


@pytest.mark.parametrize("traits", CORNERS, ids=lambda traits: "-".join(map(str, vars(traits).values())))
def test_the_default_device_changes_no_result(traits: Traits) -> None:
    """Engines build models under torch.device("meta") or "cuda", and load their tensors there."""
    layer = layer_of(traits, 128, 256)
    with torch.device("meta"):
        found = dict(results(layer))
        values = {key: each.dequantize() for key, each in found.items() if isinstance(each, Weight)}

    for key, want in results(layer):
        got = found[key]
        if not isinstance(want, Weight) or not isinstance(got, Weight):
            assert got == want
            continue
        for name, tensor in want.fields().items():
            assert_same_bits(got.fields()[name], tensor)
        assert_same_bits(values[key], want.dequantize())
