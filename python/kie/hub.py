"""Where a model is: the package's own, a local folder, or a download from the hub."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from kie.errors import LoadError

HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
FILES = ("*.json", "*.safetensors", "*.jinja")
# How the hub's cache names the folder of one commit of a model.
CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")


class Found(NamedTuple):
    """A model's folder, and its name where the folder's own says nothing."""

    folder: str
    name: str | None


def resolve(
    model: str | os.PathLike[str] | None, *, revision: str | None = None, token: str | None = None
) -> Found:
    """The folder of `model`; a hub id is downloaded into the hub's own cache if need be.

    Args:
        model: a folder, a hub id (`org/name`), or None for the model that ships with the package.
        revision: branch, tag or commit of a hub id; None: the hub's `main`.
        token: the hub's access token; None: HF_TOKEN or what `hf auth login` left.

    Raises:
        LoadError: neither a folder nor a hub id, a hub id that could not be fetched, or a revision
            of what has none.
    """
    path = os.path.join(os.path.dirname(__file__), "demo") if model is None else os.fspath(model)
    if os.path.exists(path):
        if revision is not None:
            raise LoadError(
                f"{path}: revision={revision!r} is of a hub id, got a folder",
                hint="leave revision out, or pass a hub id `org/name`",
                context={"file": path, "revision": revision},
            )
        return Found(path, _cached_name(path))
    if is_hub_id(path):
        return Found(download(path, revision=revision, token=token), f"{path}@{revision or 'main'}")
    raise LoadError(
        f"{path}: wanted a model folder, got nothing of that name",
        hint="pass a folder with config.json and *.safetensors, or a hub id `org/name`",
        context={"file": path, "wanted": "a model folder", "got": "nothing"},
    )


def is_hub_id(name: str) -> bool:
    """Whether `name` looks like `org/name`."""
    return re.fullmatch(HUB_ID, name) is not None


def download(name: str, *, revision: str | None = None, token: str | None = None) -> str:
    """Fetches the hub model `name`, resuming what was begun; offline, the cache is used.

    Raises:
        LoadError: huggingface_hub is missing, or the hub refuses, or the transfer breaks off.
    """
    try:
        hub: Any = import_module("huggingface_hub")
        utils: Any = import_module("huggingface_hub.utils")
    except ImportError as cause:
        raise LoadError(
            f"{name}: no such folder, and huggingface_hub is not installed to download it",
            hint="pip install 'kie[hub]', or pass the folder of the model",
            context={"model": name},
        ) from cause
    try:
        with _quiet_off_a_terminal(utils):
            files = list(FILES)
            return str(
                hub.snapshot_download(name, revision=revision, token=token, allow_patterns=files)
            )
    except Exception as cause:
        # The hub raises its own, requests', httpx's and the system's errors; all mean the same.
        first = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise LoadError(
            f"{name}: the download failed ({type(cause).__name__}: {first})",
            hint=_remedy(cause),
            context={"model": name, "revision": revision},
        ) from cause


@contextmanager
def _quiet_off_a_terminal(utils: Any) -> Generator[None]:
    """Without the hub's progress bars where nobody looks; a caller's own choice stays."""
    if (sys.stderr is not None and sys.stderr.isatty()) or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _remedy(cause: BaseException) -> str:
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if "GatedRepoError" in kinds or status in (401, 403):
        return "the hub wants a token of yours: pass token=..., or set HF_TOKEN, or `hf auth login`"
    if "RevisionNotFoundError" in kinds:
        return "the model has no such revision: pass a branch, a tag or a commit that it has"
    if "RepositoryNotFoundError" in kinds:
        return "check the name; a private model needs token=... or HF_TOKEN"
    return "check the name and the network; `kie pull` resumes where it stopped"


def _cached_name(path: str) -> str | None:
    """`org/name@commit` of a folder in the hub's cache, whose own name is the commit alone."""
    found = CACHED.search(os.path.abspath(path).replace(os.sep, "/"))
    return f"{found[1]}/{found[2]}@{found[3]}" if found else None
