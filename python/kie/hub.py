"""Where a model is: the package's own, a local folder, or a download from the hub."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from kie.errors import LoadError

HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
FILES = ("*.json", "*.safetensors", "*.jinja")


def resolve(model: str | os.PathLike[str] | None) -> str:
    """The folder of `model`; a hub id is downloaded into the hub's own cache if need be.

    Raises:
        LoadError: neither a folder nor a hub id, or a hub id that could not be fetched.
    """
    if model is None:
        return os.path.join(os.path.dirname(__file__), "demo")
    path = os.fspath(model)
    if os.path.exists(path):
        return path
    if is_hub_id(path):
        return download(path)
    raise LoadError(
        f"{path}: wanted a model folder, got nothing of that name",
        hint="pass a folder with config.json and *.safetensors, or a hub id `org/name`",
        context={"file": path, "wanted": "a model folder", "got": "nothing"},
    )


def is_hub_id(name: str) -> bool:
    """Whether `name` looks like `org/name`."""
    import re

    return re.fullmatch(HUB_ID, name) is not None


def download(name: str) -> str:
    """Fetches the hub model `name`, resuming what was begun; offline, the cache is used."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as cause:
        raise LoadError(
            f"{name}: no such folder, and huggingface_hub is not installed to download it",
            hint="pip install 'kie[hub]', or pass the folder of the model",
            context={"model": name},
        ) from cause
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    try:
        return str(hub.snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as cause:
        # The hub raises its own, requests', httpx's and the system's errors; all mean the same.
        first = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise LoadError(
            f"{name}: the download failed ({type(cause).__name__}: {first})",
            hint="check the name and the network; `kie pull` resumes where it stopped",
            context={"model": name},
        ) from cause
