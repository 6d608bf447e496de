"""Whether every layer can be shared among N ranks, told from headers and facts alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qload.errors import ArgumentError, CutError, DivideError
from qload.loader import Heads, LayerDescription, Part, Split
from qload.loader.cuts import share
from qload.parallel import Rank
from qload.plan.rank_counts import CANDIDATES, LawfulRanks, lawful_ranks
from qload.plan.sharing import usual_split
from qload.verify.report import Finding, finding_of
from qload.verify.subject import Subject


def world_sizes(tp: int | Sequence[int] | None) -> Sequence[int]:
    """The numbers of ranks that are asked for, each once; ArgumentError for less than 1, and for none."""
    if tp is None:
        return ()
    sizes = list(dict.fromkeys(tp if isinstance(tp, Sequence) else (tp,)))
    if not sizes or min(sizes) < 1:
        raise ArgumentError("tp", "at least 1", str(tp))
    return sizes


def check(subject: Subject, worlds: Sequence[int]) -> Iterator[Finding | str]:
    """For each number of ranks a finding for each layer that refuses its usual cut, and a note on the others.

    The remedy names the numbers of ranks that suit all layers. The note counts layers without a usual cut
    that can be cut neither way. Where the type of model is known, heads of attention have to stay whole.
    """
    cuts = [cut for layer in subject.described() if (cut := _usual_cut(subject, layer)) is not None]
    refused = {ranks: [(cut, error) for cut in cuts if (error := cut.refusal(ranks))] for ranks in worlds}
    lawful = _lawful(cuts) if any(refused.values()) else None
    for ranks in worlds:
        for _, error in refused[ranks]:
            finding = finding_of(error)
            own = error.hint.partition("remedy   ")[2] if isinstance(error, DivideError) else ""
            texts = ["" if lawful is None else lawful.text(), own]
            yield replace(
                finding,
                remedy="; or ".join(filter(None, texts)) or finding.remedy,
                cause=f"{finding.cause} ({ranks} ranks)",
            )
        unusual = [
            layer.prefix
            for layer in subject.described()
            if layer.K > 1
            and _usual_cut(subject, layer) is None
            and all(_Cut(layer, split).refusal(ranks) for split in ("N", "K"))
        ]
        if unusual:
            names = ", ".join(unusual[:4])
            yield f"for {ranks} ranks, {len(unusual)} other layers can be cut neither way: {names}"


@dataclass(frozen=True)
class _Cut:
    """How ranks usually share a layer: along `split`, or by whole `heads` of attention."""

    layer: LayerDescription
    split: Split
    heads: Heads | None = None

    def refusal(self, ranks: int) -> CutError | DivideError | None:
        """Why so many ranks cannot share the layer; heads of keys and values are repeated where few."""
        try:
            parts = [Part(self.layer.prefix)]
            if self.heads is not None:
                parts = self.heads.parts([(self.layer.prefix, self.layer.N)], ranks)
            for part in parts:
                share(self.layer, part, self.split, Rank(0, ranks), joined=part is not parts[-1])
        except (CutError, DivideError) as error:
            return error
        return None


def _usual_cut(subject: Subject, layer: LayerDescription) -> _Cut | None:
    """How ranks usually share a layer; None if no usual name tells."""
    heads = subject.architecture.heads(layer.prefix) if subject.architecture else None
    split = "N" if heads is not None else usual_split(layer.prefix)
    return None if split is None else _Cut(layer, split, heads)


def _lawful(cuts: Sequence[_Cut]) -> LawfulRanks | None:
    """Numbers of ranks that suit all layers; alike layers are asked once."""
    alike = {(id(cut.layer.cuts), cut.split, cut.heads): cut for cut in reversed(cuts)}
    return lawful_ranks(
        {
            cut.layer.prefix: [ranks for ranks in CANDIDATES if cut.refusal(ranks) is None]
            for cut in reversed(alike.values())
        }
    )
