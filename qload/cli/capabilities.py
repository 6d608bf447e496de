"""The verbs formats, layout and doctor: supported formats, their layouts, and native modules."""

import ctypes
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from qload.cli.options import json_option, report_options, verbose_option
from qload.cli.output import print_data
from qload.errors.reporting import SCHEMA

if TYPE_CHECKING:
    from qload.capabilities import Capability

FORMATS_EPILOG = """\b
Examples:
  qload formats
  qload formats --json | jq '.formats.gptq'
  qload formats --markdown > docs/formats.md

Exit codes: 0 the table was printed, 2 the command is wrong, 3 a bug of qload."""


@click.command(epilog=FORMATS_EPILOG)
@json_option
@click.option("--markdown", is_flag=True, help="Print the table in Markdown, the content of docs/formats.md.")
@verbose_option
def formats(as_json: bool | None, markdown: bool) -> None:
    """Show the supported operations of each format.

    Operations: load, detect, dequantize, shard by column and by row, fuse, repack and restore, quantize while
    loading, verify. The reason is shown for each unsupported operation. The table is derived from the
    declarations of the formats.
    """
    from qload.capabilities import as_markdown, overview

    if markdown:
        click.echo(as_markdown(), nl=False)
        return
    table = overview()
    cells = {name: {c: [cell.yes, cell.text] for c, cell in row.items()} for name, row in table.items()}
    count = sum(row["load"].yes for row in table.values())
    summary = f"{count} formats are read; --table shows the operations of each"
    print_data({"schema": SCHEMA, "formats": cells}, as_json, lambda _: _print_formats(table), [summary])


def _print_formats(table: Mapping[str, Mapping[str, "Capability"]]) -> None:
    from rich.text import Text

    from qload.checkpoint import format_label
    from qload.cli.tables import stdout

    out = stdout()
    for name, row in table.items():
        out.print(Text(format_label(name), "bold"))
        for column, cell in row.items():
            out.print(Text(f"  {column:22}  {cell}", "" if cell.yes else "yellow"))


LAYOUT_EPILOG = """\b
Examples:
  qload layout awq
  qload layout marlin --bits 8 --svg > marlin.svg
  qload layout gptq --bits 3 | jq .words

Exit codes: 0 the layout was printed, 2 the command is wrong, 3 a bug of qload."""
# Equal to qload.pictures.LAYOUTS, which imports torch; a test compares them.
LAYOUT_NAMES = (
    "gptq", "gptq-zeros", "awq", "exllama", "marlin", "marlin-zeros", "marlin_24", "strips",
    "compressed-tensors",
)  # fmt: skip


@click.command(epilog=LAYOUT_EPILOG)
@click.argument("name", type=click.Choice(LAYOUT_NAMES), metavar="NAME")
@click.option(
    "--bits", type=click.IntRange(2, 8), default=4, show_default=True, metavar="N", help="Bits of a code."
)
@click.option("--svg", is_flag=True, help="Print a drawing instead of JSON.")
@verbose_option
def layout(name: str, bits: int, svg: bool) -> None:
    """Show the codes in each word of a layout.

    For each word of a tile, from its low bit up: row and column of each code in plain order. Rows are inputs,
    or groups for zero points; columns are outputs. NAME is one of gptq, gptq-zeros, awq, exllama, marlin,
    marlin-zeros, marlin_24, strips and compressed-tensors.
    """
    from qload.cli.output import dumps
    from qload.pictures import drawing, words_of

    click.echo(drawing(name, bits) if svg else dumps(words_of(name, bits)), nl=not svg)


DOCTOR_EPILOG = """\b
Examples:
  qload doctor
  qload doctor --torch
  qload doctor --json | jq .isa

Exit codes: 0 the installation works, with or without native modules, 1 QLOAD_ISA or QLOAD_NUM_THREADS has an
unusable value, 2 the command is wrong, 3 a bug of qload."""
CUDA_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
MAX_DEVICE_NAME_BYTES = 256


@click.command(epilog=DOCTOR_EPILOG)
@click.option(
    "--torch",
    "with_torch",
    is_flag=True,
    help="Import torch, which takes seconds, and show its number of threads, its CUDA devices, and the "
    "kernels of engines.",
)
@report_options
def doctor(ctx: click.Context, with_torch: bool, as_json: bool | None) -> None:
    """Show the native modules of this installation.

    The reason is shown for each missing module. Also shown: the instruction set and the number of threads in
    use, the version of torch, and the CUDA devices of the driver. With --torch also the kernel that engines
    get for integers of each width in groups of 128; `qload explain` shows the kernel of each layer of a
    checkpoint.

    Without native modules torch does all the work, and takes longer. docs/native.md describes how to build
    them.
    """
    report = examine_installation(with_torch)
    lines = (f"{name:13} {value}" for name, value in _fact_lines(report))
    print_data(report, as_json, _print_facts, lines)
    ctx.exit(1 if report["wrong"] else 0)


def examine_installation(with_torch: bool) -> dict[str, Any]:
    """Return the report of `qload doctor` as JSON; `with_torch`: import torch for more facts."""
    from qload import native
    from qload.errors import ArgumentError

    errors: list[str] = []

    def read_setting(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ArgumentError as error:
            errors.append(str(error))
            return None

    modules = {name: native.load(name) for name in native.MODULES}
    version, cuda_version = _read_torch_build()
    devices, reason = _list_driver_devices()
    return {
        "schema": SCHEMA,
        "modules": {n: {"built": m.found is not None, "reason": m.reason} for n, m in modules.items()},
        "isas": list(native.available()),
        "isa": read_setting(native.isa if modules["cpu"].found else native.check_isa),
        "threads": read_setting(native.threads if with_torch else native.requested_threads),
        "torch": version,
        "torch_cuda": cuda_version,
        "cuda_devices": devices,
        "no_cuda": reason,
        "torch_devices": _list_torch_devices() if with_torch else None,
        "kernels": _choose_kernels() if with_torch else None,
        "wrong": errors,
    }


def _read_torch_build() -> tuple[str | None, str | None]:
    """Return the versions of the installed torch and of its CUDA, without an import of torch."""
    try:
        distribution = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None, None
    try:
        build = runpy.run_path(str(distribution.locate_file("torch/version.py")))
    except OSError:  # an editable installation of torch
        return distribution.version, None
    return build["__version__"], build["cuda"]


def _list_driver_devices() -> tuple[list[str], str]:
    """Return the names of the CUDA devices visible to this process, and the reason if there is none."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError as error:
        return [], f"no CUDA driver: {error}"
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(MAX_DEVICE_NAME_BYTES)
    if status := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return [], f"the CUDA driver answers with error {status}"
    names: list[str] = []
    for index in range(count.value):
        if status := driver.cuDeviceGet(ctypes.byref(device), index):
            return names, f"the CUDA driver answers with error {status} for device {index}"
        if status := driver.cuDeviceGetName(name, MAX_DEVICE_NAME_BYTES, device):
            return names, f"the CUDA driver answers with error {status} for the name of device {index}"
        names.append(name.value.decode())
    return names, "" if names else "the CUDA driver has no device"


def _list_torch_devices() -> list[str]:
    from torch import cuda

    count = cuda.device_count() if cuda.is_available() else 0
    return [cuda.get_device_name(index) for index in range(count)]


def _choose_kernels() -> dict[str, str]:
    """Choose the kernel of engines for integers of each width, in groups of 128, and float16 inputs."""
    import torch

    from qload.kernels import MPLinearLayerConfig, choose_mp_linear_kernel
    from qload.kernels.scalar_type import integer_type
    from qload.plan.explain import capability_of

    kernels, shape = {}, (4096, 4096)
    for bits in (2, 3, 4, 8):
        scalar_type = integer_type(bits, zero_points=False)
        layer = MPLinearLayerConfig(
            shape, shape, scalar_type, torch.float16, group_size=128, zero_points=False
        )
        kernels[str(bits)] = choose_mp_linear_kernel(layer, capability_of(None)).name
    return kernels


def _print_facts(report: dict[str, Any]) -> None:
    from rich.text import Text

    from qload.cli.tables import stdout

    out, styles = stdout(), {"wrong": "red"}
    for name, module in report["modules"].items():
        styles[name] = "green" if module["built"] else "yellow"
    for name, value in _fact_lines(report):
        out.print(Text(f"{name:13} ").append(value, styles.get(name)))


def _fact_lines(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each fact, errors of the installation first."""
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
