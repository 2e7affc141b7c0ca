"""The scripts that made the default model: all compile, and the parts that need no PyTorch work."""

from __future__ import annotations

import random
import sys
import zipfile
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "demo_model"
sys.path.insert(0, str(TOOLS))

import extract  # noqa: E402
import samples  # noqa: E402
import sources  # noqa: E402

CODE = '''# Copyright somebody
"""Sums."""


def total(numbers):
    """Return the sum of the numbers."""
    result = 0
    for number in numbers:
        result += number
    return result
''' + "".join(f"\n\ndef power_{name}(x):\n    return x * x\n" for name in "abcdef")


def wheel(folder: Path, name: str, licence: str) -> None:
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\nLicense-Expression: {licence}\n"
    with zipfile.ZipFile(folder / f"{name}-1.5-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/sums.py", CODE)
        file.writestr(f"{name}/_vendor/other.py", CODE)
        file.writestr(f"{name}-1.5.dist-info/METADATA", metadata)


def found_in(folder: Path) -> sources.Found:
    found = sources.Found()
    sources.add_wheels(found, folder)
    return found


@pytest.mark.parametrize("script", sorted(TOOLS.rglob("*.py")), ids=lambda path: path.stem)
def test_every_script_compiles(script: Path) -> None:
    compile(script.read_text(encoding="utf-8"), script.name, "exec")


def test_wheels_are_taken_by_their_licence(tmp_path: Path) -> None:
    wheel(tmp_path, "good", "MIT")
    wheel(tmp_path, "bad", "GPL-3.0-only")
    found = found_in(tmp_path)
    assert found.packages == {"good": {"version": "1.5", "licence": "MIT"}}
    assert found.excluded == {"bad": "GPL-3.0-only"}
    assert [job.name for job in found.jobs] == ["good/_vendor/other.py", "good/sums.py"]


def test_a_file_of_a_wheel_becomes_samples(tmp_path: Path) -> None:
    wheel(tmp_path, "good", "BSD-3-Clause")
    vendored, own = (extract.process(job) for job in found_in(tmp_path).jobs)
    assert vendored is None
    assert own is not None
    assert own.text.startswith('"""Sums."""')
    assert [function.name for function in own.functions] == ["total"]
    kinds = [kind for kind, _ in samples.samples_of(own.functions, random.Random(0))]
    assert kinds == ["function", "chat", "chat"]


def test_a_large_file_of_a_wheel_is_not_read(tmp_path: Path) -> None:
    wheel(tmp_path, "good", "MIT")
    job = found_in(tmp_path).jobs[-1]
    assert job.read(len(CODE)) == CODE
    assert job.read(len(CODE) - 1) is None
