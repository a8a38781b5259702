"""Ctrl-C at random moments of random work.

    python -m tests.support.interrupts webgpu 20000 [seed]

Each interrupt has to end the work as one KeyboardInterrupt, and what comes next has to be right. A
hang ends the process with the stacks of all threads and exit code 1. `test_interrupts.py` runs a
few hundred.
"""

from __future__ import annotations

import _thread
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

import centella as ct

BERT = Path(__file__).parents[1] / "data" / "tiny-bert"
HANG = 120.0  # seconds
LONGEST = 0.02  # seconds until an interrupt
TEXTS = ["one text", "another one, which is longer", "a third"]
X = np.arange(48, dtype=np.float32).reshape(6, 8) / 16


@ct.kernel(workgroup=64)
def twice(x: ct.In[ct.f32], y: ct.Out[ct.f32], n: ct.u32) -> None:
    i = ct.lang.global_id()
    with ct.lang.if_(i < n):
        y[i] = x[i] * 2.0


@ct.kernel(workgroup=64)
def bump(x: ct.InOut[ct.f32], n: ct.u32) -> None:
    i = ct.lang.global_id()
    with ct.lang.if_(i < n):
        x[i] = x[i] + 1.0


class Work:
    """Small pieces of work whose results are known."""

    def __init__(self, name: str) -> None:
        self.device = ct.device(name)
        self.x = ct.asarray(X, device=self.device)
        self.w = ct.asarray(X.T.copy(), device=self.device)
        self.counter = ct.State(np.zeros((16,), np.float32), device=self.device)
        self.replayed = ct.State(np.zeros((16,), np.float32), device=self.device)
        self.embedder = ct.load(BERT, device=self.device)
        self.texts = self.embedder.encode(TEXTS)
        self.product = (X @ X.T).astype(np.float32)

        @ct.jit(device=self.device)
        def step(x: ct.Tensor) -> ct.Tensor:
            bump(self.replayed, n=16, threads=16)
            return ct.relu(x @ self.w) + 1.0

        self.step = step
        self.pieces: list[Callable[[], None]] = [
            self.record, self.batch, self.replay, self.fetch, self.encode, self.kernel,
            self.change, self.capture, self.submit, self.ask, self.upload,
        ]  # fmt: skip

    def record(self) -> None:
        y = self.x
        for _ in range(random.randrange(1, 9)):
            y = y + 1.0 - 1.0
        np.testing.assert_array_equal(y.numpy(), X)

    def batch(self) -> None:
        with self.device.batch() as batch:
            x = batch.upload(X)
            y = ct.relu(x - 1.0)
        np.testing.assert_array_equal(y.numpy(), np.maximum(X - 1, 0))
        inside = ct.relu(self.x - 1.0)  # on no batch that an interrupt has left current
        np.testing.assert_array_equal(inside.numpy(), np.maximum(X - 1, 0))

    def replay(self) -> None:
        for _ in range(3):
            y = self.step(self.x)
        np.testing.assert_allclose(y.numpy(), self.product + 1, rtol=1e-5)

    def fetch(self) -> None:
        both = ct.fetch(self.x * 2.0, self.x @ self.w).result()
        np.testing.assert_array_equal(both[0], X * 2)
        np.testing.assert_allclose(both[1], self.product, rtol=1e-5)
        got = self.step.fetch(X).result()
        np.testing.assert_allclose(got, self.product + 1, rtol=1e-5)

    def encode(self) -> None:
        np.testing.assert_allclose(self.embedder.encode(TEXTS), self.texts, atol=1e-5)

    def kernel(self) -> None:
        y = ct.empty((6, 8), device=self.device)
        twice(self.x, y, n=48, threads=48)
        np.testing.assert_array_equal(y.numpy(), X * 2)

    def change(self) -> None:
        bump(self.counter, n=16, threads=16)
        for state in (self.counter, self.replayed):
            content = state.numpy()
            assert (content == content[0]).all() and content[0] % 1 == 0, content

    def capture(self) -> None:
        add = random.randrange(4)
        captured = self.device.compile(lambda x: x * 2.0 + float(add), self.x)
        np.testing.assert_array_equal(captured(self.x).numpy(), X * 2 + add)

    def submit(self) -> None:
        products = []
        for _ in range(random.randrange(1, 30)):
            with self.device.batch():
                products.append(self.x @ self.w)
        for product in products[-2:]:
            np.testing.assert_allclose(product.numpy(), self.product, rtol=1e-5)

    def ask(self) -> None:
        both = [ct.fetch(self.x * 2.0) for _ in range(random.randrange(1, 30))]
        np.testing.assert_array_equal(both[-1].result()[0], X * 2)

    def upload(self) -> None:
        rows = np.arange(1 << 16, dtype=np.float32) + random.random()
        for _ in range(random.randrange(1, 8)):
            y = ct.asarray(rows, device=self.device)
        np.testing.assert_array_equal(y.numpy(), rows)


class Sender:
    """A thread that sends one interrupt after each `send`."""

    def __init__(self) -> None:
        self._due = threading.Semaphore(0)
        self._delay = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, delay: float) -> None:
        self._delay = delay
        self._due.release()

    def _run(self) -> None:
        while True:
            self._due.acquire()
            time.sleep(self._delay)
            if random.random() < 0.5:
                _thread.interrupt_main()
            else:
                os.kill(os.getpid(), signal.SIGINT)


def main(name: str, interrupts: int, seed: int = 0) -> None:
    """Interrupt work on a device so many times."""
    random.seed(seed)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    faulthandler.dump_traceback_later(HANG, exit=True)
    work = Work(name)
    for piece in work.pieces:
        piece()
    sender = Sender()
    during: Counter[str] = Counter()
    spent = dict.fromkeys(work.pieces, 0.0)  # seconds, of which each is to have its share
    slowest = 0.0
    piece = work.record
    for number in range(interrupts):
        faulthandler.dump_traceback_later(HANG, exit=True)
        delay = random.random() * LONGEST
        begin = start = time.perf_counter()
        try:
            sender.send(delay)
            while True:
                piece = min(random.sample(work.pieces, 3), key=spent.__getitem__)
                start = time.perf_counter()
                piece()
                spent[piece] += time.perf_counter() - start
        except KeyboardInterrupt:
            slowest = max(slowest, time.perf_counter() - begin - delay)
            spent[piece] += time.perf_counter() - start
        during[piece.__name__] += 1
        for piece in random.sample(work.pieces, 2) if number % 50 else work.pieces:
            piece()
        if number % 1000 == 999:
            print(f"{number + 1} interrupts", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"{interrupts} interrupts on {name}, the slowest after {slowest:.2f} s: {dict(during)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:]))
