"""The same streams in event loops."""

from __future__ import annotations

import asyncio
import os
import time

import kie


def test_async_iteration_is_sync_iteration(engine: kie.Engine) -> None:
    async def read() -> tuple[list[kie.Token], kie.Completion]:
        async with engine.stream("abc", max_tokens=60, temperature=0, ignore_eos=True) as stream:
            tokens = [token async for token in stream]
            return tokens, stream.result()

    tokens, done = asyncio.run(read())
    assert (
        done.token_ids
        == engine.generate("abc", max_tokens=60, temperature=0, ignore_eos=True).token_ids
    )
    assert "".join(token.text for token in tokens) == done.text
    assert [token.index for token in tokens] == list(range(60))


def test_many_tasks_and_a_loop_that_stays_alive(engine: kie.Engine) -> None:
    async def one(seed: int) -> tuple[int, ...]:
        async with engine.stream(
            f"task {seed}", max_tokens=80, temperature=1.0, seed=seed, ignore_eos=True
        ) as stream:
            return tuple([i async for token in stream for i in token.token_ids])

    async def ticks(counted: list[float]) -> None:
        while True:
            counted.append(time.monotonic())
            await asyncio.sleep(0.001)

    async def main() -> list[tuple[int, ...]]:
        counted: list[float] = []
        ticker = asyncio.create_task(ticks(counted))
        results = await asyncio.gather(*(one(seed) for seed in range(12)))
        ticker.cancel()
        assert len(counted) > 5
        return list(results)

    results = asyncio.run(main())
    for seed, ids in enumerate(results):
        alone = engine.generate(
            f"task {seed}", max_tokens=80, temperature=1.0, seed=seed, ignore_eos=True
        )
        assert alone.token_ids == ids


def test_text_stream_in_async_code(engine: kie.Engine) -> None:
    async def read() -> tuple[str, str]:
        async with engine.stream("abc", max_tokens=20, ignore_eos=True) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            return text, stream.result().text

    text, whole = asyncio.run(read())
    assert text == whole


def test_a_cancelled_task_cancels_its_request(demo: kie.Engine) -> None:
    streams: list[kie.Stream] = []

    async def read() -> None:
        stream = demo.stream("def f", max_tokens=1900, ignore_eos=True)
        streams.append(stream)
        async for _ in stream:
            pass

    async def main() -> None:
        task = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return
        raise AssertionError("the cancellation was swallowed")

    asyncio.run(main())
    done = streams[0].result()
    assert done.finish_reason == "cancelled"
    assert len(done.token_ids) < 1900


def test_leaving_the_context_early_cancels(demo: kie.Engine) -> None:
    async def main() -> kie.Stream:
        async with demo.stream("def f", max_tokens=1900, ignore_eos=True) as stream:
            async for token in stream:
                if token.index == 3:
                    break
        return stream

    assert asyncio.run(main()).result().finish_reason == "cancelled"


def test_waiting_costs_no_processor_time(engine: kie.Engine) -> None:
    async def main() -> float:
        with engine.stream("abc", max_tokens=400, ignore_eos=True) as blocker:
            await asyncio.sleep(0.05)
            blocker.read_available()
        async with engine.stream("abc", max_tokens=2, ignore_eos=True) as stream:
            assert [token.index async for token in stream] == [0, 1]
        before = time.process_time()
        await asyncio.sleep(0.5)
        return time.process_time() - before

    assert asyncio.run(main()) < 0.25


def test_a_forked_child_leaves_its_parents_wakes_alone(demo: kie.Engine) -> None:
    async def run() -> tuple[int, int]:
        async with demo.stream("def f", max_tokens=400, ignore_eos=True) as stream:
            await anext(stream)
            while stream._waker is None:
                await anext(stream)
            child = os.fork()
            if child == 0:
                os._exit(touch(stream))
            count = 2
            async for token in stream:
                count += token.index > 1
            return count, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def touch(stream: kie.Stream) -> int:
        """Every way in: each says that this is a fork, and reads nothing of the parent's."""
        wrong = 0
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            for call in (
                lambda: asyncio.new_event_loop().run_until_complete(stream.__anext__()),
                lambda: next(stream),
                stream.read_available,
                stream.result,
                stream._core.try_next,
                stream._core.poll_fd,
                demo.info,
                demo.metrics,
                demo.session,
                lambda: demo.tokenize("x"),
                lambda: demo.logits([1]),
                demo.warmup,
            ):
                try:
                    call()
                    wrong += 1
                except kie.EngineClosedError as error:
                    wrong += error.code != "forked"
            if stream._waker is not None:
                stream._waker._wake()
        stream._release()
        return min(wrong, 100)

    counts = asyncio.run(asyncio.wait_for(run(), 60))
    assert counts[1] == 0
    assert counts[0] >= 300


def test_a_generation_is_awaited_and_cancelled_with_its_task(demo: kie.Engine) -> None:
    wanted = demo.generate("def f(", temperature=0, max_tokens=20).token_ids

    async def main() -> None:
        one, two = await asyncio.gather(
            demo.agenerate("def f(", temperature=0, max_tokens=20),
            demo.agenerate(messages=[{"role": "user", "content": "hi"}], max_tokens=5),
        )
        assert one.token_ids == wanted
        assert two.usage.completion_tokens <= 5
        stream = demo.stream("def f(", temperature=0, max_tokens=20)
        assert (await stream).token_ids == wanted
        assert (await stream.aresult()).token_ids == wanted
        task = asyncio.create_task(demo.agenerate("def f(", max_tokens=1500, ignore_eos=True))
        await asyncio.sleep(0.05)
        before = demo.metrics()["requests_cancelled"]
        task.cancel()
        while demo.metrics()["requests_cancelled"] == before:
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(main(), 60))
