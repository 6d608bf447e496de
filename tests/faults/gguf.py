"""Faults of GGUF files: headers, order of rows, blocks of ggml, names."""

from tests.faults.fault import Fault

_HEADER, _STORAGE = "qload/storage/gguf_header.py", "qload/storage/gguf.py"
_BLOCKS, _GRIDS = "qload/layouts/ggml.py", "qload/layouts/ggml_grids.py"
_FORMAT, _NAMES = "qload/formats/gguf.py", "qload/detect/gguf.py"
_TARGET, _WRITER = "qload/conversion/gguf.py", "qload/storage/gguf_writer.py"

FAULTS = (
    Fault(
        "mxfp4-largest-exponent-kept",
        "qload/conversion/float4.py",
        "if invalid := describe_invalid_scales(floats):",
        "if False:",
    ),
    Fault(
        "mxfp4-negative-zero-kept",
        "qload/conversion/float4.py",
        "codes.masked_fill(negative, 0)",
        "codes.clone()",
    ),
    Fault(
        "gguf-negative-zero-lost",
        "qload/conversion/float4.py",
        "if not (floats.names.ggml or rounding) and",
        "if False and",
    ),
    Fault(
        "gguf-negative-zero-replaced",
        "qload/conversion/float4.py",
        "        return floats\n    codes = codes",
        "    codes = codes",
    ),
    Fault("gguf-written-in-halves", _TARGET, "heads, 2, -1, *rows", "heads, -1, 2, *rows"),
    Fault("gguf-settings-unchecked", _TARGET, "and wanted != found:", "and False:"),
    Fault(
        "gguf-norms-as-stored", _TARGET, "if len(info.shape) == 1 or ROUTER in name:", "if ROUTER in name:"
    ),
    Fault("gguf-experts-without-size", _TARGET, "if lead != LLAMA:", "if config.inner:"),
    Fault("gguf-ramp-rounded", _NAMES, 'rope={"truncate": False}', 'rope={"truncate": True}'),
    Fault("gguf-sinks-unnamed", _NAMES, '"attn_sinks.weight": "self_attn.sinks"', ""),
    Fault("gguf-fused-biases-whole", _NAMES, 'if suffix in ("weight", "bias")', 'if suffix == "weight"'),
    Fault("gguf-experts-of-any-type", _TARGET, "        if other is not None:", "        if False:"),
    Fault("gguf-split-without-total", _TARGET, "Scalar(I32, len(self.types))", "Scalar(I32, len(items))"),
    Fault("gguf-dimensions-outermost-first", _WRITER, "reversed(shape)", "shape"),
    Fault("gguf-data-unaligned", _WRITER, "-(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES", "nbytes"),
    Fault(
        "float4-second-scale-not-inverted",
        "qload/conversion/float4.py",
        "second.reciprocal() if inverted else second",
        "second",
    ),
    Fault(
        "float4-products-unchecked", "qload/conversion/float4.py", "if not bool(differ.any()):", "if True:"
    ),
    Fault("gguf-blocks-packed-as-neighbours", _BLOCKS, "planes.transpose(-1, -2)", "planes"),
    Fault(
        "gguf-second-scale-on-scales",
        "qload/kernel_formats/fp4_marlin.py",
        "    if config.ggml:",
        "    if False:",
    ),
    Fault(
        "gguf-second-scale-lost",
        "qload/kernel_formats/gguf_blocks.py",
        "if origin.stores_zeros else None",
        "if False else None",
    ),
    Fault(
        "gguf-any-type-as-integers",
        _FORMAT,
        "if self.config.type not in INTEGER_TYPES.values():",
        "if False:",
    ),
    Fault("gguf-holes-allowed", _HEADER, "if begin != expected:", "if begin < end:"),
    Fault("gguf-outermost-first", _HEADER, "for _ in range(rank))[::-1]", "for _ in range(rank))"),
    Fault("gguf-arrays-nest-forever", _HEADER, "< 0 or depth >= MAX_DEPTH", "< 0"),
    Fault("gguf-truncated-data", _HEADER, "not end <= file_size < end", "not file_size < end"),
    Fault("gguf-rows-interleaved", _STORAGE, "// size, size // 2, 2,", "// size, 2, size // 2,"),
    Fault("gguf-norm-shifted-on", _STORAGE, "values - view.shift if", "values + view.shift if"),
    Fault("gguf-part-from-the-start", _STORAGE, "begin + number * size", "begin"),
    Fault("ggml-halves-exchanged", _BLOCKS, "(field & 15, field >> 4)", "(field >> 4, field & 15)"),
    Fault("ggml-q4-0-zero", _BLOCKS, "halves(blocks[..., :2]), zero=8)", "halves(blocks[..., :2]), zero=7)"),
    Fault(
        "ggml-high-bits-of-minima", _BLOCKS, "third >> 4 | second >> 6 << 4", "third >> 4 | first >> 6 << 4"
    ),
    Fault("ggml-mxfp4-doubled", _BLOCKS, "exponents - 1 << 23", "exponents << 23"),
    Fault("ggml-seven-signs", _GRIDS, "<< 7 & 0x80", "<< 7 & 0"),
    Fault(
        "ggml-delta-positive", _GRIDS, "1 - 2 * negative.to(torch.int16)", "1 + 0 * negative.to(torch.int16)"
    ),
    Fault(
        "ggml-offset-added",
        "qload/devices/reference.py",
        "wide.sub_(_of_rows(codes, codes.offsets,",
        "wide.add_(_of_rows(codes, codes.offsets,",
    ),
    Fault(
        "gguf-scale-of-first-part",
        _FORMAT,
        "spec.expand_parts(self.scale,",
        "spec.expand_parts(self.scale.reshape(-1)[:1],",
    ),
    Fault("gguf-scales-unchecked", _FORMAT, "ScaleBytes(*scales) if scales else None", "None"),
    Fault(
        "gguf-gate-and-up-exchanged",
        _NAMES,
        '"ffn_gate_exps": "w1", "ffn_up_exps": "w3"',
        '"ffn_gate_exps": "w3", "ffn_up_exps": "w1"',
    ),
    Fault(
        "gguf-qwen-interleaved",
        _NAMES,
        'GGUFArchitecture("qwen3")',
        'GGUFArchitecture("qwen3", interleaved=True)',
    ),
)
