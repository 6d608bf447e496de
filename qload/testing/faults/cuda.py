"""Faults of the way to the CUDA kernels: our own order, which kernel is chosen, what it is given."""

from qload.testing.faults.fault import Fault

_STRIPS = "qload/layouts/strips.py"
_CUDA = "qload/kernels/cuda"

FAULTS = (
    Fault("strips-nibbles", _STRIPS, "(kt e j c t u) (r i b)", "(kt e j c t u) (r b i)"),
    Fault("strips-8-bit-columns", _STRIPS, "(kt i j c t u) (r b)", "(kt i j c u t) (r b)"),
    Fault("strips-before-hopper", "qload/kernel_formats/strips.py", "CAPABILITY = 90", "CAPABILITY = 80"),
    Fault(
        "auto-gives-up",
        "qload/repacking/loaders.py",
        "except RepackError:  # Marlin's",
        "except KeyError:  # Marlin's",
    ),
    Fault(
        "slice-of-other-columns",
        "qload/devices/cuda_stored.py",
        "start // each * outer.stride *",
        "start // each * 1024 *",
    ),
    Fault("groups-counted-in-shares", f"{_CUDA}/large.py", "if not call.is_k_full:", "if False:"),
    Fault("groups-counted-by-decode", f"{_CUDA}/decode.py", "g_idx if looks_up else 0", "0"),
    Fault("address-between-two-loads", f"{_CUDA}/inputs.py", "x.clone() if pointer(x) % ALIGNED else x", "x"),
    Fault("kernel-of-a-smaller-layer", f"{_CUDA}/choice.py", "bisect_left(sizes, size)", "0"),
    Fault(
        "kernel-of-fewer-tokens", f"{_CUDA}/choice.py", "for row in here], tokens)", "for row in here], 0)"
    ),
    Fault("planned-without-zero-points", f"{_CUDA}/plans.py", "if len(self._places) > 2", "if False"),
    Fault(
        "planned-between-two-loads", f"{_CUDA}/plans.py", "(at | codes | scales | zeros) & BETWEEN", "False"
    ),
    Fault("keys-of-names-alone", "qload/kernels/meaning.py", "repr(facts)", "repr(tensors)"),
)
