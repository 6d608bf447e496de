"""Faults of calls of the CPU module: the order of panels, operands, and dispatch."""

from tests.faults.fault import Fault

_ORDER, _PANELS = "qload/layouts/panels.py", "qload/kernel_formats/panels.py"
_CPU = "qload/kernels/cpu.py"
_DEFERRED = "qload/repacking/loaders.py"

FAULTS = (
    Fault("panels-of-columns", _ORDER, "nt (kt c) (r)", "nt (c kt) (r)"),
    Fault("panels-scales-by-column", _ORDER, "nt (g c)", "nt (c g)"),
    Fault(
        "panels-groups-not-padded",
        _PANELS,
        "return row // size * self.run(K) + row % size",
        "return row",
    ),
    Fault(
        "panels-groups-not-permuted", _PANELS, "index_copy_(0, self.perm.long(), k_group)", "copy_(k_group)"
    ),
    Fault("panels-default-zero-of-offsets", "qload/spec/integers.py", 'if offset == "none" else 0', "+ 0"),
    Fault("panels-offsets-of-codes", _PANELS, "offsets if is_zero else zeros", "zeros"),
    Fault("panels-offsets-unrounded", _PANELS, "rounding=self.config.rounding", "rounding=None"),
    Fault("panels-offsets-added", "qload/formats/mlx.py", "offsets=-biases", "offsets=biases"),
    Fault(
        "gguf-fifth-bit", "qload/layouts/ggml.py", "pack_in_turn(codes >> 4, 1)", "pack_in_turn(codes & 1, 1)"
    ),
    Fault(
        "panels-unused-bits-lost",
        "qload/layouts/row_blocks.py",
        "return not torch.equal(self.pack(codes)",
        "return not torch.equal(stored",
    ),
    Fault("panels-zero-of-256", _PANELS, "lowest < 0 or highest > MAX_ZERO_POINT", "lowest < 0"),
    Fault("panels-of-half-a-group", _PANELS, "bool((integers.g_idx[perm].long() == expected).all())", "True"),
    Fault("cpu-takes-many-tokens", _CPU, "if way == TORCH:", "if False:"),
    Fault("cpu-strides-of-inputs", _CPU, "if rows.stride(1) != 1 and rows.shape[1] != 1:", "if False:"),
    Fault("rows-signed-as-unsigned", _CPU, "codes.codes.dtype == torch.int8", "False"),
    Fault(
        "rows-by-a-table-of-sixteen",
        _CPU,
        "replace(meaning, lookup=_of_each_byte(meaning.lookup))",
        "meaning",
    ),
    Fault("rows-kept-elsewhere", _CPU, "kept.seen == seen and", ""),
    Fault("rows-kept-for-ever", _CPU, " and kept.stands_for(tensors)", ""),
    Fault("cpu-leaves-all-types", _CPU, 'str(dtype).removeprefix("torch.")', '"bfloat16"'),
    Fault("cpu-one-row-on", _CPU, "if tokens <= most]", "if tokens < most]"),
    Fault(
        "rows-low-half-first",
        _CPU,
        "isinstance(codes.codes, NibblePairs) and codes.codes.high_first",
        "False",
    ),
    Fault("deferred-tensors-of-nobody", _DEFERRED, "            light.commit()", "            pass"),
    Fault("deferred-tensors-as-expected", _DEFERRED, " and self._moves[name].move == move", ""),
    Fault(
        "deferred-tensors-read-ahead",
        "qload/repacking/loaders.py",
        "[rectangle for rectangle in inner.reads if deferred.is_read(rectangle)]",
        "inner.reads",
    ),
    Fault(
        "auto-forgets-panels",
        "qload/repacking/loaders.py",
        '"CPU": ("panels", "marlin"),',
        '"CPU": ("marlin",),',
    ),
)
