"""Launches as a CUDA graph: captured from the stream once, launched by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella.backends.cuda.driver import check, driver


class Graph:
    """An executable graph.

    Args:
        stream: what is captured; nothing else uses it meanwhile.
        record: puts the launches on the stream.
        give_up: takes the graph when nothing refers to it any more; safe in a finalizer.
    """

    def __init__(
        self, stream: Any, record: Callable[[], None], give_up: Callable[[Any], None]
    ) -> None:
        self._give_up = give_up
        self._exec: Any = None
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver.cuStreamBeginCapture(stream, mode))
        try:
            record()
        except BaseException:
            driver.cuGraphDestroy(driver.cuStreamEndCapture(stream)[1])  # the stream is free again
            raise
        graph = check(driver.cuStreamEndCapture(stream))
        try:
            self._exec = check(driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def launch(self, stream: Any) -> None:
        """Put it on a stream."""
        check(driver.cuGraphLaunch(self._exec, stream))

    def __del__(self) -> None:
        if self._exec is not None:
            self._give_up(self._exec)
