"""Slots of each field of a stack, by its shape: the part of a stored tensor that belongs to each layer."""

from dataclasses import replace

import pytest

from qload import dtypes
from qload.experts.stack_layouts import Layout, Slot
from qload.storage import TensorInfo

# Matrices of 3 experts with 64 inputs: gate and up of 48 outputs each, split and joined, and down of 96.
GATE_UP = Layout(("gate_proj", "up_proj"), 2, 96, 64, False, False, 3, None, True, False, False)
JOINED = replace(GATE_UP, layers=("gate_up_proj",))
DOWN = replace(GATE_UP, layers=("down_proj",), stored_layers=1)
TABLE: list[tuple[Layout, str, tuple[int, ...], list[str] | None]] = [
    (GATE_UP, "weight", (3, 96, 64), ["(48, 64)", "(48, 64) from 48"]),
    (
        replace(GATE_UP, interleaved=True),
        "weight",
        (3, 96, 64),
        ["(48, 64) step 2", "(48, 64) from 1 step 2"],
    ),
    (
        replace(GATE_UP, inputs_first=True),
        "weight",
        (3, 64, 96),
        ["(48, 64) inputs_first", "(48, 64) from 48 inputs_first"],
    ),
    (
        replace(GATE_UP, inputs_first=True, interleaved=True),
        "weight",
        (3, 64, 96),
        ["(48, 64) step 2 inputs_first", "(48, 64) from 1 step 2 inputs_first"],
    ),
    (GATE_UP, "weight", (3, 95, 64), None),
    (GATE_UP, "weight", (3, 96, 64, 1), None),
    (GATE_UP, "weight", (0, 96, 64), None),
    (DOWN, "weight", (3, 96, 64), ["(96, 64)"]),
    (GATE_UP, "_blocks", (3, 96, 2, 16), ["(48, 32) 16 bytes", "(48, 32) from 48 16 bytes"]),
    (GATE_UP, "_blocks", (3, 96, 2, 8), None),
    (GATE_UP, "_blocks", (3, 96, 32), None),
    (
        GATE_UP,
        "weight_shape",
        (3,),
        [
            "(2,) of all experts shape of 2 layers, 3 experts",
            "(2,) shared of all experts shape of 2 layers, 3 experts",
        ],
    ),
    (
        GATE_UP,
        "weight_shape",
        (2,),
        [
            "(2,) of all experts shape of 2 layers, 3 experts",
            "(2,) shared of all experts shape of 2 layers, 3 experts",
        ],
    ),
    (
        GATE_UP,
        "weight_shape",
        (3, 2),
        ["(2,) shape of 2 layers, 3 experts", "(2,) shared shape of 2 layers, 3 experts"],
    ),
    (GATE_UP, "weight_shape", (3, 3), None),
    (GATE_UP, "weight_shape", (4,), None),
    (DOWN, "g_idx", (3, 64), ["(64,)"]),
    (GATE_UP, "g_idx", (64,), ["(64,) of all experts", "(64,) shared of all experts"]),
    (GATE_UP, "g_idx", (3, 64), ["(64,)", "(64,) shared"]),
    (DOWN, "qzeros", (3, 2, 12), ["(2, 12)"]),
    (GATE_UP, "qzeros", (3, 2, 12), None),
    (DOWN, "qzeros", (3, 12), None),
    (GATE_UP, "bias", (3, 96), ["(48,)", "(48,) from 48"]),
    (GATE_UP, "bias", (3, 96, 1), None),
    (DOWN, "bias", (3, 96), ["(96,)"]),
    (GATE_UP, "weight_scale", (), ["() of all experts", "() shared of all experts"]),
    (GATE_UP, "weight_scale", (1,), ["(1,) of all experts", "(1,) shared of all experts"]),
    (replace(GATE_UP, quantized=False), "weight_scale_inv", (3, 1, 1), ["(1, 1)", "(1, 1) shared"]),
    (replace(GATE_UP, quantized=False), "weight_scale_inv", (3, 2, 1), ["(2, 1)", "(2, 1) shared"]),
    (GATE_UP, "weight_scale", (3, 1), ["(1,)", "(1,) shared"]),
    (GATE_UP, "weight_scale", (3, 1, 1), ["(1, 1)", "(1, 1) shared"]),
    (GATE_UP, "weight_scale_2", (3, 1, 1), ["()", "() shared"]),
    (GATE_UP, "weight_scale_2", (3,), ["()", "() shared"]),
    (GATE_UP, "input_scale", (3, 2), ["(1,)", "(1,) from 1"]),
    (GATE_UP, "input_scale", (3, 96), None),
    (replace(GATE_UP, scales_have_inputs=True), "weight_scale", (3, 1), ["()", "() shared"]),
    (
        replace(GATE_UP, scales_have_inputs=True, block=(32, 32)),
        "weight_scale",
        (3, 1, 1),
        ["(1, 1)", "(1, 1) shared"],
    ),
    (replace(DOWN, scales_have_inputs=True, N=1), "weight_scale", (3, 1, 1), ["(1, 1)"]),
    (GATE_UP, "weight_scale", (3, 2), ["(1,)", "(1,) from 1"]),
    (GATE_UP, "weight_scale", (3, 2, 1), ["(1, 1)", "(1, 1) from 1"]),
    (JOINED, "weight_scale", (3, 2), None),
    (JOINED, "weight_scale", (3, 2, 1), None),
    (replace(GATE_UP, interleaved=True), "weight_scale", (3, 2), None),
    (replace(GATE_UP, N=2), "weight_scale", (3, 2), ["(1,)", "(1,) from 1"]),
    (replace(JOINED, block=(96, 64)), "weight_scale", (3, 2, 1), None),
    (GATE_UP, "weight_scale", (3, 96), ["(48,)", "(48,) from 48"]),
    (
        replace(GATE_UP, scales_have_inputs=True),
        "weight_scale",
        (3, 96),
        ["(48, 1) lacks_axis", "(48, 1) from 48 lacks_axis"],
    ),
    (GATE_UP, "weight_scale", (3, 95), None),
    (DOWN, "weight_scale", (3, 96), ["(96,)"]),
    (GATE_UP, "weight_scale", (3, 96, 2), ["(48, 2)", "(48, 2) from 48"]),
    (
        replace(GATE_UP, inputs_first=True),
        "weight_scale",
        (3, 2, 96),
        ["(48, 2) inputs_first", "(48, 2) from 48 inputs_first"],
    ),
    (replace(GATE_UP, inputs_first=True), "weight_scale", (3, 96, 1), ["(48, 1)", "(48, 1) from 48"]),
    (GATE_UP, "weight_scale", (3, 1, 96), ["(48, 1) inputs_first", "(48, 1) from 48 inputs_first"]),
    (GATE_UP, "weight_scale", (3, 4, 96), ["(2, 96)", "(2, 96) from 2"]),
    (
        replace(GATE_UP, four_bits=True),
        "weight_scale",
        (3, 4, 96),
        ["(48, 4) inputs_first", "(48, 4) from 48 inputs_first"],
    ),
    (
        replace(GATE_UP, four_bits=True, inputs_first=True),
        "weight_scale",
        (3, 96, 4),
        ["(48, 4)", "(48, 4) from 48"],
    ),
    (
        replace(GATE_UP, interleaved=True),
        "weight_scale",
        (3, 96, 2),
        ["(48, 2) step 2", "(48, 2) from 1 step 2"],
    ),
    (replace(GATE_UP, interleaved=True), "weight_scale", (3, 48, 2), None),
    (GATE_UP, "weight_scale", (3, 48, 2), ["(24, 2)", "(24, 2) from 24"]),
    (GATE_UP, "weight_scale", (3, 96, 2, 1), None),
    (GATE_UP, "weight_scale", (3, 96, 1, 1), None),
    (GATE_UP, "weight_scale", (3, 96, 1, 2, 1), ["(48, 1, 2, 1)", "(48, 1, 2, 1) from 48"]),
    (GATE_UP, "weight_scale", (3, 96, 1, 2), None),
    (GATE_UP, "weight_scale", (3, 3, 1, 2, 1), None),
    (replace(GATE_UP, block=(32, 32)), "weight_scale", (3, 3, 2), None),
    (replace(GATE_UP, N=128, block=(32, 32)), "weight_scale", (3, 4, 2), ["(2, 2)", "(2, 2) from 2"]),
    (
        replace(GATE_UP, N=128, block=(32, 32)),
        "weight_scale",
        (3, 2, 4),
        ["(2, 2) inputs_first", "(2, 2) from 2 inputs_first"],
    ),
    (
        replace(GATE_UP, N=128, block=(32, 32), inputs_first=True),
        "weight_scale",
        (3, 2, 4),
        ["(2, 2) inputs_first", "(2, 2) from 2 inputs_first"],
    ),
    (replace(GATE_UP, N=128, block=(32, 32), interleaved=True), "weight_scale", (3, 4, 2), None),
    (replace(GATE_UP, N=64, block=(128, 32)), "weight_scale", (3, 1, 2), ["(1, 2)", "(1, 2) shared"]),
    (replace(GATE_UP, N=64, block=(128, 32)), "weight_scale", (3, 2, 1), ["(1, 1)", "(1, 1) from 1"]),
    (replace(GATE_UP, N=64, block=(128, 32)), "weight_scale", (3, 2, 2), ["(1, 2)", "(1, 2) from 1"]),
    (replace(GATE_UP, N=64, block=(128, 32), interleaved=True), "weight_scale", (3, 1, 2), None),
    (replace(GATE_UP, N=192, block=(64, 32)), "weight_scale", (3, 3, 2), None),
    (replace(GATE_UP, N=192, block=(64, 32)), "weight_scale", (3, 4, 2), ["(2, 2)", "(2, 2) from 2"]),
    (replace(JOINED, N=192, block=(64, 32)), "weight_scale", (3, 3, 2), ["(3, 2)"]),
    (replace(JOINED, N=192, block=(64, 32)), "weight_scale", (3, 4, 2), None),
    (replace(JOINED, N=160, block=(64, 32)), "weight_scale", (3, 4, 2), None),
    (replace(JOINED, N=160, block=(64, 32)), "weight_scale", (3, 3, 2), ["(3, 2)"]),
    (replace(JOINED, N=224, block=(64, 32)), "weight_scale", (3, 4, 2), None),
    (replace(JOINED, N=256, block=(64, 32)), "weight_scale", (3, 4, 2), ["(4, 2)"]),
    (replace(DOWN, N=96, block=(32, 32)), "weight_scale", (3, 3, 2), ["(3, 2)"]),
    (GATE_UP, "weight_zero_point", (3, 12, 2), ["(6, 2)", "(6, 2) from 6"]),
    (replace(GATE_UP, N=80), "weight_zero_point", (3, 10, 2), ["(5, 2)", "(5, 2) from 5"]),
    (replace(GATE_UP, N=64), "weight_zero_point", (3, 8, 2), ["(4, 2)", "(4, 2) from 4"]),
    (DOWN, "weight_zero_point", (3, 12, 2), ["(12, 2)"]),
    (GATE_UP, "weight_zero_point", (3, 11, 2), None),
    (GATE_UP, "weight_zero_point", (3, 12, 2, 1), None),
]


def slot_text(slot: Slot) -> str:
    """Return the shape of an expert's tensor, and the properties of its slot that are not the defaults."""
    facts = [str(slot.info.shape)]
    facts += [f"from {slot.first}"] * bool(slot.first) + [f"step {slot.step}"] * (slot.step != 1)
    facts += [name for name in ("inputs_first", "lacks_axis") if getattr(slot, name)]
    facts += ["shared"] * slot.info.shared + ["of all experts"] * (not slot.counted)
    facts += [f"{slot.bytes_of_block} bytes"] * bool(slot.bytes_of_block)
    if slot.layers_of_shape:
        facts.append(f"shape of {slot.layers_of_shape} layers, {slot.experts} experts")
    return " ".join(facts)


@pytest.mark.parametrize(("layout", "field", "shape", "slots"), TABLE)
def test_the_slots_of_a_field_follow_from_its_shape(
    layout: Layout, field: str, shape: tuple[int, ...], slots: list[str] | None
) -> None:
    dtype = dtypes.int32 if field == "weight_zero_point" else dtypes.float32
    name, ending = ("weight_packed", "_blocks") if field == "_blocks" else (field, f"_{field}")
    found = layout.slots(name, ending, "stored", TensorInfo(dtype, shape, "file"))

    assert (None if found is None else [slot_text(slot) for slot in found]) == slots
    for slot in found or ():
        assert (slot.source, slot.info.stored_dtype, slot.info.file) == ("stored", dtype, "file")
