"""Requests that no server should take, drawn from a seed: broken JSON, fields and HTTP."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from typing import Any

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
    *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
)
FIELDS = """model messages prompt max_tokens temperature top_p top_k min_p seed stop stop_token_ids
    logit_bias logprobs top_logprobs stream stream_options n store tools tool_choice response_format
    timeout min_tokens echo suffix user metadata stream_interval presence_penalty input system
    instructions include reasoning text thinking stop_sequences output_config role content type
    tool_calls function name arguments id""".split()


def requests(count: int, seed: int) -> Iterator[bytes]:
    """`count` requests, the same for the same seed."""
    draw = random.Random(seed)
    kinds = (broken_json, wrong_fields, broken_head, broken_chunks, huge_field, noise)
    for _ in range(count):
        yield draw.choice(kinds)(draw)


def framed(path: str, body: bytes, extra: bytes = b"") -> bytes:
    """A POST with a right head."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n".encode()
    return head + b"content-type: application/json\r\n" + extra + b"\r\n" + body


def value(draw: random.Random, depth: int = 0) -> Any:
    """Some JSON."""
    plain = [None, True, -1, 0, 2**70, -(2**63), 1e308, 0.5, "", "\u0000", "\ud83d\ude00", "x" * 50]
    if depth > 3 or draw.random() < 0.6:
        return draw.choice(plain)
    if draw.random() < 0.5:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(FIELDS): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def sound(draw: random.Random) -> dict[str, Any]:
    """A request that would be answered."""
    chat = {"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    return draw.choice(
        [
            {**chat, "tools": [tool], "tool_choice": "auto"},
            {"model": "default", "prompt": "x", "max_tokens": 1},
            {"model": "default", "input": [{"role": "user", "content": "x"}], "tools": []},
        ]
    )


def odd(count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and bodies with a field that some API has, whose value may be none of its."""
    draw = random.Random(seed)
    paths = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
    for _ in range(count):
        body = sound(draw)
        path = next((path for field, path in paths.items() if field in body), "/v1/responses")
        most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        if path == "/v1/chat/completions" and draw.random() < 0.4:
            path = "/v1/messages"
            body.pop("tools", None)
        body.pop("tool_choice", None)
        body[draw.choice(FIELDS)] = value(draw)
        body.pop("max_tokens", None)
        yield path, {**body, "model": "default", most: 1}


def broken_json(draw: random.Random) -> bytes:
    """JSON with a wound, nested without an end, or none at all."""
    text = json.dumps(sound(draw)).encode()
    at = draw.randrange(len(text))
    body = draw.choice(
        [
            text[:at],
            text[:at] + b"\xff\xfe" + text[at:],
            text + b"}",
            b"[" * draw.choice([10, 1_000, 100_000]),
            b'{"a":' * 50_000,
            b'{"model": "default", "prompt": "\\ud800", "max_tokens": 1}',
            b'{"model": "default", "prompt": "x", "max_tokens": 1e999}',
            b"",
            b"null",
            b"NaN",
        ]
    )
    return framed(draw.choice(PATHS), body)


def wrong_fields(draw: random.Random) -> bytes:
    """A right request and a field that no request has, and some that are wrong."""
    body = sound(draw)
    for _ in range(draw.randrange(1, 4)):
        body[draw.choice(FIELDS)] = value(draw)
    body["x" + "".join(draw.choices(string.ascii_letters, k=5))] = 1
    return framed(draw.choice(PATHS), json.dumps(body).encode())


def huge_field(draw: random.Random) -> bytes:
    """Long strings, long lists, long heads, too long bodies."""
    big = draw.choice([100_000, 2_000_000])
    body = sound(draw)
    body[draw.choice(FIELDS)] = draw.choice(["y" * big, [1] * (big // 3)])
    body["unknown"] = 0
    if draw.random() < 0.2:
        return framed(PATHS[0], b"{}", b"x-big: " + b"z" * 100_000 + b"\r\n")
    return framed(draw.choice(PATHS), json.dumps(body).encode())


def broken_head(draw: random.Random) -> bytes:
    """Heads that are no HTTP."""
    return draw.choice(
        [
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5x\r\n\r\nhello",
            b"POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
            b"POST /v1/completions HTTP/1.1\r\nno colon here\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: evil.example\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(64),
            b"GET /%ff%00 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"DELETE /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n\r\n{",
        ]
    )


def broken_chunks(draw: random.Random) -> bytes:
    """A chunked body that is none."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + draw.choice(
        [
            b"zz\r\nhello\r\n0\r\n\r\n",
            b"ffffffffffffffffff\r\nx\r\n",
            b"5\r\nhel",
            b"5\r\nhelloXX0\r\n\r\n",
            b"-1\r\n\r\n",
            draw.randbytes(40),
        ]
    )


def noise(draw: random.Random) -> bytes:
    """No HTTP at all."""
    return draw.randbytes(draw.randrange(1, 300)) + b"\r\n\r\n"
