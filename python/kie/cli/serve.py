"""`kie serve`: a model over HTTP. The first line on standard output, when it serves, is the URL."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from kie.cli import options
from kie.errors import InvalidRequestError

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Self

    from kie import _kie
    from kie.engine import Engine

M_ARENA_MAX = -8
"""Of glibc's malloc.h."""
SLICE_S = 0.05
"""Longest wait between two looks at signals."""


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    options.model(parser, nargs="?")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="name or address to listen on")
    add("--port", type=options.port, default=8000, metavar="N", help="0 takes a free one")
    add("--api-key", metavar="KEY", help="what requests must bring; default: $KIE_API_KEY, or none")
    add("--served-model-name", metavar="NAME", help="the model's name; default: its folder's")
    add("--max-running", type=int, default=8, metavar="N", help="requests that run at once")
    add("--max-queue", type=int, default=64, metavar="N", help="requests that may wait")
    text = "longest body of a request"
    add("--max-body-mb", type=options.at_least_one, default=8, metavar="N", help=text)
    for what, seconds in (("header", 10), ("body", 30)):
        text = f"longest time for a request's {what}"
        kind = options.above_zero
        add(f"--{what}-timeout-s", type=kind, default=seconds, metavar="S", help=text)
    add(
        "--drain-s", type=float, default=30, metavar="S", help="time of running requests at the end"
    )
    text = "longest silence of a stream, then comes a comment"
    add("--silence-s", type=float, default=15, metavar="S", help=text)
    repeated: dict[str, Any] = {"action": "append", "default": []}
    add("--cors-origin", **repeated, metavar="URL", help="whose pages may ask; *: all; repeatable")
    add("--allowed-host", **repeated, metavar="NAME", help="further names of this machine")
    add("--log-json", action="store_true", help="a JSON line a request on standard error")
    text = "OpenTelemetry collector for spans (a build with the feature otlp)"
    add("--otlp-endpoint", metavar="URL", help=text)
    add("--metrics-compat", choices=("vllm",), help="further names in /metrics")
    add("--protect-page", action="store_true", help="the page at / wants the key, too")
    add("--protect-metrics", action="store_true", help="/metrics wants the key, too")
    options.engine(parser)
    add("--token", metavar="TOKEN", help="the hub's; default: $HF_TOKEN, or what `hf` keeps")
    add("--kv-bytes", type=int, metavar="N", help="bytes for keys and values")
    add("--no-prefix-cache", action="store_true", help="compute equal beginnings again")
    text = "start turns sooner; a request's bits may then depend on what ran before it"
    add("--no-reproducible", action="store_true", help=text)
    add("--idle", choices=("park", "hot"), default="park", help="what an idle engine does")
    add("--max-itl-ms", type=float, metavar="MS", help="longest gap of a request beside a prompt")
    add("--hang-timeout-s", type=float, default=1.0, metavar="S", help="patience with the device")
    add("--cache-dir", metavar="DIR", help="where compiled kernels are kept")
    options.verb(parser, serve)


def few_arenas() -> None:
    """Has glibc share two arenas among all threads.

    By default there are many, each of which grows to what the busiest of its threads once needed,
    so that memory goes on growing for ten thousand requests.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def serve(given: Namespace) -> int:
    """Serves until told to stop."""
    from kie import _kie

    few_arenas()
    key = given.api_key or os.environ.get("KIE_API_KEY") or None
    if key is None and not is_loopback(given.host):
        print(
            f"error: --host {given.host} can be reached from other machines, and there is no key\n"
            "hint: add --api-key KEY (or set KIE_API_KEY), or leave --host out",
            file=sys.stderr,
        )
        return 2
    names = [
        *("host", "port", "served_model_name", "max_body_mb", "header_timeout_s"),
        *(
            "body_timeout_s",
            "drain_s",
            "silence_s",
            "otlp_endpoint",
            "log_json",
            "protect_page",
            "protect_metrics",
        ),
    ]
    try:
        server = _kie.Server(
            api_key=key,
            cors_origins=given.cors_origin,
            allowed_hosts=given.allowed_host,
            metrics_compat_vllm=given.metrics_compat == "vllm",
            **{name: getattr(given, name) for name in names},
        )
    except OSError as cause:
        raise InvalidRequestError(
            str(cause),
            hint="pass another --port (0 takes a free one) or another --host",
            context={"param": "port"},
        ) from cause
    with _Stop(server) as stop:
        with options.loading() as progress:
            engine = _Opening(given, progress).wait()
        with engine:
            server.serve(engine.core())
            stop.serving = True
            print(url(*server.address()), flush=True)
            while not server.wait(SLICE_S):
                pass
    return 0


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    from ipaddress import ip_address

    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def url(host: str, port: int) -> str:
    """Where a browser finds it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Stop:
    """SIGTERM and SIGINT, while it is entered: the first drains, a second one ends the process at
    once."""

    def __init__(self, server: _kie.Server) -> None:
        self.serving = False
        self._server = server
        self._asked = False

    def __enter__(self) -> Self:
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._hear) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._asked or not self.serving:
            # Nothing runs that could be lost; loading is not worth waiting for.
            os._exit(0 if not self._asked else 128 + number)
        self._asked = True
        self._server.drain()


class _Opening:
    """An engine that is opened on a thread of its own, so that this one hears signals."""

    def __init__(self, given: Namespace, progress: Any) -> None:
        self._engine: Engine | None = None
        self._error: BaseException | None = None
        keywords = options.engine_options(given)
        own = "token kv_bytes idle max_itl_ms hang_timeout_s cache_dir max_queue"
        for name in own.split():
            keywords[name] = getattr(given, name)
        keywords.update(
            max_batch=given.max_running,
            prefix_cache=not given.no_prefix_cache,
            reproducible=not given.no_reproducible,
            progress=progress,
        )
        self._thread = threading.Thread(
            target=self._open, args=(given.model, keywords), name="kie-open", daemon=True
        )
        self._thread.start()

    def _open(self, model: str | None, keywords: dict[str, Any]) -> None:
        from kie.engine import Engine

        try:
            self._engine = Engine(model, **keywords)
        except BaseException as error:
            self._error = error

    def wait(self) -> Engine:
        """The engine, or what it failed with."""
        while self._thread.is_alive():
            self._thread.join(SLICE_S)
        if self._engine is None:
            raise self._error or RuntimeError("the engine's thread died")
        return self._engine
