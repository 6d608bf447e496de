"""qload doctor: what this installation can do natively, and what is missing and why."""

import ctypes
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import click

from qload.cli.options import as_json, verbose
from qload.cli.summary import summarize
from qload.errors.verdicts import SCHEMA

EPILOG = """\b
Examples:
  qload doctor
  qload doctor --torch
  qload doctor --json | jq .isa

Exit codes: 0 all is in order, also where a native module is missing, 1 QLOAD_ISA or QLOAD_NUM_THREADS has a
value that cannot be used here, 2 the command is wrong, 3 a bug of qload."""
DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
NAME_BYTES = 256  # of a device's name, at most


@click.command(epilog=EPILOG)
@click.option(
    "--torch",
    "with_torch",
    is_flag=True,
    help="Import torch, which takes seconds, and show its number of threads, the CUDA devices that it can "
    "use, and the kernels of engines.",
)
@as_json
@verbose
@click.pass_context
def doctor(ctx: click.Context, with_torch: bool, as_json: bool | None) -> None:
    """Show which native modules are here.

    For a module that is missing it says why. It shows the instruction set and the number of threads in use,
    the version of torch, and the CUDA devices of the driver. With --torch it also shows which kernel engines
    get for integers of each width, in groups of 128; `qload explain` says it of each layer of a checkpoint.

    Without native modules everything works through torch, and takes longer. docs/native.md says how they are
    built.
    """
    report = examine(with_torch)
    if as_json or (as_json is None and not sys.stdout.isatty()):
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    summarize((f"{name:13} {value}" for name, value in _rows(report)), as_json)
    ctx.exit(1 if report["wrong"] else 0)


def examine(with_torch: bool = False) -> dict[str, Any]:
    """Return the facts that `qload doctor` prints, as JSON; those of an imported torch only `with_torch`."""
    from qload import native
    from qload.errors import ArgumentError

    wrong: list[str] = []

    def asked(what: Callable[[], Any]) -> Any:
        try:
            return what()
        except ArgumentError as error:
            wrong.append(str(error))
            return None

    modules = {name: native.load(name) for name in native.MODULES}
    version, cuda_version = _torch_build()
    devices, reason = _driver_devices()
    return {
        "schema": SCHEMA,
        "modules": {n: {"built": m.found is not None, "reason": m.reason} for n, m in modules.items()},
        "isas": list(native.available()),
        "isa": asked(native.isa if modules["cpu"].found else native.check_isa),
        "threads": asked(native.threads if with_torch else native.requested_threads),
        "torch": version,
        "torch_cuda": cuda_version,
        "cuda_devices": devices,
        "no_cuda": reason,
        "torch_devices": _torch_devices() if with_torch else None,
        "kernels": _kernels() if with_torch else None,
        "wrong": wrong,
    }


def _torch_build() -> tuple[str | None, str | None]:
    """Version of the installed torch, and of the CUDA that it is built for, without an import of torch."""
    try:
        installed = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None, None
    try:
        build = runpy.run_path(str(installed.locate_file("torch/version.py")))
    except OSError:  # torch's own sources, which are imported from another folder
        return installed.version, None
    return build["__version__"], build["cuda"]


def _driver_devices() -> tuple[list[str], str]:
    """Names of the CUDA devices that the driver shows to this process, and why there is none, or ""."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        return [], f"no CUDA driver: {error}"
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(NAME_BYTES)
    if status := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return [], f"the CUDA driver answers with error {status}"
    names: list[str] = []
    for at in range(count.value):
        if status := driver.cuDeviceGet(ctypes.byref(device), at):
            return names, f"the CUDA driver answers with error {status} for device {at}"
        if status := driver.cuDeviceGetName(name, NAME_BYTES, device):
            return names, f"the CUDA driver answers with error {status} for the name of device {at}"
        names.append(name.value.decode())
    return names, "" if names else "the CUDA driver has no device"


def _torch_devices() -> list[str]:
    """Names of the CUDA devices that torch can use."""
    from torch import cuda

    return [cuda.get_device_name(at) for at in range(cuda.device_count())] if cuda.is_available() else []


def _kernels() -> dict[str, str]:
    """The kernel that engines get here for integers of each width, in groups of 128, of fp16 inputs."""
    import torch

    from qload.kernels import MPLinearLayerConfig, choose_mp_linear_kernel
    from qload.kernels.scalar_type import integer_type
    from qload.plan.explain import capability_of

    found, shape = {}, (4096, 4096)
    for bits in (2, 3, 4, 8):
        kind = integer_type(bits, zero_points=False)
        layer = MPLinearLayerConfig(shape, shape, kind, torch.float16, group_size=128, zero_points=False)
        found[str(bits)] = choose_mp_linear_kernel(layer, capability_of(None)).name
    return found


def _print(report: dict[str, Any]) -> None:
    from rich.text import Text

    from qload.cli.console import stdout

    out, styles = stdout(), {"wrong": "red"}
    for name, module in report["modules"].items():
        styles[name] = "green" if module["built"] else "yellow"
    for name, value in _rows(report):
        out.print(Text(f"{name:13} ").append(value, styles.get(name)))


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each fact by name; first errors of the installation."""
    yield from (("wrong", text) for text in report["wrong"])
    for name, module in report["modules"].items():
        yield name, "built" if module["built"] else module["reason"]
    build = f", built for CUDA {report['torch_cuda']}" if report["torch_cuda"] else ""
    yield "isa", f"{report['isa'] or 'none'}   of {', '.join(report['isas']) or 'none'}"
    yield "threads", str(report["threads"] or "as many as torch uses")
    yield "torch", f"{report['torch']}{build}" if report["torch"] else "not installed"
    yield "CUDA devices", ", ".join(report["cuda_devices"]) or f"none: {report['no_cuda']}"
    if report["kernels"] is not None:
        yield "torch's", ", ".join(report["torch_devices"]) or "none"
        yield "kernels", ", ".join(f"{bits} bits: {kernel}" for bits, kernel in report["kernels"].items())
