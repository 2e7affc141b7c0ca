"""One request's tokens, for synchronous and asynchronous code."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kie.errors import InvalidRequestError
from kie.types import Completion, Token

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import Self

    from kie import _kie


class Stream:
    """An iterator and an async iterator over `Token`, and a context manager of either kind.

    Leaving the context cancels a request that has not finished. Tokens may be read from any
    thread, one reader at a time. Errors of the engine come out of the iterator, typed.
    """

    __slots__ = ("_core", "_waker")

    def __init__(self, core: _kie.Stream) -> None:
        self._waker: _Waker | None = None
        self._core = core

    def __iter__(self) -> Iterator[Token]:
        return self._core

    def __next__(self) -> Token:
        return next(self._core)

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        core = self._core
        while True:
            token = core.try_next()
            if token is not None:
                return token
            if core.finished:
                self._release()
                raise StopAsyncIteration
            if self._waker is not None and not self._waker.is_ours():
                self._release()
            if self._waker is None:
                # Look once more after arming: what came in between wrote to no descriptor.
                self._waker = _Waker(core.poll_fd())
            else:
                await self._wait(self._waker)

    @property
    def text_stream(self) -> TextStream:
        """The text alone, without the empty pieces; for `for` and `async for`."""
        return TextStream(self)

    @property
    def seed(self) -> int:
        """The seed in use, drawn if none was given."""
        return self._core.seed

    @property
    def finished(self) -> bool:
        """Whether the last token has been read."""
        return self._core.finished

    def read_available(self) -> list[Token]:
        """All tokens that are ready now; never waits. Empty and `finished`: that was all."""
        return self._core.read_available()

    def cancel(self) -> None:
        """Ends the request within one token, with reason `cancelled`. Safe from any thread."""
        self._core.cancel()

    def result(self) -> Completion:
        """Reads what is left and returns the whole completion.

        Waits for the end; asynchronous code awaits `aresult()`, or the stream itself.
        """
        return self._core.result()

    async def aresult(self) -> Completion:
        """Reads what is left and returns the whole completion; the event loop goes on meanwhile."""
        async for _ in self:
            pass
        return self._core.result()

    def __await__(self) -> Generator[Any, None, Completion]:
        return self.aresult().__await__()

    def _ipython_display_(self) -> None:
        """In a notebook the text grows in place, with a line of rates below it."""
        from kie import notebook

        notebook.show(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()
        if not self._core.finished:
            self._core.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)

    def __del__(self) -> None:
        # The descriptor is closed with the core: the loop must have forgotten it by then.
        self._release()

    async def _wait(self, waker: _Waker) -> None:
        """Until something new may be there; a cancelled task cancels the request."""
        try:
            await waker.wait()
        except BaseException:
            self._release()
            self._core.cancel()
            raise

    def _release(self) -> None:
        if self._waker is not None:
            self._waker.close()
            self._waker = None


class TextStream:
    """The pieces of text of a stream, none of them empty."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        for token in self._stream:
            if token.text:
                yield token.text

    async def __aiter__(self) -> AsyncIterator[str]:
        async for token in self._stream:
            if token.text:
                yield token.text


class _Waker:
    """The stream's eventfd in the running loop. One wake may stand for many tokens.

    In a fork it leaves both alone: descriptor and epoll set are still the parent's.
    """

    __slots__ = ("_fd", "_future", "_loop", "_pid")

    def __init__(self, fd: int) -> None:
        import asyncio

        self._fd = fd
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._loop.add_reader(fd, self._wake)

    def is_ours(self) -> bool:
        """Whether the running loop listens; a loop that has ended is left behind.

        Raises InvalidRequestError where another loop, or another task, reads the stream: one wake
        may stand for many tokens, so that one of two would wait for ever.
        """
        import asyncio

        here = self._loop is asyncio.get_running_loop()
        if here and self._future is None:
            return True
        if not here and not self._loop.is_running():
            return False
        other = "task" if here else "event loop"
        raise InvalidRequestError(
            f"the stream is read in another {other}",
            hint="a stream has one reader at a time; start a stream for each",
            context={"param": "stream"},
        )

    async def wait(self) -> None:
        """Until the engine has written since the last wake."""
        self._future = self._loop.create_future()
        try:
            await self._future
        finally:
            self._future = None

    def close(self) -> None:
        """Stops listening; the descriptor stays the engine's."""
        if os.getpid() == self._pid and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)

    def _wake(self) -> None:
        if os.getpid() != self._pid:
            if self._future is not None and not self._future.done():
                self._future.set_result(None)  # to find out that this is a fork
            return
        # Where the engine has reset the counter itself there is still something to look at.
        with suppress(BlockingIOError):
            os.read(self._fd, 8)
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
