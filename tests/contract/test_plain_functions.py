"""Functions of names and numbers alone, called with several of each: results and refusals as golden text."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.changed_values import UNCHECKED, outcome

# Modules, and functions of theirs that neither read a file nor start a process.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "architecture.architecture": ("absent",),
    "architecture.names": (
        "is_matrix_name", "is_block_list", "pattern_of", "block_of", "group_by_pattern", "projection_groups",
        "usual_split", "is_adapter", "base_name",
    ),
    "architecture.table": ("spelled", "tails"),
    "checkpoint.layer_index": ("split_name",),
    "checkpoint.report_base": ("format_label",),
    "cli.checkpoint_paths": ("parse_hub_id",),
    "cli.main": ("is_json_requested",),
    "cli.options": ("parse_device",),
    "cli.progress": ("format_progress",),
    "cli.tables": ("join_words",),
    "cli.text": ("escape_name", "format_size", "format_percent", "format_count", "note_lines"),
    "configs.claims": ("every_module",),
    "configs.matching": ("is_regex", "is_glob", "precedence"),
    "diff.comparison": ("output_blocks",),
    "errors.exceptions": ("list_names", "worlds"),
    "errors.reporting": ("worst_code", "cause_of", "group_texts"),
    "experts.expert_description": ("bias_name",),
    "experts.declared_stacks": ("stack_names", "is_weight"),
    "hub": ("parse_id",),
    "kernel_formats.marlin": ("fits_thread_blocks", "pad_shape", "split_group", "count_locks"),
    "kernels.bounds": ("roundings",),
    "kernels.cuda.dispatch": ("kind_of",),
    "kernels.cuda.experts_launches": ("division", "columns_of_block"),
    "kernels.cuda.hopper_gemm": ("division",),
    "kernels.cuda.launch": ("why_not_chip",),
    "kernels.products": ("token_blocks",),
    "layouts.compressed_tensors": ("stored", "words", "capacity", "packings_agree"),
    "models.generation": ("check_ids", "check_prompt"),
    "models.images": ("resized",),
    "models.kv_cache": ("page_count",),
    "models.rope": ("yarn_mscale",),
    "plan.explain": ("capability_of",),
    "plan.sharing": ("check_ranks",),
    "quantize.policy": ("is_router", "block_of"),
    "spec.integers": ("find_unsupported_bits",),
    "spec.tensor": ("named",),
    "storage.files": ("shortened",),
    "storage.gguf_types": ("ggml_type",),
    "storage.protocol": ("missing",),
    "storage.unsupported_files": ("other_notes",),
    "testing.checks": ("around_borders",),
    "verify.rules.architecture": ("join_numbers",),
    "weights.exemptions": ("cache_scale", "cache_zero"),
}  # fmt: skip
NAMES = (
    "model.layers.3.mlp.experts.5.down_proj.weight",
    "model.layers.10.self_attn.q_proj.qweight",
    "model.layers.0.mlp.gate",
    "model.layers.0.self_attn.k_proj.k_scale",
    "lm_head",
    "re:.*q_proj$",
    "*.gate_proj",
    "org/model@main",
    "model-00001-of-00003.safetensors",
    "sm90",
    "gptq",
    "",
)
MAX_LENGTH = 400  # of a result
SAMPLES: dict[str, tuple[Any, ...]] = {
    "int": (64, 1, 2, 3, 8, 100, 128, 1000, 70000, 0),
    "float": (0.5, 3.0, 75.0),
    "bool": (False, True),
    "str": NAMES,
    "tuple[int, int]": ((4, 8), (9, 0), (7, 5), (3, 100)),
    "Sequence[int]": ((2, 3, 5), (1,), (), tuple(range(20))),
    "Sequence[str]": (NAMES[:3], NAMES[:1], ()),
}
SAMPLES |= {"Iterable[str]": SAMPLES["Sequence[str]"], "Collection[str]": SAMPLES["Sequence[str]"]}
SAMPLES |= {"Iterable[int]": SAMPLES["Sequence[int]"]}


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with its arguments in order, and list the result of a generator."""
    keywords = {
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    given = [value for name, value in arguments.items() if name not in keywords]
    result = function(*given, **{name: arguments[name] for name in keywords})
    return list(result) if inspect.isgenerator(result) else result


def samples(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """Return values of the annotation of a parameter, with None where it may be."""
    annotation = inspect.formatannotation(parameter.annotation)
    annotation = annotation.strip("'").removeprefix("collections.abc.")  # quoted where it is not evaluated
    kinds = annotation.split(" | ")
    return SAMPLES[kinds[0]] + ((None,) if "None" in kinds else ())


def calls(function: Any) -> Iterator[dict[str, Any]]:
    """Yield arguments in which one differs from the first samples, or two by as much."""
    parameters = inspect.signature(function).parameters
    values = {name: samples(parameter) for name, parameter in parameters.items()}
    first = {name: each[0] for name, each in values.items()}
    yield first
    for name, each in values.items():
        yield from ({**first, name: value} for value in each[1:])
    for at in range(1, max(map(len, values.values())) if len(values) > 1 else 0):
        yield {name: each[at * (1 + place) % len(each)] for place, (name, each) in enumerate(values.items())}


@pytest.mark.parametrize("module", FUNCTIONS)
def test_results_of_the_functions_of(module: str, golden: SnapshotAssertion) -> None:
    lines = []
    for name in FUNCTIONS[module]:
        function = getattr(importlib.import_module(f"qload.{module}"), name)
        for arguments in calls(function):
            text = outcome(partial(call, function), {"arguments": arguments}, lawful=...)[:MAX_LENGTH]
            if text != UNCHECKED:
                lines.append(f"{name}{tuple(arguments.values())} -> {text}")

    assert "\n".join(dict.fromkeys(lines)) == golden
