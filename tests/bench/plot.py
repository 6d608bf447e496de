"""The ratio to the limit over the number of tokens, a line a layer; dotted: that of the best peer."""

from typing import Any


def ratios(rows: list[dict[str, Any]], path: str) -> None:
    """A PNG; needs matplotlib."""
    from matplotlib.figure import Figure

    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    figure = Figure(figsize=(8 * len(layouts), 5), layout="constrained")
    panels = figure.subplots(1, len(layouts), squeeze=False, sharey=True)[0]
    for axes, layout in zip(panels, layouts, strict=True):
        _panel(axes, [row for row in rows if row["layout"] == layout])
    figure.savefig(path, dpi=120)


def _is_time(time: object) -> bool:
    return isinstance(time, float)


def _panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    for shape in dict.fromkeys((row["K"], row["N"]) for row in rows):
        points = [row for row in rows if (row["K"], row["N"]) == shape and row["us"]]
        axes.plot(
            [row["M"] for row in points],
            [row["us"] / row["limit"] for row in points],
            marker="o",
            label=f"{shape[0]} x {shape[1]}",
        )
        peers = [min(filter(_is_time, row["peers"].values()), default=None) for row in points]
        beside = [(row["M"], time / row["limit"]) for row, time in zip(points, peers, strict=True) if time]
        if beside:  # the best peer, in the layer's colour
            axes.plot(*zip(*beside, strict=True), linestyle=":", color=axes.lines[-1].get_color())
    axes.set(xscale="log", xlabel="tokens (M)", ylabel="time / limit", ylim=(0, None))
    axes.set_xticks(sorted({row["M"] for row in rows}), [str(M) for M in sorted({row["M"] for row in rows})])
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_title(f"{rows[0]['layout']}, {rows[0]['bits']} bits, groups of {rows[0]['group']}")
    axes.legend(title="K x N")
