"""`kie pull`: a model from the hub into the hub's cache."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from kie import hub
from kie.cli import options
from kie.errors import InvalidRequestError


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    parser.add_argument("model", help="a hub id, `org/name`")
    options.verb(parser, pull)


def pull(given: Namespace) -> None:
    """Downloads the model and prints its folder."""
    if not hub.is_hub_id(given.model):
        raise InvalidRequestError(f"{given.model!r} is no hub id", hint="pass `org/name`")
    print(hub.download(given.model))
