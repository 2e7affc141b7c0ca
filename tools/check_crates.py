"""Check that the published crates carry everything they need.

    python tools/check_crates.py kie-kernels kie-kccl kie-core

Packages the crates as a release would and looks into the archives: `kie-kernels` must hold each
file of `kernels/` as a file of its own: it embeds them as text, and a link would point nowhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def output(*command: str) -> str:
    """Standard output of a command run in the repository; a failing command ends this one."""
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout


def archives(crates: list[str]) -> list[Path]:
    """Package `crates` together and return the archives."""
    names = [part for crate in crates for part in ("--package", crate)]
    output("cargo", "package", "--no-verify", "--allow-dirty", "--quiet", *names)
    meta = json.loads(output("cargo", "metadata", "--no-deps", "--format-version", "1"))
    version = {package["name"]: package["version"] for package in meta["packages"]}
    folder = Path(meta["target_directory"]) / "package"
    return [folder / f"{crate}-{version[crate]}.crate" for crate in crates]


def missing(archive: Path, wanted: list[str]) -> list[str]:
    """Which of `wanted` the archive does not hold as an ordinary file."""
    with tarfile.open(archive) as tar:
        files = {name.split("/", 1)[1] for name in (m.name for m in tar if m.isfile())}
    return [name for name in wanted if name not in files]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that crates carry what they need.")
    parser.add_argument("crates", nargs="+", help="crates to package, dependencies first")
    args = parser.parse_args()
    kernels = output("git", "ls-files", "kernels").split()
    failures = 0
    for archive in archives(args.crates):
        wanted = ["Cargo.toml", "src/lib.rs"]
        wanted += kernels if archive.name.startswith("kie-kernels-") else []
        lost = missing(archive, wanted)
        failures += bool(lost)
        size = archive.stat().st_size / 1e3
        print(f"{archive.name}: {size:.0f} kB, {', '.join(lost) + ' missing' if lost else 'whole'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
