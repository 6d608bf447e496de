"""`convert`: write a checkpoint in another format and verify it by reading the output back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal

from qload.architecture.published_names import PREDICTORS, PUBLISHED, published_names, transformers_name
from qload.checkpoint.report_base import INTERNAL
from qload.configs import value_text
from qload.configs.matching import EMBEDDINGS, HEAD
from qload.conversion import float4, fp8
from qload.conversion.gguf import NO_TOKENIZER, GGUFModel, plan_model
from qload.conversion.new_checkpoint import (
    SHARD_SIZE_BYTES,
    NewCheckpoint,
    config_files,
    copied_files,
    format_of,
    json_bytes,
    no_progress,
    nonfinite_layers,
    output_path,
    report_on,
    source_folder,
)
from qload.conversion.output_files import (
    INDEX,
    STACKED,
    OutputFile,
    OutputItem,
    Progress,
    items_in_source_order,
    rename_tensors,
    safetensors_index,
    split_into_files,
    stored_tensors,
    tensor_names,
)
from qload.conversion.quantization_config import WrittenConfig, quantization_config
from qload.conversion.report import Conversion, ConvertedLayer
from qload.conversion.stacked_experts import NOT_STACKED, experts_items, shared_sources
from qload.conversion.targets import (
    FLOATS,
    GGUF,
    OLDER_NAMES,
    TARGETS,
    ConversionRequest,
    OutputLayer,
    OutputLayers,
    StoredLayers,
)
from qload.detect.config_reader import CONFIGS
from qload.diff import LayerDiff, diff
from qload.errors import ArgumentError, RepackError, checked
from qload.errors.reporting import cause_of, group_by_cause
from qload.errors.rules import rule_pages
from qload.formats import GPTQConfig, MXFP4ExpertsWeight
from qload.loader import LayerDescription
from qload.loader.layer_values import check_nonfinite
from qload.loader.source import Nonfinite
from qload.parallel import ProcessGroup
from qload.spec import Role
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding
from qload.verify.verification import header_errors
from qload.verify.workers import ByteProgress, Workers

COMPRESSED_TENSORS = "compressed-tensors"
CACHE_SCHEME = "kv_cache_scheme"
FALLBACK_TARGET = "float32"  # can represent every layer of a readable format
ROUNDING_REMEDY = "round the values by rounding=True (--round)"
KEEP_REMEDY = "leave it unchanged by keep (--keep)"
TRANSFORMERS = "transformers"
KEPT_IN_GGUF = "it is kept unchanged, and a GGUF file has quantized layers in blocks of ggml alone"


@dataclass(frozen=True)
class ConversionPlan:
    """Output of a conversion, before any byte is written.

    `layers` are the converted layers by prefix, `refused` the reasons of refusals by prefix, and `gguf` is
    the model of a GGUF file. `config` None: the configs of the source stay.
    """

    items: Sequence[OutputItem]
    layers: OutputLayers
    config: WrittenConfig | None
    refused: Mapping[str, str]
    notes: Sequence[str]
    gguf: GGUFModel | None = None


@checked
def convert(
    path: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    to: str | None = None,
    names: Literal["transformers"] | None = None,
    keep: Sequence[str] = (),
    rounding: bool = False,
    accept: Sequence[str] = (),
    shard_size: int = SHARD_SIZE_BYTES,
    nonfinite: Nonfinite = "error",
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
) -> Conversion:
    """Write a checkpoint in another format, with the same weights bit for bit, and its config and side files.

    The header tier of `verify` runs first, and an error in it refuses the checkpoint. Next, every layer is
    checked against the target; if one cannot be represented, nothing is written. The output is then read back
    through its own config and compared with the source, layer by layer, and only after that the folder gets
    its name. An interrupted run resumes at the first missing file. Plain layers are copied unless the target
    is "fp8"; `convert` never quantizes. UnreadTensorsError for a tensor that no format reads; it is never
    copied.

    Parameters
    ----------
    path
        Safetensors files, a directory, or a sharded index.
    folder
        The output folder; ArgumentError if it has contents, or if the disk has too little space.
    to
        "gptq" (zero points stored minus one), "gptq_v2", "awq", "marlin_checkpoint", "marlin_24",
        "compressed-tensors" (pack-quantized), "quark"; "fp8" (FP8 of any dialect, and other weights with an
        exact FP8 form, as float-quantized of compressed-tensors); "mxfp4", "mxfp4_mlx", "mxfp4_quark",
        "mxfp4_deepseek", "mxfp4_gpt_oss", "nvfp4", "nvfp4_mlx", "nvfp4_modelopt" (four-bit floats of
        compressed-tensors and of other programs); "gguf" (a GGUF file in MXFP4, NVFP4, Q4_0 or Q8_0, for
        Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3 MoE and gpt-oss, without a tokenizer);
        or "float32", "float16", "bfloat16" (dequantized).
        "marlin" is the older name of "marlin_checkpoint"; the kernel order of Marlin is no file format.
        None: formats and configs stay, and `names` is required.
    names
        "transformers": the names of transformers' class, for DeepSeek V4 as published. None: names stay.
        ArgumentError for other types of model, and for "gguf".
    keep
        Shell patterns for the names of layers that stay unchanged.
    rounding
        Permits one rounding to float16 or bfloat16, and of -0 to 0 for "gguf"; without it a value that the
        type cannot hold is refused.
    accept
        Ids of rules of the header tier whose errors become notes. ArgumentError for an unknown id.
    shard_size
        Maximum size of an output file in bytes; a larger layer has its own file.
    nonfinite
        "error": a layer with a scale that is NaN or infinite is refused. "allow": such scales are converted
        as stored, with a note.
    progress
        Receives the stage, the finished bytes of the stage, and its total.
    process_group
        A group of torch.distributed. All its processes call `convert` with the same arguments, see the same
        files, share the work, and return the same report.

    Examples
    --------
    >>> import os, tempfile
    >>> from qload import convert
    >>> from qload.testing import make_checkpoint
    >>> folder = tempfile.TemporaryDirectory()
    >>> one, other = os.path.join(folder.name, "gptq"), os.path.join(folder.name, "awq")
    >>> stored = make_checkpoint("gptq", one)
    >>> found = convert(one, other, to="awq")
    >>> found.verdict, set(found.counts), sorted(os.listdir(other))
    ('ok', {'bits'}, ['config.json', 'model.safetensors', 'qload-certificate.json'])
    >>> folder.cleanup()
    """
    target_format = "" if to is None and names else OLDER_NAMES.get(str(to), str(to))
    if target_format and target_format not in TARGETS:
        raise ArgumentError("to", f"one of {', '.join(TARGETS)}", f"{to!r:.80}")
    if names not in (None, TRANSFORMERS) or (names and target_format == GGUF):
        raise ArgumentError("names", f"{TRANSFORMERS!r}, and another target than {GGUF}", f"{names!r:.80}")
    check_nonfinite(nonfinite)
    unknown = [rule for rule in accept if rule not in rule_pages()]
    if unknown:
        raise ArgumentError("accept", "ids of rules, as in findings", f"{unknown[0]!r:.80}")
    target, report_progress = output_path(folder, shard_size), progress or no_progress
    workers = Workers.of(process_group)

    def convert_source(source: VerifiedCheckpoint) -> Conversion:
        if names and not published_names(source.model_config):
            kind = value_text(source.model_config.get("model_type"))
            raise ArgumentError("names", f"a model of the type {', '.join(PUBLISHED)}", kind)
        errors = header_errors(source, workers, report_progress)
        refusing = [error for error in errors if error.rule not in (*accept, INTERNAL)]
        if refusing:
            return Conversion(source.path, to=target_format, findings=refusing)
        request = ConversionRequest(source, target_format, rounding, workers, bool(names))
        if target_format:
            plan = plan_conversion(request, keep, partial(report_progress, "checking layers"), nonfinite)
        else:
            plan = plan_renaming(request, nonfinite)
        plan = replace(plan, notes=[*_accepted_errors(errors), *plan.notes])
        if plan.refused:
            layers = [
                ConvertedLayer(prefix, format_of(source.layers.get(prefix)), None, "refused", reason)
                for prefix, reason in sorted(plan.refused.items())
            ]
            return Conversion(source.path, to=target_format, layers=layers, notes=plan.notes)
        return _write_and_verify(request, plan, target, shard_size, report_progress)

    return report_on(path, convert_source, partial(Conversion, to=target_format))


def _accepted_errors(errors: Sequence[Finding]) -> Iterator[str]:
    """Yield a note for each cause of accepted errors."""
    causes: dict[str, list[Finding]] = {}
    for finding in errors:
        causes.setdefault(finding.cause, []).append(finding)
    for first, *others in causes.values():
        more = f" ({len(others)} more of this cause)" if others else ""
        yield f"error of the rule {first.rule}, not refused: {' '.join(first.message.split())}{more}"


def plan_conversion(
    request: ConversionRequest, keep: Sequence[str], progress: ByteProgress, nonfinite: Nonfinite
) -> ConversionPlan:
    """Plan the output of every layer; codes are read only for targets that depend on them.

    ArgumentError if no layer would change, or if a pattern of `keep` matches no layer.
    """
    source = request.source
    quantized = {
        prefix: layer
        for prefix, layer in source.layers.items()
        if not (isinstance(layer, LayerDescription) and layer.format.weight_type.plain)
    }
    kept = _kept_layers(source, quantized, keep)
    requested = {prefix: layer for prefix, layer in quantized.items() if prefix not in kept}
    if request.to == fp8.NAME and not quantized:
        requested = dict(_plain_matrices(source, keep))
    results = dict(zip(requested, request.convert_layers(list(requested.values()), progress), strict=True))
    layers = {prefix: result for prefix, result in results.items() if not isinstance(result, str)}
    refused = {prefix: result for prefix, result in results.items() if isinstance(result, str)}
    if not results:
        expected = "a checkpoint with quantized layers to convert"
        raise ArgumentError("path", expected, "only plain or kept layers")
    refused |= {
        prefix: " ".join(str(layer.contradiction).split())
        for prefix, layer in quantized.items()
        if isinstance(layer, LayerDescription) and layer.contradiction is not None
    }
    spoiled, allowed = nonfinite_layers(source, nonfinite)
    refused |= spoiled
    model, items, config = None, list[OutputItem](), WrittenConfig(None)
    if request.to == GGUF:
        refused |= dict.fromkeys(kept, KEPT_IN_GGUF)
        model = None if refused else _gguf_model(source, layers, refused)
    else:
        items = _output_items(source, layers, refused)
        config = _config_of(request, [*layers.values(), *kept.values()])
    refused = {**config.refused, **refused}
    by_target = {prefix: reason for prefix, reason in refused.items() if prefix not in spoiled}
    notes = [*allowed, *_notes(source, layers, request.to), *_remedies(request, requested, by_target)]
    plan = ConversionPlan(items, layers, config, refused, notes, model)
    return _rename_plan(request, plan) if request.renames else plan


def plan_renaming(request: ConversionRequest, nonfinite: Nonfinite) -> ConversionPlan:
    """Plan copies of all tensors under other names; ArgumentError for a config that names modules."""
    source = request.source
    for config in source.configs:
        listed = next((key for key, value in config.values.items() if _names_modules(value)), None)
        if listed is not None:
            expected = "a config that names no modules, or a target format (to)"
            raise ArgumentError("names", expected, f"{config.key(listed)} in {config.file}")
    refused, notes = nonfinite_layers(source, nonfinite)
    items = list(items_in_source_order(stored_tensors(source), {}, {}))
    return _rename_plan(request, ConversionPlan(items, {}, None, refused, notes))


def _names_modules(value: object) -> bool:
    """Return whether a value of a config may contain names of modules."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, str) for v in value))


def _rename_plan(request: ConversionRequest, plan: ConversionPlan) -> ConversionPlan:
    """Return the plan with the names of transformers, and refusals of tensors without one."""
    model = request.source.model_config
    refused, items, owners = dict(plan.refused), list[OutputItem](), dict[str, str]()
    for item in plan.items:
        names = {name: request.output_name(name) for name in item.tensors}
        for name, new in names.items():
            if transformers_name(model, name) is None:
                reason = f"transformers has no name for {name} in a model of the type {model['model_type']}"
                refused[name] = reason
            elif (other := owners.setdefault(new, name)) != name:
                refused[name] = f"its name in transformers is {new}, as that of {other}"
        items.append(rename_tensors(item, names))
    if not request.to and all(name == new for new, name in owners.items()):
        expected = "tensors with other names than in transformers"
        raise ArgumentError("names", expected, "only tensors with its names")
    predictors = sum(name.startswith(PREDICTORS) for name in owners)
    notes = [f"{predictors} tensors of {PREDICTORS}* keep their names; transformers ignores them"]
    return replace(plan, items=items, refused=refused, notes=[*plan.notes, *notes[: bool(predictors)]])


def _gguf_model(
    source: VerifiedCheckpoint, layers: OutputLayers, refused: dict[str, str]
) -> GGUFModel | None:
    """Return the GGUF model, or None with the reason in `refused`: of one tensor, or of all layers."""
    left_out = {
        *source.loader.config_tensors,
        *_unused_tensors(source),
        *source.account.report.exempted,
    }
    try:
        return plan_model(source, layers, left_out)
    except RepackError as error:
        names = [error.source] if error.source else list(layers)
        refused |= dict.fromkeys(names, error.reason)
        return None


def _remedies(request: ConversionRequest, layers: StoredLayers, refused: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each cause of refusals: other targets for its first refused layer, and options."""
    groups = group_by_cause(refused, name=str, cause=lambda prefix: cause_of(refused[prefix], prefix))
    for group in groups:
        layer = layers.get(group.first)
        if isinstance(layer, LayerDescription) and layer.contradiction is None:
            rest = group.count - 1
            more = f" and {rest} layer{'s' * (rest > 1)} like it" if rest else ""
            integers = () if request.to in FLOATS else request.other_integer_formats(layer).items()
            targets = [name for name, other in integers if not _config_of(request, [other]).refused]
            plain = request.why_not_plain(layer) is None
            if request.to != FALLBACK_TARGET and plain:
                targets.append(FALLBACK_TARGET)
            remedies = [f"write {' or '.join(targets)} instead"] if targets else []
            remedies += [ROUNDING_REMEDY] if request.can_round and plain else []
            text = f"{', '.join(remedies)}, or {KEEP_REMEDY}" if remedies else KEEP_REMEDY
            if request.to == GGUF:
                text = ", ".join(remedies)
            yield f"{group.first}{more}: {text}"


def _plain_matrices(
    source: VerifiedCheckpoint, keep: Sequence[str]
) -> Iterator[tuple[str, LayerDescription]]:
    """Yield the matrices of a plain checkpoint to convert: no embedding, no output head, none in `keep`."""
    for prefix, layer in source.layers.items():
        excluded = prefix.rpartition(".")[2] in (*EMBEDDINGS, HEAD) or _is_kept(prefix, keep)
        if isinstance(layer, LayerDescription) and "K" in layer.sizes and not excluded:
            yield prefix, layer


def _is_kept(prefix: str, keep: Sequence[str]) -> bool:
    return any(fnmatchcase(prefix, pattern) for pattern in keep)


def _kept_layers(
    source: VerifiedCheckpoint, quantized: StoredLayers, keep: Sequence[str]
) -> dict[str, OutputLayer]:
    """Return the quantized layers that patterns of `keep` leave unchanged."""
    for pattern in keep:
        if not any(fnmatchcase(prefix, pattern) for prefix in source.layers):
            expected = "patterns of layer names, such as *.q_proj"
            raise ArgumentError("keep", expected, f"{pattern!r:.80} without a match")
    return {
        prefix: _unchanged(layer)
        for prefix, layer in quantized.items()
        if isinstance(layer, LayerDescription) and _is_kept(prefix, keep)
    }


def _unchanged(layer: LayerDescription) -> OutputLayer:
    config = layer.format.config
    act_order = isinstance(config, GPTQConfig) and not config.positional and config.groups(layer.K) > 1
    symmetric = bool(layer.format.claims and layer.format.claims.sym)
    return OutputLayer(layer.prefix, layer.format.weight_type, config, layer.K, symmetric, act_order)


def _output_items(
    source: VerifiedCheckpoint, layers: OutputLayers, refused: dict[str, str]
) -> list[OutputItem]:
    """Return all items in the order of the source, and add layers that cannot be written to `refused`."""
    storage, stacks = stored_tensors(source), experts_items(source, layers)
    in_stacks = {prefix for stack in stacks for prefix in stack.layers}
    for prefix, layer in layers.items():
        if layer.weight_type is MXFP4ExpertsWeight and prefix not in in_stacks:
            refused[prefix] = NOT_STACKED
    single = {prefix: layer for prefix, layer in layers.items() if prefix not in in_stacks}
    owners = _owners(source, single, refused)
    owners |= {name: next(iter(stack.item.tensors)) for stack in stacks for name in stack.sources}
    items = {next(iter(stack.item.tensors)): stack.item for stack in stacks}
    items |= {prefix: layer.item for prefix, layer in single.items() if layer.item is not None}
    left_out = {*source.loader.config_tensors, *_unused_tensors(source)}
    for owner, item in items.items():
        for name in item.tensors.keys() & {*storage.keys()} - owners.keys() - left_out:
            refused[owner] = f"the source has another tensor with the name {name}"
    return list(items_in_source_order(storage, owners, items, left_out))


def _unused_tensors(source: VerifiedCheckpoint) -> Iterator[str]:
    """Yield unused tensors of plain layers, such as scales of a layer left plain."""
    for layer in source.described():
        for spec in layer.specs:
            if spec.role is Role.UNUSED:
                yield layer.names.full(spec.name)


def _owners(source: VerifiedCheckpoint, layers: OutputLayers, refused: dict[str, str]) -> dict[str, str]:
    """Map source tensors of converted layers to their layer; refuse layers in tensors of several experts."""
    owners, stored, shared = {}, stored_tensors(source).keys(), shared_sources(source, layers)
    for prefix in layers:
        for name in tensor_names(source, prefix):
            if name not in stored and name not in shared:
                refused[prefix] = f"{name} {STACKED}"
            owners[shared.get(name, name)] = prefix
    return owners


def _config_of(request: ConversionRequest, layers: Sequence[OutputLayer]) -> WrittenConfig:
    """Return the config for converted and kept `layers` and all plain matrices of the source."""
    source = request.source
    converted = {layer.prefix for layer in layers}
    quantized = [
        replace(layer, prefix=request.output_name(layer.prefix))
        for layer in layers
        if not layer.weight_type.plain
    ]
    plain = [layer.prefix for layer in layers if layer.weight_type.plain]
    plain += [
        prefix
        for prefix, layer in source.layers.items()
        if isinstance(layer, LayerDescription) and layer.format.weight_type.plain and "K" in layer.sizes
        if prefix not in converted
    ]
    names = sorted(request.output_name(name) for name in plain if name.rpartition(".")[2] not in EMBEDDINGS)
    config = quantization_config(quantized, names)
    scheme = _cache_scheme(source)
    if scheme is not None and config.values and CACHE_SCHEME in config.values:
        return replace(config, values={**config.values, CACHE_SCHEME: scheme})
    return config


def _cache_scheme(source: VerifiedCheckpoint) -> object | None:
    """Return the quantization of the KV cache in the config of the source, or None."""
    config = next(iter(source.configs), None)
    return None if config is None else config.values.get(CACHE_SCHEME)


def _notes(source: VerifiedCheckpoint, converted: OutputLayers, to: str) -> Iterator[str]:
    schemes = {
        layer.format.activations
        for prefix in converted
        if isinstance(layer := source.layers[prefix], LayerDescription) and layer.format.activations
    }
    for scheme in sorted(schemes, key=str):
        if to != fp8.NAME:
            yield f"inputs were quantized ({scheme}), which {to} cannot express: they are used unquantized"
        elif scheme.dynamic and scheme.owner != COMPRESSED_TENSORS:
            change = f"{scheme.owner} in the source, of {COMPRESSED_TENSORS} in the output"
            yield f"scales of inputs ({scheme}) follow the rule of {change}"
    if to == GGUF:
        yield NO_TOKENIZER
    if to == float4.DEEPSEEK:
        yield "programs of DeepSeek V4 quantize the inputs of these layers to FP8"
    if _cache_scheme(source) is not None and to not in (COMPRESSED_TENSORS, fp8.NAME):
        yield f"the config has a {CACHE_SCHEME}, which {to} cannot express: the KV cache is not quantized"
    doubtful = [layer for layer in source.described() if layer.format.config.doubt]
    if doubtful:
        yield f"{doubtful[0].prefix}: {doubtful[0].format.config.doubt}; {len(doubtful)} layers in all"
    unused = sorted(_unused_tensors(source))
    if unused:
        yield f"left out, as no layer uses them: {len(unused)} tensors, such as {unused[0]}"
    if source.loader.config_tensors:
        yield f"left out, as the config states their values: {', '.join(source.loader.config_tensors)}"


def _write_and_verify(
    request: ConversionRequest, plan: ConversionPlan, target: Path, shard_size: int, progress: Progress
) -> Conversion:
    """Write the planned items and files, and compare the result with the source."""
    source, texts = request.source, dict[str, bytes]()
    files: Sequence[OutputFile]
    if plan.gguf is not None:
        files = plan.gguf.files(shard_size)
    else:
        files = split_into_files(plan.items, shard_size)
        if plan.config is None:
            paths = [source_folder(source) / name for name in CONFIGS]
            texts = {path.name: path.read_bytes() for path in paths if path.is_file()}
        else:
            texts = dict(config_files(source.model_config, next(iter(source.configs), None), plan.config))
        index = safetensors_index(files)
        if index is not None:
            texts[INDEX] = json_bytes(index)
    copies = [file for file in copied_files(source_folder(source)) if file.name not in texts]
    job = request.rounding, {name: text.hex() for name, text in texts.items()}
    arguments = {"to": request.to, **({"names": TRANSFORMERS} if request.renames else {})}
    new = NewCheckpoint(source, target, arguments, files, texts, copies, job, request.workers)

    def verify(folder: Path) -> Conversion:
        compared = diff(source.path, folder, progress=progress, process_group=request.workers.group)
        layers = [_outcome(request, plan, layer) for layer in compared.layers]
        if reason := compared.unreadable or compared.unsupported:
            layers = [ConvertedLayer("", None, None, "differs", reason)]
        return Conversion(source.path, to=request.to, layers=layers, notes=plan.notes)

    return new.write(verify, progress)


def _outcome(request: ConversionRequest, plan: ConversionPlan, layer: LayerDiff) -> ConvertedLayer:
    before = format_of(request.source.layers.get(layer.name))
    converted = plan.layers.get(layer.name)
    after = converted.weight_type.format if converted else before
    if layer.outcome == "bits" or (layer.outcome == "rounded" and request.rounding):
        return ConvertedLayer(layer.name, before, after, layer.outcome, layer.detail)
    return ConvertedLayer(layer.name, before, after, "differs", layer.detail or layer.outcome)
