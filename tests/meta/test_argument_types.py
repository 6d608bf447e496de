"""Calls of every public callable with a wrong type for one argument at a time: an error of qload by name.

The tests derive a wrong value from the text of an annotation, independently of the check in qload: an object
outside every annotation, and text, numbers, None and sequences outside the annotation in question.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch

import qload
from qload.diagnosis import diagnose
from qload.errors import ArgumentError, QloadError, checked
from qload.experts import GatedActivation
from qload.quantize import requantize
from qload.storage import MemoryStorage
from tests.annotations import parameters
from tests.kernel_formats.marlin_layers import layer
from tests.paths import FIXTURES

PUBLIC: list[str] = vars(qload)["__all__"]
MODEL = FIXTURES / "gptq" / "model_g32_desc_act"
WEIGHT = layer(128, 64, 32)
PLAIN = qload.DefaultWeightsLoader()
STORAGE = MemoryStorage({"a.weight": torch.ones(64, 128)})
WEIGHTS = qload.Weights(STORAGE, loader=PLAIN)
FILES = qload.SafetensorsStorage(MODEL)
NAME = min(FILES.keys())
INT4 = qload.Packing(4, "(kp i) n -> kp n (i)", i=8)
FACTS = qload.ExpertFacts(GatedActivation("silu"))
EXPERTS = qload.Weights(
    MemoryStorage({f"e.0.{name}.weight": torch.ones(4, 4) for name in ("w1", "w2", "w3")}), loader=PLAIN
)
WHOLE = ("gate_up", "down", "facts", "local")
STACK = EXPERTS.get_experts("e", facts=FACTS).down
LAYER_CONFIG = qload.MPLinearLayerConfig(
    (128, 64), (128, 64), qload.scalar_types.uint4b8, torch.float16, 32, False
)
WORDS = {"w_q_param_name": "qweight", "w_s_param_name": "scales"}

# Mandatory arguments of a call; callables without mandatory arguments are absent.
NEEDED: dict[str, dict[str, Any]] = {
    "ActivationScheme": {"type": "int", "bits": 8, "dynamic": True},
    "AWQConfig": {"group_size": 32},
    "AWQWeightsLoader": {"group_size": 32},
    "BNB4Config": {"quant_type": "nf4"},
    "CTPackConfig": {"bits": 4, "group_size": 32},
    "DequantizeLinearKernel": {"c": LAYER_CONFIG, **WORDS},
    "ExllamaConfig": {"bits": 4},
    "ExpertFacts": {"activation": FACTS.activation},
    "ExpertsWeight": {name: getattr(EXPERTS.get_experts("e", facts=FACTS), name) for name in WHOLE},
    "ExllamaLinearKernel": {"c": LAYER_CONFIG, **WORDS},
    "FakeWorld": {"world": 2},
    "Fp4MarlinConfig": {"group_size": 16},
    "Fp4MarlinVllm033Config": {"group_size": 16},
    "GatedActivation": {"kind": "silu"},
    "Fp8MarlinConfig": {"group_size": -1, "exponent_bias": True},
    "GPTQConfig": {"bits": 4, "group_size": 32},
    "GPTQMarlinConfig": {"bits": 4, "group_size": 32},
    "GPTQMarlinWeightsLoader": {"inner": PLAIN},
    "GPTQWeightsLoader": {"bits": 4, "group_size": 32},
    "Load": {"prefixes": "layer"},
    "LocalExperts": {"start": 0, "stop": 1, "total": 2},
    "KernelTarget": {"kernel": "exllama"},
    "Layer": {"parts": (64,), "K": 128, "whole": (64, 128)},
    "Linear": {"weight": WEIGHT},
    "Marlin24Config": {"group_size": 128},
    "MarlinConfig": {"group_size": 128},
    "MarlinLinearKernel": {"c": LAYER_CONFIG, **WORDS},
    "MarlinWeightsLoader": {"group_size": 128},
    "MemoryStorage": {"tensors": {}},
    "ModuleLoader": {"choices": [], "default": PLAIN},
    "Order": {"pattern": "a b -> b a"},
    "Packing": {"bits": 4, "pattern": "(kp i) n -> kp n (i)", "i": 8},
    "QuantizingLoader": {"inner": PLAIN, "quantizer": qload.Fp8Quantizer()},
    "RepackingLoader": {"inner": PLAIN, "layout": "marlin"},
    "Routing": {"method": "softmax_top_k", "experts": 4, "top_k": 2},
    "SafetensorsStorage": {"path": MODEL},
    "Stack": {name: getattr(STACK, name) for name in ("weight_type", "config", "layer", "names", "tensors")},
    "StripsLinearKernel": {"c": LAYER_CONFIG, **WORDS},
    "UnquantizedWeight": {"config": qload.UnquantizedConfig(), "weight": torch.ones(64, 128)},
    "Weights": {"storage": STORAGE, "loader": PLAIN},
    "architecture_of": {"config": {}},
    "choose_mp_linear_kernel": {"config": LAYER_CONFIG},
    "inspect": {"path": MODEL},
    "layers": {"path_or_weights": MODEL},
    "loader_from_config": {"quantization_config": None},
    "maximum_over": {"process_group": next(iter(qload.FakeWorld(1)))},
    "open_checkpoint": {"path": MODEL},
    "repack": {"weight": WEIGHT, "layout": "marlin"},
    "restore": {"weight": WEIGHT},
    "routing_of": {"config": {"model_type": "mixtral"}},
    "verify": {"path": MODEL},
    "copy_into": {"linear": WEIGHT.get_linear(), "weight": WEIGHT},
    "warm_up": {"model": torch.nn.Linear(1, 1), "max_input_len": 1},
}
NEEDED["GPTQWeight"] = {"config": WEIGHT.config, **WEIGHT.fields()}
METHODS: dict[Callable[..., Any], dict[str, Any]] = {
    WEIGHTS.get_weights: {"prefix": "a"},
    WEIGHTS.get_weights_col: {"prefix": "a"},
    WEIGHTS.get_weights_row: {"prefix": "a"},
    WEIGHTS.get_weights_col_packed: {"prefix": "a", "block_sizes": 2},
    WEIGHTS.get_weights_col_packed_qkv: {"prefix": "a", "num_heads": 2, "num_key_value_heads": 1},
    WEIGHTS.get_weights_col_packed_gate_up: {"prefix": "a"},
    WEIGHTS.get_multi_weights_col: {"prefixes": ["a"]},
    EXPERTS.get_experts: {"prefix": "e", "facts": FACTS},
    STACK.expert: {"index": 0},
    STACK.to: {"device": "cpu"},
    WEIGHTS.has_tensor: {"name": "a.weight"},
    WEIGHTS.get_shape: {"name": "a.weight"},
    WEIGHTS.get_tensor: {"name": "a.weight"},
    WEIGHTS.get_sharded: {"name": "a.weight", "dim": 0},
    WEIGHTS.get_partial_sharded: {"name": "a.weight", "dim": 0},
    WEIGHTS.get_packed_sharded: {"name": "a.weight", "dim": 0, "block_sizes": 2},
    WEIGHTS.info: {"name": "a.weight"},
    WEIGHTS.read: {"name": "a.weight"},
    PLAIN.get_weights: {"weights": WEIGHTS, "prefix": "a"},
    PLAIN.get_multi_weights_col: {"weights": WEIGHTS, "prefixes": ["a"]},
    PLAIN.shape: {"weights": WEIGHTS, "prefix": "a"},
    PLAIN.describe: {"weights": WEIGHTS, "prefix": "a"},
    STORAGE.info: {"name": "a.weight"},
    STORAGE.read: {"name": "a.weight"},
    WEIGHT.dequantize: {},
    WEIGHT.to: {"device": "cpu"},
    WEIGHT.get_linear: {},
    WEIGHT.get_linear().forward: {"x": torch.ones(1, WEIGHT.layer.K, dtype=torch.float16)},
    EXPERTS.get_experts("e", facts=FACTS).get_linear().forward: {
        "x": torch.ones(1, 4),
        "topk_ids": torch.zeros(1, 1, dtype=torch.int32),
        "topk_weights": torch.ones(1, 1),
    },
    diagnose: {"expected": torch.ones(2, 2), "got": torch.ones(2, 2)},
    requantize: {
        "weight": qload.Fp8Weight(
            weight=torch.ones(4, 4).to(torch.float8_e4m3fn),
            weight_scale=torch.ones(1),
            config=qload.Fp8Config("tensor"),
        )
    },
    INT4.pack: {"codes": torch.zeros(8, 1, dtype=torch.int32)},
    INT4.unpack: {"words": torch.zeros(1, 1, dtype=torch.int32)},
    INT4.packed: {"words": torch.zeros(1, 1, dtype=torch.int32)},
    qload.Order("a b -> b a").apply: {"tensor": torch.ones(2, 3)},
    qload.Order("a b -> b a").undo: {"tensor": torch.ones(2, 3)},
    qload.Stored().read: {"words": torch.zeros(1, 1, dtype=torch.int32), "packing": INT4},
    qload.StoredMinusOne().write: {"zeros": torch.ones(8, 1, dtype=torch.int32), "packing": INT4},
}

# Results of qload, classes with a later check, and values that cannot be called.
EXEMPT = {
    "MPLinearLayerConfig": "a kernel says why it cannot run a layer so described, as engines ask",
    "TensorSpec": "a declaration, which tests read once and loading makes for every layer",
    "Codes": "made by weights on every dequantize",
    "ScalarType": "the engines' own, as scalar_types has them",
    "Role": "an enumeration",
    "scalar_types": "a list of constants",
    **dict.fromkeys(["Finding", "Report", "LoadReport", "TensorInfo"], "a result, read and not made"),
    "LayerInfo": "a result, read and not made",
    **dict.fromkeys(
        ["Alternative", "LayerShare", "PlannedLayer", "ShardingPlan", "WorldPlan"], "a result, too"
    ),
    **dict.fromkeys(["ExplainedLayer", "Explanation", "KernelChoice"], "a result, too"),
    **dict.fromkeys(["CheckpointDiff", "Conversion", "ConvertedLayer", "LayerDiff"], "a result, too"),
    **dict.fromkeys(["ShardedCheckpoint", "ShardedLayer"], "a result, too"),
    "Architecture": "what a config tells, as architecture_of makes it",
    **dict.fromkeys(["ProcessGroup", "WeightStorage"], "a protocol"),
    **dict.fromkeys(["MPLinearKernel", "Weight", "WeightsLoader", "ZeroPoints"], "abstract"),
}


SAID_AS = {"kernel": "target"}  # the name of the argument in the error, after conversion to a KernelTarget


class Stranger:
    """Type outside every annotation."""


WRONG: dict[str, Any] = {
    "Stranger": Stranger(),
    r"\bstr\b|Literal|PathLike|Mapping\[str, Any\]": "\0 no such thing",
    r"\bint\b|float|complex": 3,
    r"\bfloat\b": 2.5,
    r"None|Optional": None,
    r"\bbool\b": True,
    r"Sequence|Iterable|tuple|list|PathLikes": [Stranger()],
    r"Mapping|dict|Iterable": {1: Stranger()},
    r"type\[|Callable": Stranger,
}
ELEMENTS: dict[str, Any] = {  # by the container of an annotation, one with a wrong element
    r"\btuple\[": (Stranger(),),
    r"\b(Sequence|list)\[": [Stranger()],  # an iterable is not used up by a check
    r"\b(Mapping|dict)\[": {"name": Stranger()},
}


def wrong_values(annotation: str) -> Iterator[Any]:
    """Yield one value of each type outside the annotation, and containers with a wrong element."""
    yield from (value for spoken, value in WRONG.items() if not re.search(spoken, annotation))
    if "Any" not in annotation:
        yield from (value for spoken, value in ELEMENTS.items() if re.search(spoken, annotation))


def public() -> Iterator[Any]:
    """Yield every callable of qload and some methods of its objects, with mandatory arguments and an id."""
    for name in PUBLIC:
        value = getattr(qload, name)
        if name not in EXEMPT and not (inspect.isclass(value) and issubclass(value, QloadError)):
            yield pytest.param(value, NEEDED.get(name) or of_weight(value), id=name)
    for method, needed in METHODS.items():
        yield pytest.param(method, needed, id=method.__qualname__)


def of_weight(value: Any) -> dict[str, Any]:
    """Return a config and tensors of a wrong shape for a type of weight: type checks precede shape checks."""
    if not (inspect.isclass(value) and issubclass(value, qload.Weight)):
        return {}
    wanted = [field for field in fields(value) if field.default is MISSING and field.name != "config"]
    return {"config": value.example, **{field.name: torch.ones(1) for field in wanted}}


def calls(function: Callable[..., Any], needed: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the wrong argument, and all arguments."""
    for name, parameter in parameters(function).items():
        text = inspect.formatannotation(parameter.annotation)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or text.endswith("Any"):
            continue
        yield from ((name, {**needed, name: value}) for value in wrong_values(text))


@pytest.mark.parametrize(("function", "needed"), list(public()))
def test_an_argument_of_another_type_is_refused(function: Any, needed: dict[str, Any]) -> None:
    wrong = []
    for name, arguments in calls(function, needed):
        try:
            function(**arguments)
            outcome = "nothing was raised"
        except ArgumentError as error:
            outcome = "" if SAID_AS.get(name, name) in error.argument else f"it says {error.argument}"
        except QloadError:
            outcome = ""
        except Exception as error:
            outcome = repr(error)
        if outcome:
            wrong.append(f"{name} = {arguments[name]!r:.60}: {outcome:.120}")

    assert wrong == []


@pytest.mark.parametrize(
    ("function", "needed"),
    [(getattr(qload, name), needed) for name, needed in NEEDED.items()] + list(METHODS.items()),
    ids=[*NEEDED, *(method.__qualname__ for method in METHODS)],
)
def test_the_arguments_beside_the_wrong_one_are_good(function: Any, needed: dict[str, Any]) -> None:
    function(**needed)


# Class -> methods with a check of all argument types before any other work.
CHECKED = {
    "AWQWeightsLoader": "__init__",
    "ExpertsWeight": "expert dequantize to repack",
    "FormatLoader": "__init__ load",
    "GPTQMarlinWeightsLoader": "__init__",
    "GPTQWeightsLoader": "__init__",
    "Linear": "__init__",
    "MPLinearKernel": "__init__",
    "MarlinWeightsLoader": "__init__",
    "MemoryStorage": "__init__ read read_into",
    "ModuleLoader": "__init__ chosen",
    "Order": "apply",
    "Packing": "pack",
    "RepackingLoader": "__init__",
    "SafetensorsStorage": "read_bytes_into read_into",
    "Stack": "expert to",
    "Routing": "logits route",
    "Stored": "write",
    "StoredMinusOne": "write",
    "StoredMinusOnePerField": "write",
    "StoredMinusOneUnmasked": "write",
    "Weight": "to get_linear",
    "Weights": """
        get_weights get_weights_col get_weights_col_packed get_weights_col_packed_qkv
        get_weights_col_packed_gate_up get_partial_weights_col get_multi_weights_col get_weights_row
        get_experts get_tensor get_sharded get_partial_sharded get_packed_sharded note exempt exempt_by
    """,
    "WeightsLoader": """
        get_weights get_weights_col get_weights_row get_multi_weights_col get_weights_col_packed
    """,
}
FUNCTIONS = (
    "architecture_of",
    "copy_into",
    "inspect",
    "layers",
    "open_checkpoint",
    "repack",
    "restore",
    "routing_of",
    "verify",
)


def test_who_checks_what_it_is_called_with() -> None:
    methods = [getattr(getattr(qload, owner), name) for owner in CHECKED for name in CHECKED[owner].split()]
    functions = [getattr(qload, name) for name in FUNCTIONS]
    guard = checked(abs).__code__

    assert [each.__qualname__ for each in (*methods, *functions) if each.__code__ is not guard] == []


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: PLAIN.shape(WEIGHTS, 3), id="prefix of shape"),
        pytest.param(lambda: PLAIN.shape({}, "a"), id="weights of shape"),
        pytest.param(lambda: PLAIN.describe(WEIGHTS, None), id="prefix of describe"),
        pytest.param(lambda: PLAIN.describe(STORAGE, "a"), id="weights of describe"),
        pytest.param(lambda: WEIGHTS.read(3), id="name of read"),
        pytest.param(lambda: WEIGHTS.read("a.weight", [slice(0, 1)]), id="index of read"),
        pytest.param(lambda: WEIGHTS.read("a.weight", (0,)), id="item of an index of read"),
        pytest.param(lambda: WEIGHTS.read("a.weight", role="word"), id="role of read"),
        pytest.param(lambda: qload.SafetensorsStorage(3), id="path of files"),
        pytest.param(lambda: qload.SafetensorsStorage(MODEL, headers=3), id="headers of files"),
        pytest.param(lambda: FILES.read(3), id="name of read from files"),
        pytest.param(lambda: FILES.read(NAME, [slice(0, 1)]), id="index of read from files"),
        pytest.param(lambda: FILES.read(NAME, (0,)), id="item of an index of read from files"),
        pytest.param(lambda: WEIGHTS.take("a.weight"), id="names of take"),
        pytest.param(lambda: WEIGHTS.take([3]), id="item of names of take"),
    ],
)
def test_a_check_inside_of_a_function_refuses_other_types(call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError):
        call()


def test_every_public_name_is_called_or_exempt_with_a_reason() -> None:
    assert set(NEEDED) | set(EXEMPT) <= set(PUBLIC)
    assert all(EXEMPT.values())
