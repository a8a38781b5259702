"""Lines of the application's: where an op was recorded, a value made, an error comes from."""

from __future__ import annotations

import sys

from centella.errors import CentellaError

Site = tuple[str, int]
NOWHERE: Site = ("", 0)


def call_site(depth: int = 1) -> Site:
    """File and line of the nearest frame outside the library.

    Args:
        depth: callers that are known to be inside, and not looked at.
    """
    frame = sys._getframe(depth)
    while True:
        name = frame.f_code.co_filename
        inside = _inside.get(name)
        if inside is None:
            inside = _inside[name] = name.startswith(_OURS)
        if not inside or frame.f_back is None:
            return name, frame.f_lineno
        frame = frame.f_back


_OURS = call_site.__code__.co_filename.removesuffix("sites.py")  # the library's folder
_inside: dict[str, bool] = {}  # whether a source file lies in it


def line_of(site: Site) -> str:
    """A site as editors know it: file:line."""
    return f"{site[0]}:{site[1]}"


def blame(error: CentellaError, what: str, site: Site) -> None:
    """Put the op and the line that recorded it before an error's text."""
    label = f"{what} (recorded at {line_of(site)}): "
    if error.args and not str(error.args[0]).startswith(label):
        error.args = (label + str(error.args[0]), *error.args[1:])
