"""Find the Python source of this machine whose licence allows training on it.

Sources are the standard library, every installed package and every wheel of a given folder whose
metadata names a permissive licence. Copyleft and proprietary packages are left out by name and
reported; nothing is downloaded.
"""

from __future__ import annotations

import os
import platform
import re
import sysconfig
import zipfile
from dataclasses import dataclass, field
from email.message import Message
from email.parser import Parser
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ALLOWED = re.compile(
    r"\b(mit|bsd|apache|psf|python-2\.0|python software foundation|isc|zlib|unlicense|hpnd|mit-cmu"
    r"|0bsd|cc0|historical permission|matplotlib)\b|public domain",
    re.IGNORECASE,
)
DENIED = re.compile(
    r"gpl|general public|mozilla|mpl|eupl|cddl|eclipse|proprietary|nvidia|licenseref", re.IGNORECASE
)
# Packages whose metadata also names the licences of bundled binaries, or names none. This is the
# licence of their .py files.
LICENCE_OF_SOURCE = {
    "scipy": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "torch": "BSD-3-Clause",
    "pandas": "BSD-3-Clause",
    "scikit-learn": "BSD-3-Clause",
    "scikit-image": "BSD-3-Clause",
    "matplotlib": "Matplotlib (PSF-based)",
    "triton": "MIT",
    "jaxlib": "Apache-2.0",
    "torchvision": "BSD-3-Clause",
    "torchaudio": "BSD-2-Clause",
    "kiwisolver": "BSD-3-Clause",
    "pyarrow": "Apache-2.0",
    "tensorstore": "Apache-2.0",
}
# Folders that hold other people's code, generated code or tables.
SKIPPED_FOLDERS = frozenset(
    """
        _vendor vendor vendored _vendored third_party thirdparty extern _extern
        externals _externals node_modules __pycache__ locale locales lib2to3 pydoc_data
        encodings _vendored_packages site-packages dist-packages ensurepip turtledemo
        _pyrepl
    """.split()
)
STDLIB = "cpython-stdlib"


@dataclass(frozen=True)
class Job:
    """One file to look at: its package, where it lies, and its path inside the package."""

    package: str
    path: str
    name: str
    wheel: str | None = None
    """The wheel that holds it as `path`; None for a file of its own."""

    def read(self, bytes_max: int) -> str | None:
        """The file's text, None where it is longer."""
        if self.wheel is None:
            if os.path.getsize(self.path) > bytes_max:
                return None
            return Path(self.path).read_text(encoding="utf-8")
        with zipfile.ZipFile(self.wheel) as wheel:
            if wheel.getinfo(self.path).file_size > bytes_max:
                return None
            return wheel.read(self.path).decode("utf-8")


@dataclass
class Found:
    """All candidate files, the packages they belong to, and those left out with the reason."""

    jobs: list[Job] = field(default_factory=list[Job])
    packages: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    excluded: dict[str, str] = field(default_factory=dict[str, str])


def canonical(metadata: Any) -> str:
    return metadata["Name"].lower().replace("_", "-")


def licence_of(metadata: Any) -> str:
    """The licence a package declares: expression, else classifiers, else the first free line."""
    if canonical(metadata) in LICENCE_OF_SOURCE:
        return LICENCE_OF_SOURCE[canonical(metadata)]
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [
        entry.split("::")[-1].strip()
        for entry in metadata.get_all("Classifier") or []
        if entry.startswith("License ::")
    ]
    named = [entry for entry in classifiers if entry != "OSI Approved"]
    if named:
        return "; ".join(named)
    return (metadata.get("License") or "").strip().split("\n")[0][:100]


def add_stdlib(found: Found) -> None:
    """Every .py file of the standard library, in a fixed order."""
    found.packages[STDLIB] = {"version": platform.python_version(), "licence": "PSF-2.0"}
    home = sysconfig.get_paths()["stdlib"]
    for folder, folders, names in os.walk(home):
        folders[:] = sorted(
            f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("config-")
        )
        for name in sorted(n for n in names if n.endswith(".py")):
            path = os.path.join(folder, name)
            found.jobs.append(Job(STDLIB, path, os.path.relpath(path, home)))


def admit(found: Found, metadata: Any, files: list[str]) -> bool:
    """Whether a package that has files may be used; enters it in one of the two lists."""
    name, licence = canonical(metadata), licence_of(metadata)
    if not files or name in found.packages or name in found.excluded:
        return False
    denied = DENIED.search(licence) or not ALLOWED.search(licence)
    if denied or name.startswith(("nvidia", "cuda-")):
        found.excluded[name] = licence or "no licence in the metadata"
        return False
    found.packages[name] = {"version": metadata["Version"], "licence": licence}
    return True


def add_packages(found: Found) -> None:
    """Every .py file of the installed packages with a permissive licence."""
    named = [dist for dist in distributions() if dist.metadata and dist.metadata["Name"]]
    for dist in sorted(named, key=lambda d: d.metadata["Name"].lower()):
        name = canonical(dist.metadata)
        files = sorted(
            str(f) for f in dist.files or [] if str(f).endswith(".py") and ".." not in str(f)
        )
        if admit(found, dist.metadata, files):
            found.jobs += [Job(name, str(dist.locate_file(f)), f) for f in files]


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode("utf-8"))


def add_wheels(found: Found, folder: Path) -> None:
    """Every .py file of the wheels with a permissive licence; small wheels first."""
    for path in sorted(folder.glob("*.whl"), key=lambda p: (p.stat().st_size, p.name)):
        with zipfile.ZipFile(path) as wheel:
            files = sorted(name for name in wheel.namelist() if name.endswith(".py"))
            metadata = metadata_of(wheel)
        if admit(found, metadata, files):
            found.jobs += [Job(canonical(metadata), f, f, str(path)) for f in files]


def find(wheels: Path | None = None) -> Found:
    """Candidate files of the standard library, of installed packages by name, then of wheels."""
    found = Found()
    add_stdlib(found)
    add_packages(found)
    if wheels:
        add_wheels(found, wheels)
    return found
