"""Downloads from a hub on loopback, with the oldest and the newest library that may be there."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, TINY
from fake_hub import COMMIT, FakeHub

NAME = "some-org/tiny"
# `make setup` installs these beside each other: HUB_VERSIONS in the Makefile.
LIBRARIES = sorted((ROOT / ".venv" / "hub").iterdir()) if (ROOT / ".venv" / "hub").exists() else []
OPEN = """
import json, sys, kie
with kie.Engine(sys.argv[1], device="cpu", threads=1, **json.loads(sys.argv[2])) as engine:
    done = engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True, temperature=0)
    print(json.dumps([engine.info()["model"], done.model, len(done.token_ids)]))
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(NAME, TINY) as served:
        yield served


@pytest.fixture(params=LIBRARIES, ids=lambda path: path.name)
def env(request: pytest.FixtureRequest, hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """A process's environment: this hub, an empty cache, one version of the library."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    places = [str(request.param), *filter(None, [plain.get("PYTHONPATH")])]
    return {
        **plain,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "5",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(places),
    }


def python(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, env=env
    )


def test_both_ends_of_the_admitted_versions_are_there() -> None:
    assert len(LIBRARIES) == 2, "run `make setup`"


def test_an_engine_opens_a_hub_id_off_a_terminal(hub: FakeHub, env: dict[str, str]) -> None:
    done = python(env, "-c", OPEN, NAME, "{}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [f"{NAME}@main", f"{NAME}@main", 4]
    assert done.stderr == ""
    done = python(env, "-c", OPEN, NAME, '{"revision": "v1"}')
    assert json.loads(done.stdout) == [f"{NAME}@v1", f"{NAME}@v1", 4], done.stderr
    # What is in the cache needs no network, and a folder of the cache still has a name.
    hub.server.shutdown()
    offline = {**env, "HF_HUB_OFFLINE": "1"}
    done = python(offline, "-m", "kie", "pull", NAME)
    folder = done.stdout.strip()
    assert done.returncode == 0, done.stderr
    assert json.loads(python(offline, "-c", OPEN, folder, "{}").stdout)[0] == f"{NAME}@{COMMIT}"


def test_a_transfer_that_breaks_off_is_an_error_and_goes_on_where_it_was(
    hub: FakeHub, env: dict[str, str]
) -> None:
    # The library writes 10 MiB at a time: what is behind the last whole piece is asked for again.
    hub.files["large.safetensors"] = os.urandom(1 << 10) * (24 << 10)
    hub.cut = ("large.safetensors", 15 << 20)
    done = python(env, "-m", "kie", "pull", NAME)
    assert hub.cut is None
    if done.returncode != 0:  # Else the library itself has tried again.
        assert done.stderr.startswith(f"error: {NAME}: the download failed"), done.stderr
        assert "resumes" in done.stderr
        done = python(env, "-m", "kie", "pull", NAME)
    assert done.returncode == 0, done.stderr
    found = Path(done.stdout.strip()) / "large.safetensors"
    assert found.read_bytes() == hub.files["large.safetensors"]
    ranges = [asked[2] for asked in hub.asked if asked[1].endswith("large.safetensors")]
    assert any(first and not first.startswith("bytes=0-") for first in ranges), ranges


def test_a_token_is_asked_for_and_taken(hub: FakeHub, env: dict[str, str]) -> None:
    hub.token = "hf_secret"
    done = python(env, "-m", "kie", "pull", NAME)
    assert done.returncode == 1
    assert "token" in done.stderr
    assert "Traceback" not in done.stderr
    assert python(env, "-m", "kie", "pull", NAME, "--token", "hf_secret").returncode == 0
    done = python(env, "-c", OPEN, NAME, '{"token": "hf_secret"}')
    assert done.returncode == 0, done.stderr


def test_what_the_hub_has_not_is_a_clear_error(env: dict[str, str]) -> None:
    done = python(env, "-m", "kie", "pull", NAME, "--revision", "v9")
    assert done.returncode == 1
    assert "no such revision" in done.stderr, done.stderr
    done = python(env, "-m", "kie", "pull", "some-org/other")
    assert done.returncode == 1
    assert "check the name" in done.stderr, done.stderr


def test_on_a_terminal_progress_is_drawn(env: dict[str, str]) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kie", "pull", NAME],
            stdout=subprocess.PIPE,
            stderr=follower,
            timeout=120,
            env={**env, "TERM": "xterm"},
        )
        os.close(follower)
        drawn = os.read(leader, 1 << 16).decode(errors="replace")
    finally:
        os.close(leader)
    assert done.returncode == 0, drawn
    assert "%" in drawn
