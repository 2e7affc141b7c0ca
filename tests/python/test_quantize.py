"""`kie quantize` as a process: what it prints and writes, and what it says when it cannot."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kie
import pytest
from conftest import TINY
from kie.errors import InvalidRequestError

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
from kie.cli import main
main(sys.argv[1:])
"""


def run(*words: str | Path, start: tuple[str, ...] = ("-m", "kie")) -> tuple[int, str, str]:
    """Exit code, output and errors of `kie quantize WORDS`."""
    command = [sys.executable, *start, "quantize", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def perplexity(engine: kie.Engine, ids: list[int]) -> float:
    """By its definition, one token after another."""
    losses: list[float] = []
    for row, wanted in zip(engine.logits(ids), ids[1:], strict=False):
        logits = [float(value) for value in row]
        most = max(logits)
        total = sum(math.exp(value - most) for value in logits)
        losses.append(most + math.log(total) - logits[wanted])
    return math.exp(sum(losses) / len(losses))


def test_a_quantised_folder_opens_and_its_cost_is_told(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 20, encoding="utf-8")
    out = tmp_path / "out"
    code, printed, errors = run(TINY, out, "--to", "fp8", "--eval", text)
    assert code == 0, errors
    assert re.search(r"\d+ matrices to fp8: .* became .*, relative error", printed)
    told = re.findall(r"perplexity (\w+) +([\d.]+) over (\d+) tokens", printed)
    for (name, value, count), dtype in zip(told, ("auto", "fp8"), strict=True):
        with kie.Engine(TINY, device="cpu", dtype=dtype) as engine:
            ids = engine.tokenize(text.read_text(encoding="utf-8"))
            assert int(count) == len(ids) - 1
            assert float(value) == pytest.approx(perplexity(engine, ids), rel=1e-5), name
    assert told[0][1] != told[1][1]
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["quant_method"] == "fp8"
    with (
        kie.Engine(out, device="cpu") as written,
        kie.Engine(TINY, device="cpu", dtype="fp8") as at,
    ):
        prompt = [3, 5, 7]
        assert (written.logits(prompt) == at.logits(prompt)).all()
        assert "converted logits of a built-in text" in at.info()["plan"]


def test_what_is_compared_was_read_once(tmp_path: Path) -> None:
    """Once weights are loaded the tokenizer was read, and so were the configuration and headers."""
    folder = shutil.copytree(TINY, tmp_path / "model")

    def loading(*_: object) -> None:
        (folder / "tokenizer.json").unlink(missing_ok=True)

    with kie.Engine(folder, device="cpu", dtype="fp8", progress=loading) as engine:
        assert "converted logits of a built-in text" in engine.info()["plan"]


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for words, told in (
        ((TINY, out, "--to", "int3"), "fp8, int4 or mxfp4, got 'int3'"),
        ((TINY, tmp_path, "--to", "fp8"), "exists"),
        ((TINY, out / "deep", "--to", "fp8"), "not written"),
    ):
        code, _, errors = run(*words)
        assert code == 1
        assert told.replace("'", '"') in errors
    with pytest.raises(InvalidRequestError, match="quantised already"):
        kie.Engine(device="cpu", dtype="int4")
    code, _, errors = run(TINY, out, "--to", "fp8", start=("-c", LIMITED))
    assert code == 1
    assert "not written" in errors
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_what_a_killed_process_left_is_taken_over_and_what_is_being_written_is_not(
    tmp_path: Path,
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half of it")
    held = os.open(partial, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    code, _, errors = run(TINY, out, "--to", "fp8")
    assert code == 1
    assert "another process writes it" in errors
    os.close(held)
    code, _, errors = run(TINY, out, "--to", "fp8")
    assert code == 0, errors
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
