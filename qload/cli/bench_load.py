"""qload bench-load: how fast a checkpoint is loaded here, beside safetensors' own load_file."""

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from qload.cli.checkpoint_paths import open_path
from qload.cli.options import CheckpointPath, json_option, nonfinite_option, parse_device, verbose_option
from qload.cli.output import dumps
from qload.cli.progress import Update, prefix_stages, progress_bar
from qload.cli.text import escape, format_size, print_summary
from qload.errors.reporting import SCHEMA

if TYPE_CHECKING:
    import torch

    from qload.hub import HubId
    from qload.loader.finite_scales import Nonfinite

EPILOG = """\b
Examples:
  qload bench-load ./Llama-3-8B-GPTQ
  qload bench-load ./Llama-3-8B-GPTQ --device cuda --target auto
  qload bench-load ./Llama-3-8B-GPTQ --target marlin --rounds 5 --json | jq '.stages[].gigabytes_per_second'

Exit codes: 0 it was loaded, 1 it cannot be read, 2 the command is wrong, 3 a bug of qload, 4 the format
or some tensors are not read."""

TARGETS = ("auto", "marlin", "strips", "panels", "exllama", "awq", "gptq", "gptq_v2")


@click.command(epilog=EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option("--device", default="cpu", show_default=True, help="Where to: cpu, cuda, cuda:1 and the like.")
@click.option(
    "--target",
    type=click.Choice(TARGETS),
    default="auto",
    show_default=True,
    help="What the layers are repacked for.",
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="How many turns.")
@nonfinite_option
@json_option
@verbose_option
def bench_load(
    path: "Path | HubId",
    device: str,
    target: str,
    rounds: int,
    nonfinite: "Nonfinite",
    as_json: bool | None,
) -> None:
    """Measure how fast the checkpoint at PATH is loaded.

    In turns: safetensors' load_file, whose tensors are copied where they stay on the CPU; all layers as they
    are stored; and all layers repacked. Of each the median of all rounds, after one that is not counted and
    that fills the cache of files. On a CUDA device also the most memory above what the result takes.
    """
    from qload import native
    from qload.storage.checkpoint_files import locate

    native.check()
    with open_path(path, whole=True) as place, progress_bar() as progress:
        locate(place)  # refuses a wrong path before torch is imported
        report = measure_load(place, device, target, rounds, progress, nonfinite)
    if as_json or (as_json is None and not sys.stdout.isatty()):
        click.echo(dumps(report))
    else:
        _print_rates(report)
    rates = (f"{each['stage']}: {each['gigabytes_per_second']:.2f} GB/s" for each in report["stages"])
    print_summary([_title(report), *rates], as_json)


def measure_load(
    place: Any,
    device: str,
    target: str,
    rounds: int,
    progress: Update | None = None,
    nonfinite: "Nonfinite" = "error",
) -> dict[str, Any]:
    """What the verb prints, as JSON: bytes of the tensors, and of each stage the rounds' rates in GB/s."""
    from qload.listing import check_all_read
    from qload.weights import open_checkpoint

    where = parse_device(device)
    with open_checkpoint(place) as weights:
        check_all_read(weights)
    nbytes, files = _list_files(place)
    stages: dict[str, Callable[[Update | None], Any]] = {
        "load_file": lambda tell: _load_files(files, where),
        "as stored": lambda tell: _load(place, where, None, nonfinite, tell),
        target: lambda tell: _load(place, where, target, nonfinite, tell),
    }
    seconds: dict[str, list[float]] = {name: [] for name in stages}
    above: dict[str, list[int]] = {name: [] for name in stages}
    for turn in range(rounds + 1):
        for name, work in stages.items():
            label = f"{name}, {f'turn {turn} of {rounds}' if turn else 'to begin with'}"
            took, more = _time_call(work, where, prefix_stages(progress, label))
            if turn:
                seconds[name].append(took)
                above[name].append(more)
    told = [_stage_report(name, nbytes, seconds[name], above[name], where) for name in stages]
    return {"schema": SCHEMA, "path": str(place), "bytes": nbytes, "device": str(where), "stages": told}


def _stage_report(
    name: str, nbytes: int, seconds: Iterable[float], above: Iterable[int], where: "torch.device"
) -> dict[str, Any]:
    rates = [nbytes / took / 1e9 for took in seconds]
    return {
        "stage": name,
        "gigabytes_per_second": round(median(rates), 3),
        "rounds": [round(rate, 3) for rate in rates],
        "peak_above_result": max(above) if where.type == "cuda" else None,
    }


def _list_files(place: Any) -> tuple[int, list[Path]]:
    """The bytes of all tensors, and the files that hold them."""
    from qload.storage import SafetensorsStorage

    with SafetensorsStorage(place) as storage:
        files = [file for file in storage.files.values() if isinstance(file, Path)]
        return sum(storage.info(name).nbytes for name in storage.keys()), files  # noqa: SIM118, it is no dict


def _load_files(files: Iterable[Path], where: "torch.device") -> Any:
    from safetensors.torch import load_file

    if where.type == "cuda":
        return [load_file(file, device=str(where)) for file in files]
    return [[tensor.clone() for tensor in load_file(file).values()] for file in files]


def _load(
    place: Any, where: "torch.device", target: str | None, nonfinite: "Nonfinite", tell: Update | None
) -> Any:
    from qload.detect import KernelTarget
    from qload.listing import load_layers
    from qload.weights import open_checkpoint

    asked: Any = None if target is None else KernelTarget(target)  # type: ignore[arg-type]
    with open_checkpoint(place, device=where, target=asked, nonfinite=nonfinite) as weights:
        return list(load_layers(weights, progress=tell))


def _time_call(
    work: Callable[[Update | None], Any], where: "torch.device", tell: Update | None
) -> tuple[float, int]:
    """Seconds, and the bytes that were taken for a time above what the result takes."""
    import torch

    cuda = where.type == "cuda"
    with torch.cuda.device(where) if cuda else nullcontext():
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = perf_counter()
        kept = work(tell)
        if cuda:
            torch.cuda.synchronize()
        took = perf_counter() - start
        more = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() if cuda else 0
        del kept
    return took, more


def _print_rates(report: dict[str, Any]) -> None:
    from rich.text import Text

    from qload.cli.tables import NamedRow, NameTable, stdout

    columns = ("GB/s", "of each turn", "memory above the result")
    rows = []
    for stage in report["stages"]:
        above = stage["peak_above_result"]
        rates = " ".join(f"{rate:.2f}" for rate in stage["rounds"])
        rate = f"{stage['gigabytes_per_second']:.2f}"
        facts = [Text(rate), Text(rates), Text("" if above is None else format_size(above))]
        rows.append(NamedRow(stage["stage"], facts))
    out = stdout()
    out.print(Text(_title(report)))
    out.print(NameTable("stage", columns, rows, columns))


def _title(report: dict[str, Any]) -> str:
    return f"{escape(report['path'])}: {format_size(report['bytes'])} to {report['device']}"
