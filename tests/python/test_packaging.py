"""What is published: metadata, the wheel's checks, the source archive, the images."""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
import subprocess
import sys
import tarfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from kie import cli

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_wheel  # noqa: E402

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_metadata_leads_somewhere() -> None:
    urls = dict(re.findall(r'^(\w+) = "(https://[^"]+)"$', PYPROJECT, re.MULTILINE))
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Repository"} <= set(urls)
    for url in urls.values():
        _, blob, path = url.partition("/blob/main/")
        assert not blob or (ROOT / path).is_file(), url
    least = re.search(r'requires-python = ">=3\.(\d+)"', PYPROJECT)
    versions = [int(v) for v in re.findall(r"Python :: 3\.(\d+)", PYPROJECT)]
    assert least
    assert versions == list(range(int(least[1]), versions[-1] + 1))


def elf(*versions: bytes) -> bytes:
    """As much of a shared object as the check of symbol versions reads."""
    return b"\x7fELF\x02\x01" + b"\0".join((b"", b"libc.so.6", *versions, b"malloc", b""))


def test_a_wheel_may_need_no_newer_c_library_than_its_tag_says() -> None:
    assert check_wheel.newest_glibc(elf(b"GLIBC_2.2.5", b"GLIBC_2.28", b"GLIBC_2.9")) == (2, 28)
    assert check_wheel.newest_glibc(elf(b"GLIBC_PRIVATE")) == (0, 0)
    tag = "kie-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"
    assert check_wheel.tag_faults(tag, (2, 28)) == []
    (fault,) = check_wheel.tag_faults(tag, (2, 34))
    assert "2.34" in fault
    for name in ("kie-0.1.0-cp312-cp312-manylinux_2_28_x86_64.whl", "kie-0-cp310-abi3-linux_x.whl"):
        assert check_wheel.tag_faults(name, (2, 28))


def test_libraries_of_a_shared_object_are_read() -> None:
    with pytest.raises(ValueError, match="ELF"):
        check_wheel.needed(struct.pack("<Q", 0))
    import kie._kie

    extension = Path(kie._kie.__file__).read_bytes()
    assert "libc.so.6" in check_wheel.needed(extension)
    assert check_wheel.newest_glibc(extension) > (2, 17)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    maturin = Path(sys.executable).with_name("maturin")
    subprocess.run([maturin, "sdist", "--out", out], check=True, cwd=ROOT)
    (packed,) = out.glob("*.tar.gz")
    with tarfile.open(packed) as tar:
        assert not [m.name for m in tar if m.issym() or m.islnk()], "a link points nowhere there"
        tar.extractall(out, filter="data")
    return out / packed.name.removesuffix(".tar.gz")


def test_the_source_archive_has_what_it_is_built_of(archive: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "crates/*/src", "kernels", "python/kie"],
        check=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.split()
    moved = {"kernels": "crates/kie-kernels/kernels"}
    for name in listed:
        top, _, rest = name.partition("/")
        file = archive / moved.get(top, top) / rest
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            assert file.read_bytes() == (ROOT / name).read_bytes(), name
    for name in ("Cargo.lock", "LICENSE", "NOTICE", "README.md", "PKG-INFO"):
        assert (archive / name).is_file(), name


def test_the_source_archive_resolves_without_a_network(archive: Path) -> None:
    command = ["cargo", "metadata", "--offline", "--locked", "--format-version", "1"]
    found = subprocess.run(
        command,
        check=True,
        cwd=archive,
        env=os.environ | {"CARGO_NET_OFFLINE": "true"},
        stdout=subprocess.PIPE,
    ).stdout
    packages: list[dict[str, Any]] = json.loads(found)["packages"]
    own = [p for p in packages if p["source"] is None]
    assert all(Path(p["manifest_path"]).is_relative_to(archive) for p in own)
    assert {p["source"] for p in packages if p not in own} == {
        "registry+https://github.com/rust-lang/crates.io-index"
    }


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage of the Dockerfile: (word, rest)."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in filter(None, lines):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            assert base in found or ":" in base, f"no stage or tagged image {base}"
            found[name] = []
        found[name].append((word, rest.strip()))
    return found


def ignored(path: str) -> bool:
    """Whether `.dockerignore` keeps a path out of the build."""
    out = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        pattern = line.lstrip("!")
        parts = [path, *(str(parent) for parent in Path(path).parents)]
        if pattern == "**" or any(fnmatch(part, pattern) for part in parts):
            out = not line.startswith("!")
    return out


def test_images_are_made_of_files_that_are_there() -> None:
    found = stages()
    assert {"build", "base", "cuda", "cpu"} == set(found)
    for name, instructions in found.items():
        for word, rest in instructions:
            if word == "COPY":
                *sources, _ = [part for part in shlex.split(rest) if not part.startswith("--")]
                for file in sources:
                    assert (ROOT / file).exists(), f"{name}: {file}"
                    assert not ignored(file), f"{name}: {file} is kept out by .dockerignore"
            if word == "RUN":
                mounted = re.findall(r"from=(\w+)", rest)
                assert all(stage in found for stage in mounted), rest
                script = re.sub(r"--mount=\S+", "", rest)
                subprocess.run(["bash", "-n", "-c", script], check=True)
    assert ignored("tests/data/llama")
    assert ignored(".venv")


def test_images_run_a_command_that_kie_knows() -> None:
    for name in ("cpu", "cuda"):
        words = dict(stages()[name])
        assert words["USER"] == "1000"
        command = json.loads(words["ENTRYPOINT"]) + json.loads(words["CMD"])
        assert command[0] == "kie"
        given = cli.parser(command[1:]).parse_args(command[1:])
        assert given.host == "0.0.0.0"


def test_the_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, "Dockerfile"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
