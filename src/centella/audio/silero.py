"""Silero's voice activity network, from the user's own ONNX file: onnxruntime runs it on the CPU.

    probability, state = network(end of the previous window + window, state, rate)

A window has 512 samples at 16 kHz. Each needs the state that the previous one left, so the windows
of a recording run one after the other, not in batches. Names, types and shapes are read from the
file and compared with the published interfaces, and one window of silence is run when the file is
opened, so another network is refused at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from centella.audio.mel import RATE, Array
from centella.errors import DTypeError, MissingExtraError, WeightsError

WINDOW = 512  # samples that one run of the network reads
_SHOWN = 300  # characters of a message of onnxruntime, or of a list of names

States = dict[str, Array]
Input = tuple[str, list[Any]]  # type and shape; an axis of any length has a name or None


class Interface(Struct, frozen=True):
    """Inputs and outputs of the network in some of its versions.

    Attributes:
        version: as published.
        context: samples of the previous window that precede those of a window.
        states: inputs that carry state, each with the output that is its next value.
        width: last axis of a state, [2, batch, width].
    """

    version: str
    context: int
    states: dict[str, str]
    width: int

    @property
    def inputs(self) -> dict[str, tuple[str, list[int]]]:
        """Type and shape of each input, for one recording."""
        states = {name: ("float", [2, 1, self.width]) for name in self.states}
        window = ("float", [1, self.context + WINDOW])
        return {"input": window, **states, "sr": ("int64", [])}

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs: the probability, then the states."""
        return ["output", *self.states.values()]

    def __str__(self) -> str:
        inputs = ", ".join(f"{name} {kind} {dims}" for name, (kind, dims) in self.inputs.items())
        return f"{self.version}: inputs {inputs}; outputs {', '.join(self.outputs)}"


INTERFACES = (
    Interface("v5 and v6", 64, {"state": "stateN"}, 128),
    Interface("v4", 0, {"h": "hn", "c": "cn"}, 64),
)


class SileroModel:
    """Silero's network, opened from a file; threads may share it.

    Args:
        path: of `silero_vad.onnx`, version 4, 5 or 6. centella contains none and downloads none.

    Attributes:
        path: as given.
        context: samples of the previous window that a window needs: 64, or 0 for version 4.

    Raises:
        WeightsError: a file that cannot be read, is not ONNX, or has another interface; the text
            states the expected interface and that of the file. DTypeError: no path.
        MissingExtraError: onnxruntime is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.path: str = os.fsdecode(path)
        except TypeError as error:
            raise DTypeError(
                f"silero: expected the path of an ONNX file, got {type(path).__name__}"
            ) from error
        self._session, inputs, outputs = _open(self.path)
        self._interface = _interface(self.path, inputs, outputs)
        self.context: int = self._interface.context
        self._rate = np.full([1] * len(inputs["sr"][1]), RATE, np.int64)
        self.step(np.zeros(self.context + WINDOW, np.float32), self.silence())

    def __repr__(self) -> str:
        return f"SileroModel({self.path!r})"

    def silence(self) -> States:
        """The state before the first window: zeros."""
        inputs = self._interface.inputs
        return {name: np.zeros(inputs[name][1], np.float32) for name in self._interface.states}

    def step(self, samples: Array, states: States) -> tuple[float, States]:
        """The probability of speech in a window, and the state after it.

        Args:
            samples: f32 [context + 512], at 16 kHz.
            states: what `silence` or the previous step returned.

        Raises:
            WeightsError: the network fails, or gives no probability.
        """
        inputs = {"input": samples.reshape(1, -1), "sr": self._rate, **states}
        try:
            output, *after = self._session.run(self._interface.outputs, inputs)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise WeightsError(f"{self.path}: onnxruntime: {_in_short(error)}") from error
        if output.size != 1 or not 0.0 <= output.item() <= 1.0:
            raise WeightsError(
                f"{self.path}: expected output of one probability, got {_in_short(output.tolist())}"
            )
        return output.item(), dict(zip(self._interface.states, after, strict=True))


class SileroLevels:
    """Probabilities of speech of consecutive windows of 32 ms.

    Attributes:
        per_second: windows a second.
        threshold: the probability at which speech begins, unless the rules name one.
    """

    per_second: float = RATE / WINDOW
    threshold: float = 0.5

    def __init__(self, model: SileroModel) -> None:
        self._model = model
        self._states = model.silence()
        self._samples = np.zeros(model.context, np.float32)  # the next window's context, and more

    def push(self, samples: Array) -> list[float]:
        """Probabilities of the windows that are complete with these samples [n]."""
        self._samples = np.concatenate([self._samples, samples])
        whole = (len(self._samples) - self._model.context) // WINDOW * WINDOW
        levels = [self._step(first) for first in range(0, whole, WINDOW)]
        self._samples = self._samples[whole:]
        return levels

    def finish(self) -> list[float]:
        """The probability of the last window, padded with zeros, if it has samples."""
        left = len(self._samples) - self._model.context
        return self.push(np.zeros(WINDOW - left, np.float32)) if left else []

    def _step(self, first: int) -> float:
        window = self._samples[first : first + self._model.context + WINDOW]
        level, self._states = self._model.step(window, self._states)
        return level


def _open(path: str) -> tuple[Any, dict[str, Input], list[str]]:
    """A session of one thread, as a window is too small for two; its inputs and outputs."""
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "silero") from error
    try:
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(
            f"{path}: expected Silero's ONNX file, it cannot be read: {reason}"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what is wrong is raised: it need not go to stderr, too
    try:
        session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
        inputs = {i.name: (i.type[len("tensor(") : -1], i.shape) for i in session.get_inputs()}
        return session, inputs, [output.name for output in session.get_outputs()]
    except Exception as error:  # as in `SileroModel.step`
        reason = _in_short(str(error).replace(f"Load model from {path} failed:", ""))
        raise WeightsError(f"{path}: expected Silero's ONNX file; onnxruntime: {reason}") from error


def _interface(path: str, inputs: Mapping[str, Input], outputs: Sequence[str]) -> Interface:
    """The published interface that the file has."""
    for known in INTERFACES:
        if inputs.keys() == known.inputs.keys() and set(known.outputs) <= set(outputs):
            if all(_fits(inputs[name], *known.inputs[name]) for name in inputs):
                return known
            break
    taken = ", ".join(f"{name} {kind} {dims}" for name, (kind, dims) in inputs.items())
    expected = "; or ".join(map(str, INTERFACES))
    raise WeightsError(
        f"{path}: expected the interface of Silero's network, {expected}; "
        f"got inputs {_in_short(taken)}; outputs {_in_short(', '.join(outputs))}"
    )


def _fits(declared: Input, kind: str, dims: list[int]) -> bool:
    """Whether an input takes an array of a type and shape; a single number may have axes of 1."""
    shape = declared[1]
    if declared[0] != kind or (dims and len(shape) != len(dims)):
        return False
    known = dims or [1] * len(shape)
    return all(not isinstance(a, int) or a == b for a, b in zip(shape, known, strict=True))


def _in_short(said: object) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(str(said).split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]} ..."
