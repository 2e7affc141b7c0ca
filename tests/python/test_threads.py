"""Streams read from threads, next to busy threads, across forks and under Ctrl-C."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import kie
import pytest
from conftest import TINY


def test_streams_of_many_threads_do_not_mix(engine: kie.Engine) -> None:
    def one(seed: int) -> tuple[int, ...]:
        with engine.stream(
            f"thread {seed}", max_tokens=60, temperature=1.0, seed=seed, ignore_eos=True
        ) as stream:
            return tuple(i for token in stream for i in token.token_ids)

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(one, range(24)))
    for seed in (0, 7, 23):
        alone = engine.generate(
            f"thread {seed}", max_tokens=60, temperature=1.0, seed=seed, ignore_eos=True
        )
        assert alone.token_ids == results[seed]


def test_a_stream_may_be_cancelled_from_another_thread(demo: kie.Engine) -> None:
    with demo.stream("def f", max_tokens=1900, ignore_eos=True) as stream:
        next(stream)
        timer = threading.Timer(0.05, stream.cancel)
        timer.start()
        done = stream.result()
        timer.join()
    assert done.finish_reason == "cancelled"


def test_a_busy_thread_does_not_stall_the_engine(demo: kie.Engine) -> None:
    def gaps() -> list[float]:
        with demo.stream("def f", max_tokens=300, temperature=0, ignore_eos=True) as stream:
            moments = [token.t_ns for token in stream]
        return [(after - before) / 1e3 for before, after in pairwise(moments)]

    quiet = statistics.median(gaps())
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    busy = threading.Thread(target=spin)
    busy.start()
    try:
        beside = statistics.median(gaps())
    finally:
        stop.set()
        busy.join()
    # An engine that needed the interpreter would wait for it 5 ms a token. The busy thread takes
    # a core from the team, so that the work itself may take up to a few times as long.
    assert beside < max(5 * quiet, 2_500)


def test_python_adds_little_to_a_ready_token(engine: kie.Engine) -> None:
    costs: list[float] = []
    for _ in range(4):
        with engine.stream("abc", max_tokens=400, ignore_eos=True) as stream:
            # Long enough for all tokens to be there.
            time.sleep(0.5)
            start = time.perf_counter()
            count = sum(1 for token in stream if token.index >= 0)
            costs.append((time.perf_counter() - start) * 1e6 / count)
    assert min(costs) <= 3.0


def call_raises_forked(call: Callable[[], object]) -> bool:
    """Whether `call` says that the engine belongs to the parent."""
    try:
        call()
    except kie.KieError as error:
        return isinstance(error, kie.EngineClosedError) and error.code == "forked"
    except BaseException:
        return False
    return False


def test_a_forked_child_raises_and_exits(engine: kie.Engine) -> None:
    stream = engine.stream("abc", max_tokens=300, ignore_eos=True)
    child = os.fork()
    if child == 0:
        calls = (lambda: engine.generate("abc"), engine.session, stream.result, stream.cancel)
        os._exit(sum(call_raises_forked(call) is False for call in calls))
    deadline = time.monotonic() + 10
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status[1]) == 0
    assert len(stream.result().token_ids) == 300


def test_a_child_that_ends_in_the_usual_way_does_not_hang() -> None:
    script = f"""
        import multiprocessing, kie
        engine = kie.Engine({str(TINY)!r}, threads=1)
        stream = engine.stream("abc", max_tokens=5)
        def child():
            global engine, stream
            del engine, stream
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start(); process.join(20)
        assert process.exitcode == 0, process.exitcode
        assert stream.result() is not None
        engine.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_ctrl_c_is_noticed_while_waiting() -> None:
    # The only slot is taken by a long prompt's request, so that the second stream waits.
    script = f"""
        import os, signal, threading, time, kie
        engine = kie.Engine({str(TINY)!r}, threads=1, max_batch=1)
        first = engine.stream([1] * 100, max_tokens=400, ignore_eos=True)
        requests = [engine.stream([1] * 100, max_tokens=400, ignore_eos=True) for _ in range(60)]
        def press():
            global pressed
            time.sleep(0.05)
            pressed = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press).start()
        try:
            requests[-1].result()
        except KeyboardInterrupt:
            print(time.monotonic() - pressed)
        for request in [first, *requests]:
            request.cancel()
        engine.close()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert float(result.stdout) < 0.1
