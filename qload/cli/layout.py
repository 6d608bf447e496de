"""qload layout: which code of a tile lies in which bits of which word."""

import click

from qload.cli.options import verbose

EPILOG = """\b
Examples:
  qload layout awq
  qload layout marlin --bits 8 --svg > marlin.svg
  qload layout gptq --bits 3 | jq .words

Exit codes: 0 it was printed, 2 the command is wrong, 3 a bug of qload."""
# As qload.pictures has them, which takes PyTorch to ask; a test holds both together.
NAMES = (
    "gptq", "gptq-zeros", "awq", "exllama", "marlin", "marlin-zeros", "marlin_24", "strips",
    "compressed-tensors",
)  # fmt: skip


@click.command(epilog=EPILOG)
@click.argument("name", type=click.Choice(NAMES), metavar="NAME")
@click.option(
    "--bits", type=click.IntRange(2, 8), default=4, show_default=True, metavar="N", help="Of a code."
)
@click.option("--svg", is_flag=True, help="A drawing, in the place of JSON.")
@verbose
def layout(name: str, bits: int, svg: bool) -> None:
    """Show which code of a tile lies in which bits of which word of the layout NAME.

    Of each word, from its low bit up, the row and the column of each code in plain order: inputs and outputs,
    or groups and outputs of zero points, as the layout's sentence has them. NAME is one of gptq, gptq-zeros,
    awq, exllama, marlin, marlin-zeros, marlin_24, strips and compressed-tensors.
    """
    from qload.cli.output import dumps
    from qload.pictures import drawing, words_of

    click.echo(drawing(name, bits) if svg else dumps(words_of(name, bits)), nl=not svg)
