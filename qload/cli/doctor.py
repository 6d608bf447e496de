"""qload doctor: what this installation can do natively, and what is missing and why."""

import json
import sys
from collections.abc import Callable
from typing import Any

import click

from qload.cli.options import as_json, verbose
from qload.errors.verdicts import SCHEMA

EPILOG = """\b
Examples:
  qload doctor
  qload doctor --json | jq .isa

Exit codes: 0 all is in order, also where a native module is missing, 1 QLOAD_ISA or QLOAD_NUM_THREADS has a
value that cannot be used here, 2 the command is wrong, 3 a bug of qload."""


@click.command(epilog=EPILOG)
@as_json
@verbose
@click.pass_context
def doctor(ctx: click.Context, as_json: bool | None) -> None:
    """Show which native modules are here.

    For a module that is missing it says why. It shows the instruction set and the number of threads in use,
    the version of torch, the CUDA devices that torch sees, and which kernel engines get for integers of each
    width, in groups of 128; `qload explain` says it of each layer of a checkpoint.

    Without native modules everything works through torch, and takes longer. docs/native.md says how they are
    built.
    """
    report = examine()
    if as_json or (as_json is None and not sys.stdout.isatty()):
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    ctx.exit(1 if report["wrong"] else 0)


def examine() -> dict[str, Any]:
    """What `qload doctor` prints, as JSON."""
    import torch

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
    cuda = torch.cuda
    devices = [cuda.get_device_name(i) for i in range(cuda.device_count())] if cuda.is_available() else []
    return {
        "schema": SCHEMA,
        "modules": {n: {"built": m.found is not None, "reason": m.reason} for n, m in modules.items()},
        "isas": list(native.available()),
        "isa": asked(native.isa if modules["cpu"].found else native.check_isa),
        "threads": asked(native.threads),
        "torch": torch.__version__,
        "cuda_devices": devices,
        "kernels": _kernels(),
        "wrong": wrong,
    }


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

    out = stdout()
    for name, module in report["modules"].items():
        found = Text("built", "green") if module["built"] else Text(module["reason"], "yellow")
        out.print(Text(f"{name:13} ") + found)
    rows = {
        "isa": f"{report['isa'] or 'none'}   of {', '.join(report['isas']) or 'none'}",
        "threads": str(report["threads"]),
        "torch": report["torch"],
        "CUDA devices": ", ".join(report["cuda_devices"]) or "none",
        "kernels": ", ".join(f"{bits} bits: {kernel}" for bits, kernel in report["kernels"].items()),
    }
    for name, value in rows.items():
        out.print(Text(f"{name:13} {value}"))
    for text in report["wrong"]:
        out.print(Text(text, "red"))
