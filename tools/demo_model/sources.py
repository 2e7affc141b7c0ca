"""Find the Python source of this machine whose licence allows training on it.

Sources are the standard library and every installed package whose metadata names a permissive
licence.
Copyleft and proprietary packages are left out by name and reported; nothing is downloaded.
"""

from __future__ import annotations

import os
import platform
import re
import sysconfig
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
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


@dataclass
class Found:
    """All candidate files, the packages they belong to, and those left out with the reason."""

    jobs: list[Job] = field(default_factory=list[Job])
    packages: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    excluded: dict[str, str] = field(default_factory=dict[str, str])


def canonical(dist: Distribution) -> str:
    return dist.metadata["Name"].lower().replace("_", "-")


def licence_of(dist: Distribution) -> str:
    """The licence a package declares: expression, else classifiers, else the first free line."""
    if canonical(dist) in LICENCE_OF_SOURCE:
        return LICENCE_OF_SOURCE[canonical(dist)]
    metadata = dist.metadata
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


def add_packages(found: Found) -> None:
    """Every .py file of the installed packages with a permissive licence."""
    named = [dist for dist in distributions() if dist.metadata and dist.metadata["Name"]]
    seen: set[str] = set()
    for dist in sorted(named, key=lambda d: d.metadata["Name"].lower()):
        name = canonical(dist)
        if name in seen:
            continue
        seen.add(name)
        files = sorted(
            str(f) for f in dist.files or [] if str(f).endswith(".py") and ".." not in str(f)
        )
        if not files:
            continue
        licence = licence_of(dist)
        denied = DENIED.search(licence) or not ALLOWED.search(licence)
        if denied or name.startswith(("nvidia", "cuda-")):
            found.excluded[name] = licence or "no licence in the metadata"
            continue
        found.packages[name] = {"version": dist.version, "licence": licence}
        found.jobs += [Job(name, str(dist.locate_file(f)), f) for f in files]


def find() -> Found:
    """Candidate files of the standard library, then of packages by name."""
    found = Found()
    add_stdlib(found)
    add_packages(found)
    return found
