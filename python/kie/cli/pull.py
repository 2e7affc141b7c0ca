"""`kie pull`: a model from the hub into the hub's cache."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from kie import hub
from kie.cli import options
from kie.errors import InvalidRequestError


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    parser.add_argument("model", help="a hub id, `org/name`")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit; default: main")
    parser.add_argument("--token", help="access token; default: HF_TOKEN or the hub's own login")
    options.verb(parser, pull)


def pull(given: Namespace) -> None:
    """Downloads the model and prints its folder."""
    if not hub.is_hub_id(given.model):
        raise InvalidRequestError(f"{given.model!r} is no hub id", hint="pass `org/name`")
    print(hub.download(given.model, revision=given.revision, token=given.token))
