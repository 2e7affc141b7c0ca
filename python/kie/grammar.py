"""What the text of an answer must be: `engine.generate(..., grammar=kie.JsonSchema({...}))`.

A grammar is compiled once an engine and kept. The answer ends with reason `stop` where the text is
complete; where `max_tokens` comes first it is closed legally, if the budget has room for that, and
the reason is `length`. What cannot be kept to is a `GrammarError` before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from kie.errors import GrammarError


@dataclass(frozen=True, slots=True, init=False)
class JsonSchema:
    """JSON that is valid by a JSON Schema, written compactly.

    Supported are `type`, `enum`, `const`, `anyOf`, `allOf`, `oneOf` (whose alternatives exclude
    each other by type, constant or required member), `$ref` within the schema, `properties`,
    `patternProperties`, `additionalProperties`, `required`, `minProperties`, `maxProperties`,
    `items`, `prefixItems`, `minItems`, `maxItems`, `minLength`, `maxLength`, `pattern`, `format`
    (date, date-time, duration, email, hostname, ipv4, ipv6, time, uri, uuid), `minimum`, `maximum`,
    `exclusiveMinimum`, `exclusiveMaximum`, `multipleOf`, and annotations. Another keyword is a
    `GrammarError` that names it and its place.

    Attributes:
        definition: the schema as JSON text.
    """

    syntax: ClassVar[str] = "json_schema"
    definition: str

    def __init__(self, schema: Mapping[str, Any] | bool | str | type | object) -> None:
        """Takes a schema, its JSON text, a pydantic model, or a pydantic `TypeAdapter`.

        Raises:
            GrammarError: for a schema that JSON cannot say.
            TypeError: for anything else.
        """
        object.__setattr__(self, "definition", _definition(schema))


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches as a whole.

    Rust's syntax, without anchors and look-around: `kie.Regex(r"[0-9]{3}-[a-z]+")`.

    Attributes:
        definition: the expression.
    """

    syntax: ClassVar[str] = "regex"
    definition: str


@dataclass(frozen=True, slots=True)
class Lark:
    """Text of a context-free grammar in llguidance's form of Lark, which begins with `start`.

    Attributes:
        definition: the grammar.
    """

    syntax: ClassVar[str] = "lark"
    definition: str


Grammar = JsonSchema | Regex | Lark


def _definition(schema: object) -> str:
    if isinstance(schema, str):
        return schema
    for name in ("model_json_schema", "json_schema"):
        make = getattr(schema, name, None)
        if callable(make):
            schema = make()
            break
    if not isinstance(schema, Mapping | bool):
        got = type(schema).__name__
        raise TypeError(f"schema must be a mapping, JSON text or a pydantic model, got {got}")
    try:
        made = cast("Mapping[str, Any] | bool", schema)
        return json.dumps(made if isinstance(made, bool) else dict(made), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"grammar: the schema is no JSON: {error}") from error
