"""Replicas of one model on Ray Serve, with the paths of `kie serve` (extra `kie[ray]`).

    client ─ Ray's proxy ─ Ingress ─ PrefixRouter ─ Replica (engine, and the server of `kie serve`)

Invariants:
- A replica answers with kie's own server, on loopback: fields, errors and streams are said in one
  place. The ingress carries bytes and reads a request only to find where its beginning is known.
- A request whose replica dies is sent to another one as long as the client has heard nothing.
  After that its stream ends with an error in the form of its API.
- The ingress drops an answer when its client leaves; the replica then closes its connection, which
  ends the request.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

try:
    import aiohttp
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import RequestRouterConfig
    from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError
    from ray.serve.request_router import RequestRouter
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response, StreamingResponse
    from yarl import URL
except ImportError as cause:
    raise ImportError(f"kie.serve_ray: {cause}: pip install 'kie[ray]'") from cause

BLOCK = 256
"""Characters that a hash of a prompt's beginning goes on by."""
BLOCKS_MAX = 4096
"""Most hashes of a request."""
HELD_MAX = 65_536
"""Hashes that are remembered of a replica."""
TRIES = 3
"""How many replicas a request is sent to at most."""
NOT_OURS = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "upgrade"}
NOT_OURS |= {"transfer-encoding", "expect"}
"""Headers of one connection."""

LOST = (RayError, RayServeException, ConnectionError)
"""What a replica that died, or that could not be reached, leaves behind."""
REPLICA_HEADER = "x-kie-replica"
"""Says which replica answered."""

Head = tuple[int, list[tuple[str, str]]]
"""Status and headers of an answer."""


def application(
    model: str | None = None,
    *,
    replicas: int = 2,
    autoscaling: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    actor: Mapping[str, Any] | None = None,
    drain_s: float = 30.0,
    imbalance: int = 8,
) -> serve.Application:
    """What `serve.run` takes: an ingress and replicas of `model`.

    Args:
        model: a folder or hub id that every node can read; None: the model of the package.
        replicas: how many; not looked at with `autoscaling`.
        autoscaling: Ray's `autoscaling_config`, such as {"min_replicas": 1, "max_replicas": 4,
            "target_ongoing_requests": 8}.
        engine: keywords of `kie.Engine`.
        server: options of the replicas' servers as `kie serve` has them, such as "api_key",
            "served_model_name", "max_body_mb".
        actor: Ray's `ray_actor_options` of a replica, such as {"num_gpus": 1}.
        drain_s: how long requests of a replica that is taken away may go on, in seconds.
        imbalance: a replica that knows a prompt's beginning is passed over when it has this many
            requests more than the one with the fewest.
    """
    keywords = dict(engine or {})
    options = {"drain_s": drain_s, **(server or {})}
    ongoing = keywords.get("max_batch", 8) + keywords.get("max_queue", 64)
    count: dict[str, Any] = {"num_replicas": replicas}
    if autoscaling is not None:
        count = {"autoscaling_config": dict(autoscaling)}
    router: dict[str, Any] = {
        "request_router_class": "kie.serve_ray:PrefixRouter",
        "request_router_kwargs": {"imbalance": imbalance},
        "request_routing_stats_period_s": 2.0,
    }
    replica = serve.deployment(
        Replica,
        name="kie-replica",
        # The engine refuses what is more, with the time after which to ask again.
        max_ongoing_requests=ongoing + 8,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=drain_s,
        ray_actor_options=dict(actor or {}),
        request_router_config=RequestRouterConfig(**router),
        **count,
    )
    ingress = serve.deployment(
        Ingress,
        name="kie-ingress",
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=drain_s,
        ray_actor_options={"num_cpus": 0},
    )
    most = int(options.get("max_body_mb", 8)) << 20
    return ingress.bind(replica.bind(model, keywords, options), most)


class Replica:
    """One engine, and kie's server in front of it."""

    def __init__(
        self, model: str | None, engine: Mapping[str, Any], server: Mapping[str, Any]
    ) -> None:
        from kie import _kie
        from kie.engine import Engine

        self._server = _kie.Server(host="127.0.0.1", port=0, **server)
        self._drain_s = float(server["drain_s"])
        self._engine = Engine(model, **engine)
        self._server.serve(self._engine.core())
        host, port = self._server.address()
        self._url = f"http://{host}:{port}"
        self._client: aiohttp.ClientSession | None = None
        self._known = Known()

    async def ask(
        self,
        method: str,
        path: str,
        headers: list[tuple[str, str]],
        body: bytes,
        prefix: list[int],
    ) -> AsyncGenerator[Head | bytes, None]:
        """Status and headers, then the body in pieces."""
        self._known.add(prefix)
        if self._client is None:
            # A connection a request: closing it is how a request is ended.
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        url = URL(self._url + path, encoded=True)
        asked = self._client.request(
            method, url, headers=headers, data=body or None, skip_auto_headers=SILENT
        )
        async with asked as answer:
            name = serve.get_replica_context().replica_id.unique_id
            yield answer.status, [*passed_on(answer.headers.items()), (REPLICA_HEADER, name)]
            async for piece in answer.content.iter_any():
                yield piece

    def check_health(self) -> None:
        """Raises where Ray is to replace the replica."""
        if self._engine.closed:
            raise RuntimeError("the engine is closed")

    def record_routing_stats(self) -> dict[str, Any]:
        """Beginnings that were computed here, for the routers of other ingresses."""
        return {"prefixes": self._known.newest(BLOCKS_MAX)}

    def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            server.drain()
            server.wait(self._drain_s)


SILENT = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""What aiohttp would add."""


class Known:
    """Hashes of beginnings, the oldest forgotten first."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def add(self, prefix: Iterable[int]) -> None:
        for block in prefix:
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > HELD_MAX:
            self._held.popitem(last=False)

    def newest(self, most: int) -> list[int]:
        return list(self._held)[-most:]

    def length(self, prefix: list[int]) -> int:
        """How many blocks from the first on are known."""
        return next((n for n, block in enumerate(prefix) if block not in self), len(prefix))


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has computed the longest beginning of its prompt.

    What this router sent where it knows at once; what others sent comes with the replicas' stats.
    """

    def initialize_state(self, imbalance: int = 8, **_: Any) -> None:
        """Keywords of `request_router_kwargs`."""
        self._imbalance = imbalance
        self._known: dict[Any, Known] = {}

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Ranks of replicas, the best first."""
        prefix = prefix_of(pending_request)
        loads = {r: self.replica_queue_len_cache.get(r.replica_id) or 0 for r in candidate_replicas}
        known = {replica: self._length(replica, prefix) for replica in candidate_replicas}
        held = {r: len(self._known.get(r.replica_id, ())) for r in candidate_replicas}
        return ranks(loads, known, held, self._imbalance)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Remembers what the replica is about to compute."""
        self._known.setdefault(replica_id, Known()).add(prefix_of(pending_request))
        gone = self._known.keys() - self.curr_replicas.keys() - {replica_id}
        for one in gone:
            del self._known[one]

    def _length(self, replica: Any, prefix: list[int]) -> int:
        own = self._known.get(replica.replica_id)
        told = set((replica.routing_stats or {}).get("prefixes", ()))
        of_others = next((n for n, b in enumerate(prefix) if b not in told), len(prefix))
        return max(own.length(prefix) if own else 0, of_others)


def prefix_of(pending_request: Any) -> list[int]:
    """The hashes that the ingress sent along."""
    return list(pending_request.kwargs.get("prefix", ())) if pending_request else []


def ranks(
    loads: Mapping[Any, int], known: Mapping[Any, int], held: Mapping[Any, int], imbalance: int
) -> list[list[Any]]:
    """Replicas in order: those not overloaded by what they know of the prompt, then the others.

    Of those that know as much, the one with less to do comes first, then the one that holds less.
    """
    order = list(loads)
    random.shuffle(order)
    fewest = min(loads.values(), default=0)

    def place(replica: Any) -> tuple[bool, int, int, int]:
        overloaded = loads[replica] - fewest >= imbalance
        return overloaded, -known[replica], loads[replica], held[replica]

    return [[replica] for replica in sorted(order, key=place)]


def prefix_hashes(body: bytes) -> list[int]:
    """Hashes of a request's prompt: the n-th is of its first n blocks of text."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(asked, dict):
        return []
    # Tools and system text stand before the messages in every template.
    fields = ("model", "tools", "system", "instructions", "prompt", "input", "messages")
    texts: list[str] = []
    for value in (asked[name] for name in fields if asked.get(name)):
        parts = value if isinstance(value, list) else [value]
        texts += [part if isinstance(part, str) else json.dumps(part) for part in parts]
    text = "\n".join(texts)
    hashes: list[int] = []
    digest = b""
    for at in range(0, min(len(text) - BLOCK + 1, BLOCK * BLOCKS_MAX), BLOCK):
        block = text[at : at + BLOCK].encode(errors="surrogatepass")
        digest = blake2b(digest + block, digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "big"))
    return hashes


def passed_on(headers: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Headers that are not of one connection."""
    return ((name, value) for name, value in headers if name.lower() not in NOT_OURS)


class Ingress:
    """Takes HTTP requests and hands them to replicas."""

    def __init__(self, replica: Any, body_bytes_max: int) -> None:
        self._replica = replica.options(stream=True, method_name="ask")
        self._most = body_bytes_max

    async def __call__(self, request: Request) -> Response:
        """One request."""
        path = request.url.path
        body = await self._body(request)
        if body is None:
            return failure(path, 413, f"body: wanted at most {self._most} bytes")
        # As it came: what a client has escaped is the replica's to read.
        target = (request.scope.get("raw_path") or quote(path).encode()).decode("latin-1")
        if request.url.query:
            target += f"?{request.url.query}"
        asked: dict[str, Any] = {
            "method": request.method,
            "path": target,
            "headers": list(passed_on(request.headers.items())),
            "body": body,
            "prefix": await asyncio.to_thread(prefix_hashes, body) if body else [],
        }
        lost: Exception | None = None
        for _ in range(TRIES):
            pieces = self._replica.remote(**asked)
            try:
                return await answer(path, pieces)
            except BackPressureError:
                return failure(path, 429, "the queue is full")
            except RequestCancelledError:
                raise
            except LOST as error:
                lost = error
            except BaseException:
                pieces.cancel()
                raise
        return failure(path, 503, f"no replica could answer: {type(lost).__name__}")

    async def _body(self, request: Request) -> bytes | None:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._most:
                return None
        return bytes(body)


async def answer(path: str, pieces: Any) -> Response:
    """The answer that `pieces` begin: an event stream goes on while it comes, all else is whole.

    Raises what the replica failed with before the client could hear anything.
    """
    status, headers = await anext(pieces)
    kind = next((value for name, value in headers if name.lower() == "content-type"), "")
    if not kind.startswith("text/event-stream"):
        body = b"".join([piece async for piece in pieces])
        return with_headers(Response(body, status), headers)
    # What fails before the first bytes can still be asked elsewhere.
    first = await anext(pieces, b"")
    return with_headers(StreamingResponse(events(path, first, pieces), status), headers)


def with_headers(response: Response, headers: Iterable[tuple[str, str]]) -> Response:
    """The response with a replica's headers."""
    for name, value in headers:
        response.headers[name] = value
    return response


async def events(path: str, first: bytes, pieces: Any) -> AsyncIterator[bytes]:
    """A stream in whole events; where its replica is lost, an error ends it."""
    held: bytes = first
    try:
        while True:
            whole, end, held = held.rpartition(b"\n\n")
            if end:
                yield whole + end
            piece = await anext(pieces, None)
            if piece is None:
                break
            held += piece
        if held:
            yield held
    except RequestCancelledError:
        raise
    except LOST as error:
        name, told = lost_event(path, f"the replica was lost: {type(error).__name__}")
        yield (f"event: {name}\n" if name else "").encode()
        yield b"data: " + json.dumps(told).encode() + b"\n\n"
    except (asyncio.CancelledError, GeneratorExit, ClientDisconnect):
        pieces.cancel()
        raise


def told_error(path: str, status: int, message: str) -> dict[str, Any]:
    """An error as the API of `path` writes it."""
    kinds = {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kinds[status], "message": message}}
    kinds |= {413: "invalid_request_error", 503: "server_error"}
    code = "rate_limit_exceeded" if status == 429 else None
    return {"error": {"message": message, "type": kinds[status], "param": None, "code": code}}


def lost_event(path: str, message: str) -> tuple[str, dict[str, Any]]:
    """The error that ends a stream of `path`: its event's name, where events have one, and data."""
    told = told_error(path, 503, message)
    if path.startswith("/v1/responses"):
        inner = told["error"]
        return "error", {**inner, "type": "error", "code": inner["type"], **told}
    return "error" if path.startswith("/v1/messages") else "", told


def failure(path: str, status: int, message: str) -> Response:
    """A whole answer that is an error."""
    told = told_error(path, status, message)
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    return Response(json.dumps(told), status, headers, media_type="application/json")
