"""Layouts and bind groups of one wgpu device, made once and found again."""

from __future__ import annotations

from typing import Any

import wgpu

from centella.backends.base import Launch, Window
from centella.backends.webgpu.raw import SLOT

MOST = 8192


class Groups:
    """What binds the operands of launches.

    Args:
        native: the wgpu device; stopped: what programs that report stopped loops write to.

    Attributes:
        epoch: how often groups were forgotten because they bind what is gone.
    """

    def __init__(self, native: Any, stopped: Any = None) -> None:
        self._native = native
        self._stopped = stopped
        self._layouts: dict[tuple[bool, ...], tuple[Any, Any]] = {}
        self._reporting: dict[tuple[bool, ...], tuple[Any, Any]] = {}
        self._known: dict[tuple[Any, ...], Any] = {}
        self.epoch: int = 0

    def layout(self, writable: tuple[bool, ...], reports: bool = False) -> tuple[Any, Any]:
        """The layout of a group of operands and parameters, and that of a pipeline with it."""
        known = self._reporting if reports else self._layouts
        layouts = known.get(writable)
        if layouts is None:
            compute = wgpu.ShaderStage.COMPUTE
            entries: list[dict[str, Any]] = [
                {"binding": i, "visibility": compute,
                 "buffer": {"type": "storage" if w else "read-only-storage"}}
                for i, w in enumerate(writable)
            ]  # fmt: skip
            uniform = {"type": "uniform", "has_dynamic_offset": True, "min_binding_size": 0}
            entries.append({"binding": len(writable), "visibility": compute, "buffer": uniform})
            if reports:
                stopped = {"binding": len(entries), "visibility": compute,
                           "buffer": {"type": "storage"}}  # fmt: skip
                entries.append(stopped)
            group = self._native.create_bind_group_layout(entries=entries)
            pipeline = self._native.create_pipeline_layout(bind_group_layouts=[group])
            layouts = known[writable] = (group, pipeline)
        return layouts

    def new(
        self, layout: Any, natives: list[Any], windows: tuple[Window | None, ...], params: Any
    ) -> Any:
        """A group of operands, each whole or by its window, and a slot of parameters."""
        places = [(0, n.size) for n in natives]
        for operand, window in enumerate(windows):
            places[operand] = window or places[operand]
        entries = [
            {"binding": i, "resource": {"buffer": n, "offset": start, "size": nbytes}}
            for i, (n, (start, nbytes)) in enumerate(zip(natives, places, strict=True))
        ]
        slot = {"buffer": params, "offset": 0, "size": SLOT}
        entries.append({"binding": len(natives), "resource": slot})
        if any(layout is group for group, _ in self._reporting.values()):
            stopped = {"buffer": self._stopped, "offset": 0, "size": self._stopped.size}
            entries.append({"binding": len(entries), "resource": stopped})
        return self._native.create_bind_group(layout=layout, entries=entries)

    def of_launches(self, launches: list[Launch], natives: list[Any], params: Any) -> list[Any]:
        """The groups of launches, as they were made before for the same buffers."""
        if len(self._known) > MOST:
            self._known.clear()
        groups: list[Any] = []
        for bound in launches:
            layout, operands = bound.pipeline[1], [natives[s] for s in bound.slots]
            identity = (id(layout), *map(id, operands), bound.windows)
            group = self._known.get(identity)
            if group is None:
                group = self._known[identity] = self.new(layout, operands, bound.windows, params)
            groups.append(group)
        return groups

    def forget(self, native: Any) -> None:
        """Forget the groups of a buffer, whose id may soon be another's."""
        for key in [k for k in self._known if id(native) in k]:
            del self._known[key]
        self.epoch += 1

    def clear(self) -> None:
        """Forget all: they bind parameters that are gone."""
        self._known.clear()
        self.epoch += 1
