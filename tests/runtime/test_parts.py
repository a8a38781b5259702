"""Each part of a device, built on a backend without the parts above it."""

from __future__ import annotations

import numpy as np
import pytest

from centella import ContractError
from centella.backends.base import Backend
from centella.backends.opening import open_backend
from centella.dtypes import f32
from centella.ledger.call_sites import NOWHERE
from centella.op.op import get
from centella.record.recording import Recording
from centella.record.values import PENDING
from centella.runtime.executor import Executor
from centella.runtime.recorder import Recorder
from centella.runtime.replay import Replay
from centella.runtime.storage import Storage
from centella.specs import make_spec

X = np.arange(6, dtype=np.float32).reshape(2, 3)
SPEC = make_spec(X.shape, f32, 1)
BYTES = np.append(X, np.zeros(2, np.float32)).view(np.uint8)  # whole chunks


@pytest.fixture(params=["cpu", "simulator"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(request.param, None, {})


def test_an_executor_runs_a_recording(backend: Backend) -> None:
    executor = Executor(backend)
    recording = Recording(executor, explicit=True)
    value = recording.add_upload(SPEC, BYTES, NOWHERE)
    ticket = executor.run(recording, reads=[(value, 4, 8)])
    ticket.wait()
    assert ticket.data(0).view(np.float32).tolist() == [1, 2]
    with pytest.raises(ContractError, match="not computed yet"):
        other = Recording(executor, explicit=True)
        executor.read([(other.add_upload(SPEC, BYTES, NOWHERE), 0, 4)])


def test_storage_writes_and_reserves(backend: Backend) -> None:
    executor = Executor(backend)
    storage = Storage(executor)
    spec = storage.spec(X.shape, f32)
    value = storage.write(X, spec, NOWHERE)
    ticket = executor.read([(value, 0, 8)])
    ticket.wait()
    assert ticket.data(0).view(np.float32).tolist() == [0, 1]
    assert value.device is executor
    assert storage.reserve(spec).buffer is not None


def test_a_recorder_runs_what_is_needed(backend: Backend) -> None:
    executor = Executor(backend)
    storage = Storage(executor)
    recorder = Recorder(executor, storage)
    spec = storage.spec(X.shape, f32)
    x = recorder.upload(X, spec)
    (y,) = recorder.record(get("neg"), [(x, spec, 0)], {})
    assert y.state == PENDING and y.recording is recorder.implicit()
    ticket = executor.read([(y, 0, 12)])
    ticket.wait()
    assert ticket.data(0).view(np.float32).tolist() == [0, -1, -2]


def test_a_replay_runs_on_an_executor(backend: Backend) -> None:
    executor = Executor(backend)
    storage = Storage(executor)
    recorder = Recorder(executor, storage)
    x = storage.write(X, storage.spec(X.shape, f32), NOWHERE)
    recording = Recording(executor, explicit=True)
    (y,) = recorder.record(get("neg"), [(x, x.spec, 0)], {}, recording)
    replay = Replay(executor, recording, (), [y], [(y, 0, 12)], "neg")
    ticket = replay.fetch((), NOWHERE)
    ticket.wait()
    assert ticket.data(0).view(np.float32).tolist() == [0, -1, -2]
    assert replay.launches == 1
