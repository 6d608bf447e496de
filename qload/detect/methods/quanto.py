"""quanto: types of weights by `quanto_qmap.json`, by `quant_method: quanto`, or by the tensors alone.

    {"model.layers.0.mlp.up_proj": {"weights": "qint4", "activations": "none"}, ...}     quanto_qmap.json
    {"quant_method": "quanto", "weights": "int4", "modules_to_not_convert": [...]}       config.json

    qint8                                  int-quantized of compressed-tensors, one scale per output
    qfloat8 (e4m3fn, e4m3fnuz, e5m2)       fp8, one scale per output
    qint4, qint2                           quanto

A layer of one output has a scale of shape () in the types of 8 bits.

Sizes of qint4 and qint2 layers follow from the model's config. `input_scale` and `output_scale` are 1 where
inputs are not quantized; quantized inputs get a note, and linears do not quantize them. Source:
optimum-quanto 0.2.7 and transformers 5.23.0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from qload import configs, dtypes
from qload.architecture import architecture_of
from qload.errors import UnsupportedFormatError
from qload.formats import CTIntConfig, CTIntWeight, Fp8Config, Fp8Weight, QuantoConfig, QuantoWeight
from qload.formats.quanto import DATA, SCALE
from qload.loader import ConfiguredFormat
from qload.spec import LayerClaims
from qload.storage import WeightStorage

METHOD = "quanto"
VARIANTS = ("quanto (qint8, qint4, qint2, qfloat8)",)
BYTES = "weight._data"
NAMES = (("weight", BYTES), ("weight_scale", SCALE))
INPUT_SCALES = ("input_scale", "output_scale")
PLAIN = "none"
BYTE_BITS = 8
BITS: Mapping[str, int] = {  # of the types of weights
    "qint8": BYTE_BITS,
    "qint4": 4,
    "qint2": 2,
    **dict.fromkeys(("qfloat8", "qfloat8_e4m3fn", "qfloat8_e4m3fnuz", "qfloat8_e5m2"), BYTE_BITS),
}
INT8 = ConfiguredFormat(CTIntWeight, CTIntConfig((1, -1)), claims=LayerClaims(BYTE_BITS), stored=NAMES)
FLOAT8 = ConfiguredFormat(Fp8Weight, Fp8Config(), claims=LayerClaims(BYTE_BITS), stored=NAMES)

INPUT_TYPES = tuple(name for name, bits in BITS.items() if bits == BYTE_BITS)


class _Module(configs.Entry):
    weights: Annotated[str, configs.one_of(PLAIN, *BITS)]
    activations: Annotated[str, configs.one_of(PLAIN, *INPUT_TYPES)] = PLAIN


class _Section(configs.Section):
    weights: Literal["int8", "float8", "int4", "int2"] = "int8"
    activations: Literal["int8", "float8"] | None = None
    modules: dict[str, _Module] | None = None


def read_quanto(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of a map of modules, of a config with one type, or of neither (`found_config`)."""
    section = configs.validate(_Section, source)
    if section.modules is None:
        name, exclusions = f"q{section.weights}", section.exclusions()
        inputs = [section.activations] if section.activations else []
        return section.claims(
            source, METHOD, name, _format(name), bits=BITS[name], exclusions=exclusions,
            notes=tuple(_notes(source, inputs)), settings=INPUT_SCALES,
        )  # fmt: skip
    if not section.modules:
        return section.claims(source, METHOD, METHOD, INT8, FLOAT8, _format(""), settings=INPUT_SCALES)
    names: dict[str, set[str]] = {}
    for module, entry in section.modules.items():
        if entry.weights != PLAIN:
            names.setdefault(entry.weights, set()).add(module)
    rules = [
        configs.ModuleRule((_format(name),), frozenset(listed).__contains__) for name, listed in names.items()
    ]
    bits = {BITS[name] for name in names}
    return section.claims(
        source,
        METHOD,
        next(iter(names)) if len(names) == 1 else METHOD,
        *dict.fromkeys(map(_format, names)),
        bits=bits.pop() if len(bits) == 1 else None,
        rules=(*rules, configs.ModuleRule(())),
        notes=tuple(_notes(source, [entry.activations for entry in section.modules.values()])),
        settings=INPUT_SCALES,
    )


def found_config(storage: WeightStorage, model: Mapping[str, Any]) -> configs.FoundConfig | None:
    """Config of a checkpoint without one, whose tensors have names of quanto alone; None for any other."""
    endings = (f".{BYTES}", f".{DATA}")
    name = next((name for name in storage.keys() if name.endswith(endings)), None)  # noqa: SIM118
    if name is None:
        return None
    values = {"quant_method": METHOD, "modules": {}}
    return configs.FoundConfig(storage.info(name).file or "tensors", "", values, model)


def with_sizes(claims: configs.Claims, source: configs.FoundConfig, storage: WeightStorage) -> configs.Claims:
    """Add the sizes of stored qint4 and qint2 layers, by the model's config, to the claims."""
    model = architecture_of(source.model)
    rules = claims.rules or (configs.ModuleRule(claims.formats, exclusions=claims.exclusions),)
    names: dict[tuple[int, int, int], set[str]] = {}
    for name in storage.keys():  # noqa: SIM118
        module = name.removesuffix(f".{DATA}")
        shape = model.expected(module) if model and module != name else None
        if shape is not None:
            rule = next(at for at, rule in enumerate(rules) if rule.selects(module))
            N, K = shape
            padded = bool(model and model.paddings(module))
            names.setdefault((rule, 0 if padded else N, K), set()).add(module)
    stated = tuple(
        replace(
            rules[at], formats=_with_sizes(rules[at].formats, N, K), selects=frozenset(listed).__contains__
        )
        for (at, N, K), listed in names.items()
    )
    return replace(claims, rules=(*stated, *rules)) if stated else claims


def _with_sizes(
    formats: tuple[ConfiguredFormat, ...] | UnsupportedFormatError, N: int, K: int
) -> tuple[ConfiguredFormat, ...] | UnsupportedFormatError:
    if isinstance(formats, UnsupportedFormatError):
        return formats
    return tuple(
        replace(fmt, config=replace(fmt.config, N=N, K=K)) if isinstance(fmt.config, QuantoConfig) else fmt
        for fmt in formats
    )


def _format(name: str) -> ConfiguredFormat:
    """Format of a type of weights; "": of 2 or 4 bits, by the shapes."""
    bits = BITS.get(name, 0)
    if bits == BYTE_BITS:
        dtype = dtypes.BY_NAME.get(name[1:], dtypes.float8_e4m3fn)
        return INT8 if name == "qint8" else replace(FLOAT8, config=Fp8Config(dtype=dtype))
    return ConfiguredFormat(QuantoWeight, QuantoConfig(bits), claims=LayerClaims(bits or None))


def _notes(source: configs.FoundConfig, inputs: Sequence[str]) -> Iterator[str]:
    """Yield a note if inputs are quantized."""
    stated = [kind for kind in inputs if kind != PLAIN]
    if stated:
        yield f"{source.file} quantizes inputs to {stated[0]}; linears of qload take them as they are"


METHODS = (
    configs.Method(
        names=(METHOD,),
        read=read_quanto,
        formats=(CTIntWeight, Fp8Weight, QuantoWeight),
        variants=VARIANTS,
        complete=with_sizes,
    ),
)
