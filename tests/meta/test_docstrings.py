"""Documentation of every public name: summary, parameters and errors; executed examples of the main names."""

import doctest
import importlib
from collections.abc import Callable
from typing import Any

import pytest

import qload
from qload.errors import ArgumentError, ShapeError
from tests.meta.docstrings import (
    PACKAGES,
    Documented,
    constants,
    documented,
    names,
    no_summary,
    of,
    undocumented,
    unnamed_errors,
)

# Main names of the API, with mandatory parts of their examples.
FIRST: dict[str, tuple[str, ...]] = {
    "open_checkpoint": ("with open_checkpoint(", ".get_weights("),
    "Weights": (".get_weights(", ".get_weights_col(", ".get_weights_row(", ".use_loader("),
    "verify": ("verify(",),
    "plan": ("plan(weights, tp=",),
    "explain": ("explain(weights, arch=",),
    "diff": ("diff(one, other)",),
    "convert": ("convert(one, other, to=",),
    "shard": ("shard(one, other, tp=",),
    "inspect": ("inspect(",),
    "layers": ("layers(",),
    "load_layers": ("load_layers(",),
    "Load": ("Load(", ".stream("),
    "repack": ("repack(",),
    "restore": ("restore(repack(",),
    "loader_from_config": ("loader_from_config(",),
    "KernelTarget": ("target=",),
    "GPTQWeight": ("GPTQWeight(", ".dequantize("),
    "AWQWeight": ("AWQWeight(", ".dequantize("),
    "Fp8Weight": ("Fp8Weight(", ".dequantize("),
    "Heads": ("Heads(", ".get_multi_weights_col("),
    "architecture_of": ("architecture_of(", ".expected("),
    "UnquantizedWeight": ("UnquantizedWeight(", ".dequantize("),
    "Linear": ("Linear(", ".get_linear("),
    "copy_into": ("copy_into(",),
    "replace_linears": ("replace_linears(model, weights",),
    "MemoryStorage": ("MemoryStorage(", ".read("),
    "with_experts": ("with_experts(", ".read("),
    "SafetensorsStorage": ("SafetensorsStorage(", ".read("),
    "FakeWorld": ("in FakeWorld(",),
    "maximum_over": ("maximum_over(group)",),
    "collectives_of": ("collectives_of(group)",),
    "joined_world": ("with joined_world(",),
    "agree": ("agree(group",),
    "QuantizingLoader": ("QuantizingLoader(", ".get_weights("),
    "Fp8Quantizer": ("Fp8Quantizer(", ".quantize("),
    "choose_mp_linear_kernel": ("choose_mp_linear_kernel(",),
    "MPLinearLayerConfig": ("MPLinearLayerConfig(",),
    "Order": (".apply(", ".undo("),
    "Packing": (".pack(", ".unpack("),
    "ExpertsWeight": (".get_experts(", ".dequantize("),
    "RepackingLoader": ("RepackingLoader(", ".get_weights("),
}
UNDOCUMENTED = """
Add an entry to a section "Attributes" (of a class) or "Parameters" (of a function), each followed by an
indented line of what it is; or name it in backticks."""


def wrong(check: Callable[[Documented], object]) -> dict[str, object]:
    """Return the defects by public name."""
    return {each.name: found for each in documented() if (found := check(each))}


def test_the_docstring_of_a_public_name_begins_with_a_sentence_on_one_line() -> None:
    assert documented()
    assert wrong(no_summary) == {}


def test_the_docstring_of_a_public_name_names_each_parameter() -> None:
    assert wrong(undocumented) == {}, UNDOCUMENTED


def test_the_docstring_of_a_public_name_names_each_error_and_when() -> None:
    assert wrong(unnamed_errors) == {}


def test_a_public_value_is_named_by_its_package() -> None:
    said = {package: importlib.import_module(package).__doc__ or "" for package in PACKAGES}

    assert [(package, name) for package, name in constants() if f"`{name}`" not in said[package]] == []


def examples(value: Any, called: str) -> list[doctest.DocTest]:
    """Return the example of a docstring, without predefined names; an empty list without an example."""
    found = doctest.DocTestFinder(recurse=False, exclude_empty=True).find(value, called, globs={})
    return [test for test in found if test.examples]


def failures(test: doctest.DocTest) -> list[str]:
    """Return the failures of an example."""
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    return told


@pytest.mark.parametrize("called", FIRST)
def test_the_first_names_show_themselves(called: str) -> None:
    (example,) = examples(getattr(qload, called), called)
    code = "".join(line.source for line in example.examples)

    assert [shown for shown in FIRST[called] if shown not in code] == []
    assert failures(example) == []


def test_no_other_name_has_an_example_that_is_not_run() -> None:
    shown = {each.name.rpartition(".")[2] for each in documented() if ">>>" in each.own}

    assert shown == set(FIRST)


# Failing inputs of the checks


def silent(x: int) -> None:
    raise ArgumentError("x", "anything else", str(x))


def spoken(x: int, y: int) -> None:
    """Refuses `x`, with a ShapeError, and does not say what it does with the other one"""
    if x:
        raise ArgumentError("x", "0", str(x))
    raise ShapeError("y", "()", (y,))


def shown(x: int) -> int:
    """Twice `x`, and not three times.

    >>> 2 * 3
    9
    """
    return 2 * x


class Child(qload.Order):
    """An order that leaves its pattern to its base."""

    def apply(self, tensor: Any, out: Any = None, more: Any = None) -> Any:
        """As any order, with a parameter that nothing says anything of."""


def test_a_name_without_a_docstring_is_seen() -> None:
    (found,) = of(silent)

    assert (no_summary(found), undocumented(found)) == ("no docstring", ["x"])
    assert unnamed_errors(found) == ["ArgumentError"]


def test_a_line_without_a_full_stop_a_parameter_and_an_error_are_seen() -> None:
    (found,) = of(spoken)

    assert no_summary(found) == found.own
    assert undocumented(found) == ["y"]
    assert unnamed_errors(found) == ["ArgumentError"]


def test_a_method_may_rely_on_the_one_that_it_overrides_and_only_on_that() -> None:
    found = {each.name.removeprefix(f"{__name__}."): each for each in of(Child)}

    assert undocumented(found["Child.apply"]) == ["more"]
    assert undocumented(found["Child"]) == []


def test_a_public_class_is_held_to_its_fields_and_its_constructor() -> None:
    found = {each.name.rpartition(".")[2]: each for each in documented()}

    assert {"qweight", "g_idx", "config", "layer"} <= set(found["GPTQWeight"].parameters)
    assert {"inner", "quantizer", "policy"} <= set(found["QuantizingLoader"].parameters)
    assert found["Fp8Config"].raises == {"ArgumentError"}
    assert "get_weights_row" in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Of `size` rows.", True),
        ("In runs of `2 * size` rows.", True),
        ("A tensor size (M, K).", True),
        ("All.\n\nParameters\n----------\nsize\n    Of a row.", True),
        ("All.\n\nParameters\n----------\nother, size\n    Of a row.", True),
        ("Its size.", False),
        ("Of `sizes`.", False),
        ("All.\n\nsize\nother", False),
    ],
)
def test_where_a_docstring_names_a_parameter(text: str, said: bool) -> None:
    assert names(text, "size") == said


def test_an_example_that_does_not_hold_is_seen() -> None:
    (example,) = examples(shown, "shown")

    assert len(failures(example)) == 1
    assert examples(silent, "silent") == []
