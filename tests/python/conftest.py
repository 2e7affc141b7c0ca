"""Engines for the tests: a tiny Llama of the fixtures, and the default model."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import kie
import pytest
import scripted
from serving import Serving, serving

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
TINY = DATA / "llama"
# Ctrl-C is heard also where the shell that began this in the background had it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The clients that it is about need Python 3.11.
collect_ignore = ["test_clients.py"] if sys.version_info < (3, 11) else []


def fixture_folders() -> list[Path]:
    """Checkpoints with a golden.safetensors: ours, and those below $KIE_FIXTURES (`:` between)."""
    extra = [Path(root) for root in os.environ.get("KIE_FIXTURES", "").split(":") if root]
    return [
        path.parent for root in (DATA, *extra) for path in sorted(root.glob("*/golden.safetensors"))
    ]


@pytest.fixture(scope="session")
def engine() -> Iterator[kie.Engine]:
    """A model of 400,000 random weights with 512 positions; its text is noise, and quick."""
    with kie.Engine(TINY, device="cpu", threads=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def demo() -> Iterator[kie.Engine]:
    """The default model."""
    with kie.Engine(device="cpu") as opened:
        yield opened


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`kie serve` with a model that calls tools and reasons: see scripted.py."""
    folder = scripted.write(tmp_path_factory.mktemp("scripted"))
    with serving(str(folder), "--threads", "1", "--served-model-name", "talker") as running:
        yield running
