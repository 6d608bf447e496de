"""Text that may come from a hostile file, made safe to print."""

NAME_LIMIT = 300
TEXT_LIMIT = 4000


def safe(text: object, *, keep: str = "", limit: int = TEXT_LIMIT) -> str:
    """What cannot be printed (escape sequences, controls, lone surrogates, text that turns direction) is
    shown as Python writes it; what is too long is cut, and says so."""
    shown = str(text)
    if len(shown) > limit:
        shown = f"{shown[:limit]}... ({len(shown)} characters)"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in shown)


def name(text: str) -> str:
    """A tensor's or a file's name: one line, whatever is in it."""
    return safe(text, limit=NAME_LIMIT)


def size(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def percent(part: int, whole: int) -> str:
    """(1, 3) -> '33.3 %'; 0 and 100 % are said of nothing and of all alone."""
    if part in (0, whole):
        return "100 %" if part == whole else "0 %"
    tenths = min(max(part * 1000 // whole, 1), 999)
    return f"{tenths / 10:g} %"


def plural(count: int, noun: str) -> str:
    """1 layer, 2 layers."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
