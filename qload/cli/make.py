"""qload make-checkpoint: a tiny checkpoint of a format and a type of model."""

import json
from pathlib import Path

import click

from qload.cli.options import output_folder, verbose

EPILOG = """\b
Examples:
  qload make-checkpoint gptq -o ./tiny-llama-gptq
  qload make-checkpoint compressed-tensors -o ./tiny-moe --model mixtral
  qload make-checkpoint awq -o ./tiny --config '{"num_hidden_layers": 1}'

Exit codes: 0 it was made, 2 the command is wrong, 3 a bug of qload."""


def _entries(ctx: click.Context, param: click.Parameter, value: str) -> dict[str, object]:
    """What a JSON object holds; anything else is a usage error."""
    try:
        found = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"is no JSON: {error}", ctx, param) from error
    if not isinstance(found, dict):
        raise click.BadParameter("is no JSON object", ctx, param)
    return found


@click.command("make-checkpoint", epilog=EPILOG)
@click.argument("format", metavar="FORMAT")
@output_folder("Where to; made, or empty.")
@click.option(
    "--model", default="llama", show_default=True, metavar="TYPE", help="A model_type that qload runs."
)
@click.option(
    "--config",
    callback=_entries,
    metavar="JSON",
    default="{}",
    help="Entries of config.json that are different.",
)
@verbose
def make_checkpoint(format: str, folder: Path, model: str, config: dict[str, object]) -> None:
    """Write a tiny checkpoint of FORMAT to DIR.

    It has all tensors that the config names, in some hundred kilobytes, and every value tells where it lies.
    The same command writes the same bytes. What a name does not mean is answered with those that there are.
    """
    from qload.testing import make_checkpoint as run

    tensors = run(format, folder, model=model, config=config)
    click.echo(
        f"{folder}: {len(tensors)} tensors, {sum(each.nbytes for each in tensors.values())} bytes", err=True
    )
