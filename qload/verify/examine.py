"""`inspect` and `verify`: open a checkpoint as hostile input, and tell what it is and whether it is true."""

from collections.abc import Callable, Iterable
from contextlib import closing
from os import PathLike

from qload.errors import ArgumentError, QloadError, checked
from qload.formats import AWQConfig, GPTQConfig, Marlin24Config, MarlinConfig
from qload.loader import LayerDescription
from qload.spec import Role
from qload.storage import WeightStorage
from qload.verify import against as comparison
from qload.verify import notes, parallel
from qload.verify.report import Finding, LayerInfo, Report, finding_of
from qload.verify.rules import INSPECTED, RULES
from qload.verify.subject import Subject
from qload.verify.zero_points import convention, symmetric

GROUPED = (GPTQConfig, AWQConfig, MarlinConfig, Marlin24Config)
Progress = Callable[[str, int, int], None]


@checked
def inspect(path: str | PathLike[str]) -> Report:
    """What a checkpoint's layers are, from headers, `g_idx` and `qzeros` alone.

    A layer whose tensors contradict each other or the config is a finding. Nothing is raised for what
    the files hold.
    """
    with closing(Subject.open(path)) as subject:
        if subject.weights is None or subject.errors:
            return _unreadable(subject)
        found = [finding_of(layer) for layer in subject.layers.values() if isinstance(layer, QloadError)]
        for rule in INSPECTED:
            found += rule.check(rule, subject)
        return _report(subject, found, [])


@checked
def verify(
    path: str | PathLike[str],
    *,
    against: str | PathLike[str] | None = None,
    tp: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Whether a checkpoint is true: headers, then values, then meaning; `docs/rules` explains each rule.

    Parameters
    ----------
    path
        A safetensors file, a directory, or a sharded index.
    against
        Another checkpoint of the same model, quantized or plain, that every layer is compared with.
    tp
        Check too that every layer can be shared among this many ranks.
    progress
        Called with (stage, done, total) as the work goes on.

    Nothing is raised for what the files hold. Peak memory is a few pieces of some MiB.
    """
    if tp is not None and tp < 1:
        raise ArgumentError("tp", "at least 1", str(tp))
    with closing(Subject.open(path)) as subject:
        if subject.weights is None or subject.errors:
            return _unreadable(subject)
        found: list[Finding] = []
        told: list[str] = [*notes.flags(subject), *notes.readings(subject), *notes.subnormals(subject)]
        for done, rule in enumerate(RULES):
            _tell(progress, rule.tier, done, len(RULES))
            found += rule.check(rule, subject)
        _tell(progress, "meaning", len(RULES), len(RULES))
        if tp is not None:
            _sort(parallel.check(subject, tp), found, told)
        if against is not None:
            _compare(subject, against, found, told, progress)
        return _report(subject, found, told)


def _compare(
    subject: Subject,
    path: str | PathLike[str],
    found: list[Finding],
    told: list[str],
    progress: Progress | None,
) -> None:
    with closing(Subject.open(path)) as reference:
        if reference.weights is None or reference.errors:
            found += reference.errors
            return
        total = sum(1 for _ in subject.described())
        for done, item in enumerate(comparison.check(subject, reference)):
            _tell(progress, "against", min(done, total), total)
            _sort([item], found, told)
        _tell(progress, "against", total, total)


def _sort(items: Iterable[Finding | str], found: list[Finding], told: list[str]) -> None:
    for item in items:
        if isinstance(item, Finding):
            found.append(item)
        else:
            told.append(item)


def _tell(progress: Progress | None, stage: str, done: int, total: int) -> None:
    if progress is not None:
        progress(stage, done, total)


def _unreadable(subject: Subject) -> Report:
    return Report(subject.path, tuple(subject.errors), tuple(subject.notes), readable=False)


def _report(subject: Subject, found: list[Finding], told: list[str]) -> Report:
    assert subject.weights is not None
    storage = subject.weights.storage
    return Report(
        path=subject.path,
        findings=tuple(found),
        notes=(*subject.notes, *told),
        layers=tuple(_layer(storage, layer) for layer in subject.described()),
        claims={} if subject.claims is None else subject.claims.facts(),
    )


def _layer(storage: WeightStorage, layer: LayerDescription) -> LayerInfo:
    config = layer.format.config
    grouped = config if isinstance(config, GROUPED) else None
    scales = next((spec.name for spec in layer.specs if spec.role is Role.SCALE), "weight")
    return LayerInfo(
        prefix=layer.prefix,
        format=layer.format.weight_type.format,
        bits=grouped.bits if grouped else None,
        group_size=grouped.group_size if grouped else None,
        sym=_symmetric(storage, layer),
        act_order=_act_order(layer),
        shape=(layer.N, layer.K) if "K" in layer.sizes else (layer.N,),
        dtype=str(layer.dtypes[scales]).removeprefix("torch."),
        bytes=sum(storage.info(layer.names.full(spec.name)).nbytes for spec in layer.specs),
    )


def _symmetric(storage: WeightStorage, layer: LayerDescription) -> bool | None:
    if not isinstance(layer.format.config, GROUPED):
        return None
    return convention(layer) is None or all(same for _, _, same in symmetric(storage, layer))


def _act_order(layer: LayerDescription) -> bool | None:
    config = layer.format.config
    if not isinstance(config, GPTQConfig):
        return False if isinstance(config, MarlinConfig | Marlin24Config) else None
    return not bool((layer.facts["g_idx"] == config.in_order(layer.K)).all())
