"""Verify two sound checkpoints, then damaged copies of them, alone and with `--against`.

`python -m tests.demo [FOLDER]` runs in the root of the checkout; `nox -s demo` creates its environment.
The damaged copies stay under FOLDER, build/demo by default; each printed command can be run again.

Exit codes: 0 success, 1 an expected finding is missing, or a sound checkpoint has a finding.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from qload.cli.layer_tables import contents_tables
from qload.cli.tables import empty_table, finding_tables, stderr, stdout, verdict_text
from qload.cli.text import format_count
from qload.verify import Report, inspect, verify
from tests.paths import FIXTURES
from tests.verify import damage
from tests.verify.damage import Case, Tensors, read_case, write_case


@dataclass(frozen=True)
class Damage:
    """Damage to one layer of a copy, and the findings that it must cause.

    `alone` maps a quantization method to the rule of `verify`; `cause` is part of the message of `--against`.
    Other findings may accompany these.
    """

    name: str
    description: str
    do: Callable[[Case], None]
    cause: str
    alone: Mapping[str, str] = field(default_factory=dict)


FOLDER = Path("build", "demo")  # folder of the damaged copies
DAMAGES = (
    Damage(
        "zero-points",
        "every zero point of {layer} becomes one higher",
        damage.asymmetric_zeros_off,
        "read with zero points one lower, it agrees",
        {"gptq": "symmetry", "awq": "zero-point-mean"},  # the GPTQ model says sym: true
    ),
    Damage(
        "rolled-scales",
        "each group of {layer} gets the scales of the group before it",
        damage.scales_rolled,
        "read with scales of the group after, it agrees",
    ),
    Damage(
        "missing-layer",
        "{layer} is left out",
        damage.missing_projection,
        "a layer of {reference} only",
        {"gptq": "missing-sibling", "awq": "missing-sibling"},
    ),
    Damage(
        "swapped-order",
        "the eight codes in each word of {layer} change places, even ones first",
        damage.nibble_order,
        "read with even codes first undone",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Reports on one damaged copy."""

    name: str
    reference: Path
    alone: Report
    compared: Report

    @property
    def added(self) -> Report:
        """The findings of `--against` that `verify` alone lacks."""
        return replace(
            self.compared, findings=[f for f in self.compared.findings if f not in self.alone.findings]
        )


def models() -> list[Path]:
    """Return the paths of the two models among the fixtures, relative to the current directory."""
    found = [
        config for name in ("awq", "gptq") for config in sorted(FIXTURES.glob(f"{name}/model_*/config.json"))
    ]
    return [Path(os.path.relpath(config.parent)) for config in found]


def write_copies(folder: Path, checkpoints: Iterable[Path], damages: Iterable[Damage]) -> None:
    """Write a copy of each checkpoint with each damage under FOLDER."""
    for checkpoint, each in product(checkpoints, damages):
        case = read_case(checkpoint)
        each.do(case)
        _write_copy(folder, case, each)


def _write_copy(folder: Path, case: Case, each: Damage) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_case(case, folder / f"{case.quantization['quant_method']}-{each.name}")


def demonstrate(
    out: Console, folder: Path, checkpoints: Iterable[Path], damages: Sequence[Damage]
) -> list[str]:
    """Print all reports; return a sentence for each missing or wrong finding."""
    broken: list[str] = []
    outcomes: list[Outcome] = []
    for checkpoint in checkpoints:
        broken += _show_sound(out, checkpoint)
        for number, each in enumerate(damages, 1):
            _head(out, f"{checkpoint}, damage {number} of {len(damages)}: {each.name}")
            case = read_case(checkpoint)
            outcome = _show_damaged(out, folder, checkpoint, case, each)
            broken += _broken(outcome, each, case.quantization["quant_method"])
            outcomes.append(outcome)
    _summarize(out, outcomes)
    return broken


def _show_sound(out: Console, checkpoint: Path) -> Iterator[str]:
    _head(out, f"{checkpoint}: a sound checkpoint")
    _command(out, f"qload inspect {checkpoint}")
    inspected = inspect(checkpoint)
    for part in contents_tables(inspected, every=False):
        out.print(part)
    _report(out, inspected)
    _command(out, f"qload verify {checkpoint}")
    verified = verify(checkpoint)
    _report(out, verified)
    for verb, report in (("inspect", inspected), ("verify", verified)):
        if report.verdict != "ok":
            yield f"{checkpoint} is sound, and qload {verb} says {report.verdict}: {_rules(report)}"


def _show_damaged(out: Console, folder: Path, checkpoint: Path, case: Case, each: Damage) -> Outcome:
    """Damage the case, write it, and print the changed tensors and both reports."""
    before = {name: tensor.clone() for name, tensor in case.tensors.items()}
    each.do(case)
    out.print(Text(f"In a copy, {each.description.format(layer=case.prefix)}:"))
    for line in changes(before, case.tensors):
        out.print(Text(f"  {line}"))
    copy = _write_copy(folder, case, each)
    outcome = Outcome(copy.name, checkpoint, verify(copy), verify(copy, against=checkpoint))
    _command(out, f"qload verify {copy}")
    _report(out, outcome.alone)
    _command(out, f"qload verify {copy} --against {checkpoint}")
    out.print(verdict_text(outcome.compared))
    if outcome.alone.findings:
        out.print(Text(f"the same {format_count(len(outcome.alone.findings), 'finding')} as above, and:"))
    for part in finding_tables(outcome.added):
        out.print(part)
    if outcome.alone.verdict == "ok" and outcome.added.findings:
        out.print(
            Text("The copy contradicts neither itself nor its config: only --against can see this damage.")
        )
    return outcome


def changes(before: Tensors, after: Tensors) -> Iterator[str]:
    """Yield a line for each tensor with other values, and for each missing tensor."""
    for name in sorted(before):
        if name not in after:
            yield f"{name}: removed"
        elif not torch.equal(before[name], after[name]):
            apart = before[name] != after[name]
            first = tuple(apart.nonzero()[0].tolist())
            was, is_ = (_value(tensor[first]) for tensor in (before[name], after[name]))
            yield f"{name}: {int(apart.sum())} of {apart.numel()} differ; at {first} {was} becomes {is_}"


def _value(scalar: Tensor) -> str:
    """A float in decimal, a word of packed codes in hexadecimal."""
    return f"{float(scalar):g}" if scalar.is_floating_point() else f"0x{int(scalar) & 0xFFFFFFFF:08x}"


def _broken(outcome: Outcome, promised: Damage, method: str) -> Iterator[str]:
    rule, alone, added = promised.alone.get(method), _rules(outcome.alone), _rules(outcome.added)
    if rule and rule not in alone.split(", "):
        yield f"{outcome.name}: qload verify has to find it by the rule {rule}, and says {alone}"
    cause = promised.cause.format(reference=outcome.reference)
    if not any(cause in finding.message for finding in outcome.added.findings):
        yield f"{outcome.name}: --against has to say {cause!r}, and says {added}"


def _summarize(out: Console, outcomes: Sequence[Outcome]) -> None:
    _head(out, "What was found")
    shown = empty_table()
    for column in ("damaged copy", "qload verify", "and with --against"):
        shown.add_column(column, overflow="fold")
    for each in outcomes:
        shown.add_row(each.name, _rules(each.alone), _rules(each.added))
    out.print(shown)
    alone = sum(each.alone.verdict != "ok" for each in outcomes)
    compared = sum(each.compared.verdict != "ok" for each in outcomes)
    out.print(
        Text(
            f"Of {len(outcomes)} damaged copies, qload verify finds {alone} alone, {compared} with --against."
        )
    )


def _rules(report: Report) -> str:
    """Ids of the rules with findings, in alphabetical order; `ok` without findings."""
    return ", ".join(sorted({finding.rule for finding in report.findings})) or "ok"


def _report(out: Console, report: Report) -> None:
    out.print(verdict_text(report))
    for part in finding_tables(report):
        out.print(part)


def _head(out: Console, text: str) -> None:
    out.print()
    out.rule(Text(text, "bold"), align="left", style="none")


def _command(out: Console, line: str) -> None:
    out.print(Text("$ ", "dim").append(line, "bold"), soft_wrap=True)  # one line, for copying


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=FOLDER)
@click.pass_context
def main(ctx: click.Context, folder: Path) -> None:
    """Inspect and verify two checkpoints, then damaged copies of them, which are written to FOLDER."""
    ctx.call_on_close(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)  # on small layers, starting threads takes longer than the work
    broken = demonstrate(stdout(), folder, models(), DAMAGES)
    for sentence in broken:
        stderr().print(Text("broken promise  ", "red").append(sentence, "none"))
    ctx.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
