"""`qload formats`: the table of formats, generated from the formats."""

import json
import re
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qload import MemoryStorage, Weights, with_experts
from qload.capabilities import Capability, as_markdown, overview
from qload.checkpoint import format_label
from qload.configs import FoundConfig
from qload.detect import effective_claims, read_claims, read_configs
from qload.detect.config_reader import described_formats
from qload.detect.methods import METHODS
from qload.errors import RepackError, UnsupportedFormatError
from qload.experts.declared_stacks import stack_endings
from qload.formats import FORMATS, GGUFWeight
from qload.kernel_formats import repack, restore
from qload.kernel_formats.repack import LAYOUTS, can_restore, options, targets
from qload.quantize import QUANTIZERS
from qload.spec import Weight
from qload.storage import open_storage
from qload.testing import assert_same_bits, layers
from tests.cli.test_command_line import run
from tests.experts.expert_layers import FACTS, MATRICES, NAMES, PREFIX, StoredExperts, every_matrix, experts
from tests.format_cases import CONFIGS, every_format
from tests.paths import FIXTURES, ROOT

FOUR_BITS = {"bits": 4, "group_size": 128}
QUARK_MXFP8 = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
UNSTORED: tuple[dict[str, Any], ...] = (
    {"quant_method": "mistral", "qformat_weight": "fp8_e4m3"},
    {"quant_method": "gguf"},
    {
        "quant_method": "comfyui",
        "layers": {
            name: {"format": name, "group_size": 16, "convrot_groupsize": 16}
            for name in (
                "float8_e4m3fn",
                "nvfp4",
                "mxfp8",
                "int8_tensorwise",
                "convrot_w4a4",
                "asym_w4a8_int8",
                "awq_w4a16",
            )
        },
    },
    *(
        {"quant_method": name, "bits": 4, "group_size": 32, **mode}
        for name in ("mlx", "metal")
        for mode in ({}, {"mode": "mxfp4"})
    ),
    {"quant_method": "quark", "global_quant_config": {"weight": QUARK_MXFP8}},
    *(
        {"quant_method": "modelopt", "quant_algo": name}
        for name in ("FP8", "NVFP4_AWQ", "W4A8_AWQ", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8")
    ),
    {"quant_method": "marlin", **FOUR_BITS},
    {"quant_method": "gptq_marlin_24", **FOUR_BITS},
    *(
        {"quant_method": "gptq_marlin", "checkpoint_format": f, **FOUR_BITS}
        for f in ("gptq", "marlin", "marlin_24")
    ),
    {"quant_method": "awq_marlin", **FOUR_BITS},
    {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "bits": 8, "group_size": -1},
    *(
        {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", **FOUR_BITS, **more}
        for more in ({}, {"act_bits": 8}, {"data_type": "nv_fp"}, {"data_type": "mx_fp"})
    ),
    {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
    {"quant_method": "modelopt", "quant_algo": "mxfp4"},
    {"quant_method": "gptq", "checkpoint_format": "marlin", **FOUR_BITS},
    {"quant_method": "gptq", "checkpoint_format": "marlin_24", **FOUR_BITS},
)
TOLD_APART = """
quant_method {}: `formats` of its Method and the embedded configs differ.
In its Method alone: {}. Add fixtures/FORMAT/CASE/ with such a config.json, or, if no fixture can have one,
add the config to UNSTORED in this file.
Found by a config alone: {}. Add it to its Method."""
# Mandatory options of `repack` for some layouts.
OPTIONS = {"dtype": torch.bfloat16, "exponent_bias": False}


def named(formats: set[type[Weight]]) -> str:
    return ", ".join(sorted(each.format for each in formats)) or "none"


def test_the_page_of_docs_is_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "formats.md").read_text()

    assert page == as_markdown(), "python -m qload formats --markdown > docs/formats.md"
    assert run("formats", "--markdown").stdout == page


def test_json_has_every_format_and_column() -> None:
    table = json.loads(run("formats", "--json").stdout)["formats"]

    assert list(table) == [weight_type.format for weight_type in FORMATS]
    first, *others = (list(row) for row in table.values())
    assert len(first) == 14
    assert all(columns == first for columns in others)


def test_a_table_has_a_line_for_each_cell() -> None:
    words = list[str]()
    for name, row in json.loads(run("formats", "--json").stdout)["formats"].items():
        words += format_label(name).split()
        for column, (yes, text) in row.items():
            words += f"{column} {'yes' if yes else 'no'}{': ' if text else ''}{text}".split()

    assert run("formats", "--table").stdout.split() == words


def test_every_no_has_its_reason() -> None:
    assert all(cell.text for row in overview().values() for cell in row.values() if not cell.yes)


def test_an_answer_has_its_text_behind_a_colon() -> None:
    assert (str(Capability(True)), str(Capability(True, "at 8"))) == ("yes", "yes: at 8")
    assert (str(Capability(False)), str(Capability(False, "why"))) == ("no", "no: why")


def test_what_a_method_reads_is_what_its_configs_are_read_as() -> None:
    """Test the config of every fixture, and configs of dialects without a fixture."""
    found: dict[str, set[type[Weight]]] = {name: set() for name in METHODS}
    stored = [read_configs(path.parent)[1] for path in FIXTURES.rglob("config.json")]
    configs = [configs[0] for configs in stored if configs]
    for path in FIXTURES.glob("torchao/*/config.json"):  # headers state the formats
        with open_storage(path.parent) as storage:
            claims = effective_claims(read_configs(path.parent)[1][0], storage)
        found["torchao"] |= {fmt.weight_type for fmt in claims.formats} if claims else set()
    for config in [*configs, *(FoundConfig("config.json", "", values) for values in UNSTORED)]:
        with suppress(UnsupportedFormatError):  # some fixtures are unsupported on purpose
            found[config.values["quant_method"]] |= {fmt.weight_type for fmt in read_claims(config).formats}

    for method in METHODS:
        formats = described_formats(method)
        assert found[method] == set(formats), TOLD_APART.format(
            method, named(set(formats) - found[method]), named(found[method] - set(formats))
        )


def test_every_format_is_detected() -> None:
    lost = [name for name, row in overview().items() if not (row["detect"].yes and row["detect"].text)]

    assert not lost, f"no config leads to {lost}: add a Method to their modules"


@every_format
@given(data=st.data())
@settings(max_examples=5)
def test_what_is_said_of_repacking_holds(weight_type: type[Weight], data: Any) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()

    for layout in LAYOUTS:
        taken = options(weight_type, layout, weight.config)
        given = {name: OPTIONS[name] for name in taken if name in OPTIONS}
        try:
            other = repack(weight, layout, **given)
        except RepackError:
            continue  # not representable in this layout; the tests of the formats use other weights
        assert isinstance(other, weight_type) or layout in targets(weight_type)
        assert can_restore(weight_type)
        back = restore(other)
        assert all(assert_same_bits(back.fields()[name], t) is None for name, t in weight.fields().items())


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_quantizer_stands_beside_the_format_that_it_makes(name: str) -> None:
    settings_of = {"bnb_fp4": {"quant_type": "fp4"}}

    assert QUANTIZERS[name](**settings_of.get(name, {})).format == name


def stacks_of(stored: StoredExperts, endings: dict[str, str]) -> dict[str, Tensor]:
    """Return the tensors of separately stored experts as stacks, under names with these endings."""
    found = {}
    for part in NAMES:
        for field, ending in endings.items():
            own = [stored.tensors[f"{PREFIX}.{e}.{part}.{field}"] for e in range(stored.count)]
            blocks = [each.unflatten(-1, (-1, 16)) for each in own] if ending[1:] == "blocks" else own
            found[f"{PREFIX}.{part}{ending}"] = torch.stack(blocks)
    return found


@every_matrix
@given(data=st.data())
@settings(max_examples=3)
def test_what_is_said_of_experts_holds(weight_type: type[Weight], data: Any) -> None:
    rows = overview()[weight_type.format]
    layouts = rows["experts"].text.partition("; repacked to ")[2].split(", ")
    stored = data.draw(experts(weight_type, most=2))

    made = stored.load()

    assert made.get_linear() is not None
    assert rows["experts"].yes
    assert [each for each in layouts if each] == list(targets(weight_type))
    for layout in LAYOUTS:
        taken = options(weight_type, layout, stored.config)
        given = {name: OPTIONS[name] for name in taken if name in OPTIONS}
        with suppress(RepackError):
            other = made.repack(layout, **given)
            assert other.down.weight_type is weight_type or layout in layouts


@pytest.mark.parametrize(
    "name", [name for name, row in overview().items() if row["experts"].yes and row["experts in stacks"].yes]
)
@given(data=st.data())
@settings(max_examples=3)
def test_stacks_are_read_from_the_names_that_are_said(name: str, data: Any) -> None:
    """Test one of the printed endings for each tensor."""
    (weight_type,) = (each for each in MATRICES if each.format == name)
    printed = st.just(weight_type.example) if weight_type is GGUFWeight else None
    stored = data.draw(experts(weight_type, configs=printed))
    held = {field.rpartition(".")[2] for field in stored.tensors}
    assume(len(stored.tensors) == stored.count * len(NAMES) * len(held))  # each has a row in every stack
    names = weight_type.tensors(weight_type.example)[0].suffixes  # of the codes, of which one is drawn
    drawn = {name: next(iter(held & {*names}), name) for name in names}
    fields = {ending: drawn.get(field, field) for ending, field in stack_endings().items()}
    assume(held <= {*fields.values()})  # optional tensors may have no stack
    text = overview()[name]["experts in stacks"].text.removeprefix("from experts.down_proj")
    first, _, others = text.partition(" with ")
    weights = [ending.strip() for ending in first.split(" or ")]
    assume(held & {fields[ending] for ending in weights})  # one of two names of codes may have no stack
    said = [*weights, *re.findall(r"[._]\w+", others)]
    said += [f"_{own}" for own in sorted(held) if own not in {fields[ending] for ending in said}]
    ways = {field: [ending for ending in said if fields[ending] == field] for field in held}
    endings = {field: data.draw(st.sampled_from(each), label=field) for field, each in ways.items()}
    sizes = {"hidden_size": stored.drawn[0][0].K, "moe_intermediate_size": stored.inner}

    storage = with_experts(
        MemoryStorage(stacks_of(stored, endings)),
        {"model_type": "qwen3_moe", "num_experts": stored.count, **sizes},
    )

    made = Weights(storage, loader=stored.loader).get_experts(PREFIX, facts=FACTS)
    for expert in range(stored.count):
        gate, up, down = stored.meant(expert)
        for got, want in zip(made.dequantize(expert), (torch.cat([gate, up]), down), strict=True):
            assert_same_bits(got, want)


def test_the_summary_counts_the_formats_that_are_read() -> None:
    result = run("formats", "--json")

    read = [row for row in json.loads(result.stdout)["formats"].values() if row["load"][0]]
    assert result.stderr == f"{len(read)} formats are read; --table shows the operations of each\n"
