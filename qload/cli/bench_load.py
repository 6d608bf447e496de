"""The verb bench-load: measure the speed of loading a checkpoint, next to safetensors' load_file."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from qload.cli.checkpoint_paths import open_path
from qload.cli.options import CheckpointPath, json_option, nonfinite_option, parse_device, verbose_option
from qload.cli.output import print_data
from qload.cli.progress import Update, prefix_stages, progress_bar
from qload.cli.text import escape, format_size
from qload.errors.reporting import SCHEMA

if TYPE_CHECKING:
    import torch

    from qload.hub import HubId
    from qload.loader.source import Nonfinite

EPILOG = """\b
Examples:
  qload bench-load ./Llama-3-8B-GPTQ
  qload bench-load ./Llama-3-8B-GPTQ --device cuda --target auto
  qload bench-load ./Llama-3-8B-GPTQ --target marlin --rounds 5 --json | jq '.stages[].gigabytes_per_second'

Exit codes: 0 the checkpoint was loaded, 1 it is unreadable, 2 the command is wrong, 3 a bug of qload, 4 the
format is unsupported or some tensors are not read."""

TARGETS = ("auto", "marlin", "strips", "panels", "exllama", "awq", "gptq", "gptq_v2")


@click.command(epilog=EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--device", default="cpu", show_default=True, help="Target device, such as cpu, cuda or cuda:1."
)
@click.option(
    "--target",
    type=click.Choice(TARGETS),
    default="auto",
    show_default=True,
    help="Kernel format of the repacked layers.",
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Number of rounds.")
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
    """Measure the speed of loading the checkpoint at PATH.

    Each round loads with safetensors' load_file (and copies the tensors on the CPU), then all layers as they
    are stored, then all layers repacked. The result is the median of all rounds, after one uncounted round
    that fills the page cache. On a CUDA device the report also has the peak memory above the size of the
    result.
    """
    from qload import native
    from qload.storage.checkpoint_files import locate

    native.check()
    with open_path(path, whole=True) as place, progress_bar(visible=True) as progress:
        locate(place)  # refuses a wrong path before torch is imported
        report = measure_load(place, device, target, rounds, progress, nonfinite)
    rates = (f"{stage['stage']}: {stage['gigabytes_per_second']:.2f} GB/s" for stage in report["stages"])
    print_data(report, as_json, _print_rates, [_title(report), *rates])


def measure_load(
    place: Any,
    device: str,
    target: str,
    rounds: int,
    progress: Update | None,
    nonfinite: "Nonfinite",
) -> dict[str, Any]:
    """Return the report of the verb: bytes of the tensors, and the rates of each stage in GB/s."""
    from qload.checkpoint import check_all_read, open_checkpoint

    target_device = parse_device(device)
    with open_checkpoint(place) as weights:
        check_all_read(weights)
    nbytes, files = _list_files(place)
    stages: dict[str, Callable[[Update | None], Any]] = {
        "load_file": lambda update: _load_files(files, target_device),
        "as stored": lambda update: _load_layers(place, target_device, None, nonfinite, update),
        target: lambda update: _load_layers(place, target_device, target, nonfinite, update),
    }
    seconds: dict[str, list[float]] = {name: [] for name in stages}
    peaks: dict[str, list[int]] = {name: [] for name in stages}
    for number in range(rounds + 1):
        for name, load in stages.items():
            label = f"{name}, {f'round {number} of {rounds}' if number else 'warm-up'}"
            duration, peak = _time_call(load, target_device, prefix_stages(progress, label))
            if number:
                seconds[name].append(duration)
                peaks[name].append(peak)
    return {
        "schema": SCHEMA,
        "path": str(place),
        "bytes": nbytes,
        "device": str(target_device),
        "stages": [_stage_report(name, nbytes, seconds[name], peaks[name], target_device) for name in stages],
    }


def _stage_report(
    name: str, nbytes: int, seconds: Iterable[float], peaks: Iterable[int], device: "torch.device"
) -> dict[str, Any]:
    rates = [nbytes / duration / 1e9 for duration in seconds]
    return {
        "stage": name,
        "gigabytes_per_second": round(median(rates), 3),
        "rounds": [round(rate, 3) for rate in rates],
        "peak_above_result": max(peaks) if device.type == "cuda" else None,
    }


def _list_files(place: Any) -> tuple[int, list[Path]]:
    """Return the bytes of all tensors, and their files."""
    from qload.storage import SafetensorsStorage

    with SafetensorsStorage(place) as storage:
        files = [file for file in storage.files.values() if isinstance(file, Path)]
        return sum(storage.info(name).nbytes for name in storage.keys()), files  # noqa: SIM118, it is no dict


def _load_files(files: Iterable[Path], device: "torch.device") -> Any:
    from safetensors.torch import load_file

    if device.type == "cuda":
        return [load_file(file, device=str(device)) for file in files]
    return [[tensor.clone() for tensor in load_file(file).values()] for file in files]


def _load_layers(
    place: Any, device: "torch.device", target: str | None, nonfinite: "Nonfinite", progress: Update | None
) -> Any:
    from qload.checkpoint import load_layers, open_checkpoint
    from qload.detect import KernelTarget

    kernel_target: Any = None if target is None else KernelTarget(target)  # type: ignore[arg-type]
    with open_checkpoint(place, device=device, target=kernel_target, nonfinite=nonfinite) as weights:
        return list(load_layers(weights, progress=progress))


def _time_call(
    load: Callable[[Update | None], Any], device: "torch.device", progress: Update | None
) -> tuple[float, int]:
    """Return the seconds of a load, and its peak memory in bytes above the size of the result."""
    import torch

    cuda = device.type == "cuda"
    with torch.cuda.device(device) if cuda else nullcontext():
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = perf_counter()
        result = load(progress)
        if cuda:
            torch.cuda.synchronize()
        duration = perf_counter() - start
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() if cuda else 0
        del result
    return duration, peak


def _print_rates(report: dict[str, Any]) -> None:
    from rich.text import Text

    from qload.cli.tables import NamedRow, NameTable, stdout

    columns = ("GB/s", "of each round", "memory above the result")
    rows = []
    for stage in report["stages"]:
        peak = stage["peak_above_result"]
        rates = " ".join(f"{rate:.2f}" for rate in stage["rounds"])
        rate = f"{stage['gigabytes_per_second']:.2f}"
        facts = [Text(rate), Text(rates), Text("" if peak is None else format_size(peak))]
        rows.append(NamedRow(stage["stage"], facts))
    out = stdout()
    out.print(Text(_title(report)))
    out.print(NameTable("stage", columns, rows, columns))


def _title(report: dict[str, Any]) -> str:
    return f"{escape(report['path'])}: {format_size(report['bytes'])} to {report['device']}"
