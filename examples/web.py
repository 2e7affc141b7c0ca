"""A web handler in asyncio: every request streams its own completion, none blocks the loop.

    python examples/web.py [PORT]      then: curl 'http://127.0.0.1:8080/?prompt=def+mean(values):'

Nothing but the standard library and kie. A client that leaves ends its request. For OpenAI's
clients there is `kie serve`; this is how kie sits inside a server of your own.
"""

from __future__ import annotations

import asyncio
import sys
from urllib.parse import parse_qs, urlsplit

import kie

HEAD = "HTTP/1.1 {} \r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"


async def answer(
    engine: kie.Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One request: text as it is generated, until the end or until the client leaves."""
    line = (await reader.readline()).decode("latin-1").split()
    query = parse_qs(urlsplit(line[1]).query) if len(line) == 3 else {}
    try:
        prompt = query["prompt"][0]
        stream = engine.stream(prompt, temperature=0, max_tokens=64, timeout=30)
    except (KeyError, kie.InvalidRequestError, kie.QueueFullError) as error:
        writer.write((HEAD.format("400 Bad Request") + f"{error}\n").encode())
    else:
        writer.write(HEAD.format("200 OK").encode())
        async with stream:  # leaving it cancels what has not ended
            async for text in stream.text_stream:
                writer.write(text.encode())
                await writer.drain()
    await writer.drain()
    writer.close()


async def main() -> None:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
    with kie.Engine() as engine:

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await answer(engine, reader, writer)
            except ConnectionError:
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", port)
        host, taken = server.sockets[0].getsockname()[:2]
        print(f"http://{host}:{taken}/", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
