"""What a module was made of: to know whether what was captured of it still stands."""

from __future__ import annotations

from operator import getitem, is_
from typing import Any

from centella.nn.module import Module, modules_in


class Tree:
    """The attributes of a module and of every module below it, as they are now.

    Args:
        module: lists, tuples and dicts of modules are followed, as `named_parameters` does.
    """

    def __init__(self, module: Module) -> None:
        self._homes: list[Any] = []  # of each attribute or element: the dict or list it is in
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._parents: list[Any] = []  # each dict and list, and how many there are in it
        self._sizes: list[int] = []
        self._add(vars(module))

    def _add(self, home: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> None:
        self._parents.append(home)
        self._sizes.append(len(home))
        for key, value in home.items() if isinstance(home, dict) else enumerate(home):
            self._homes.append(home)
            self._keys.append(key)
            self._values.append(value)
            if isinstance(value, Module):
                self._add(vars(value))
            elif isinstance(value, list) or (
                isinstance(value, tuple | dict) and next(modules_in(value), None)
            ):
                self._add(value)

    @property
    def changed(self) -> bool:
        """Whether an attribute was set, added or deleted since."""
        if list(map(len, self._parents)) != self._sizes:
            return True
        try:
            return not all(map(is_, map(getitem, self._homes, self._keys), self._values))
        except KeyError:  # one was deleted and another added
            return True
