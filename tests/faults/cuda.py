"""Faults of calls of CUDA kernels: the order of strips, dispatch, and operands."""

from tests.faults.fault import Fault

_STRIPS = "qload/layouts/strips.py"
_CUDA = "qload/kernels/cuda"
_DTYPES = "qload/kernels/dtypes.py"

FAULTS = (
    Fault("strips-nibbles", _STRIPS, "(kt e j c t u) (r i b)", "(kt e j c t u) (r b i)"),
    Fault("strips-8-bit-columns", _STRIPS, "(kt i j c t u) (r b)", "(kt i j c u t) (r b)"),
    Fault("strips-before-ampere", "qload/kernel_formats/strips.py", "CAPABILITY = 80", "CAPABILITY = 75"),
    Fault(
        "auto-gives-up",
        "qload/repacking/loaders.py",
        '"Ampere": ("strips", "marlin", "exllama")',
        '"Ampere": ("strips",)',
    ),
    Fault(
        "slice-of-other-columns",
        "qload/devices/cuda_stored.py",
        "start // each * outer.stride *",
        "start // each * 1024 *",
    ),
    Fault("groups-counted-in-shares", f"{_CUDA}/large.py", "if not call.is_k_full:", "if False:"),
    Fault("groups-counted-by-decode", f"{_CUDA}/launch.py", "None if call.is_k_full else call.g_idx", "None"),
    Fault("address-between-two-loads", f"{_CUDA}/launch.py", "x.clone() if pointer(x) % ALIGNED else x", "x"),
    Fault("kernel-of-a-smaller-layer", f"{_CUDA}/dispatch.py", "bisect_left(sizes, size)", "0"),
    Fault(
        "inputs-out-of-order",
        f"{_CUDA}/launch.py",
        "return x if call.perm is None else",
        "return x if call.tokens < 99 else",
    ),
    Fault("shuffled-inputs-twice", f"{_CUDA}/exllama.py", "call.early), perm=None)", "call.early))"),
    Fault(
        "three-bits-of-the-first-columns",
        f"{_CUDA}/exllama.py",
        "[K, N, columns.start, w.shape[1]]",
        "[K, N, 0, w.shape[1]]",
    ),
    Fault("weights-of-any-size", _DTYPES, "if not most <= torch.finfo(dtype).max:", "if False:"),
    Fault("small-scales-converted", _DTYPES, 'tiny=field == "scales"', "tiny=False"),
    Fault("told-at-each-call", _DTYPES, "self.told = True", "self.told = False"),
    Fault(
        "scales-of-another-type",
        "qload/kernels/linear.py",
        "dtypes.for_activations(weight, dtype), ",
        "dtypes.for_activations(weight, None), ",
    ),
    Fault(
        "run-of-another-index",
        "qload/kernel_formats/exllama.py",
        "            twin._update_run()",
        "            pass",
    ),
    Fault(
        "auto-forgets-exllama",
        "qload/repacking/loaders.py",
        'return known("exllama", bits, ',
        'return bits == 5 and known("exllama", bits, ',
    ),
    Fault(
        "kernel-of-fewer-tokens",
        f"{_CUDA}/dispatch.py",
        "for row in of_layer], tokens)",
        "for row in of_layer], 0)",
    ),
    Fault("planned-without-zero-points", f"{_CUDA}/linear.py", "if self._zeros is None else", "if True else"),
    Fault(
        "planned-between-two-loads",
        f"{_CUDA}/linear.py",
        "(at | codes | scales | zeros) & ALIGNMENT_BITS",
        "False",
    ),
    Fault("keys-of-names-alone", "qload/kernels/plans.py", "repr(facts)", "repr(tensors)"),
)
