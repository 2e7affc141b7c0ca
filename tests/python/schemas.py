"""About a hundred schemas in the shape of what tools and structured answers ask for."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INT: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}


def one_of(*values: Any) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


def maybe(schema: Schema) -> Schema:
    """The schema or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def each(schema: Schema, **more: Any) -> Schema:
    """A list."""
    return {"type": "array", "items": schema, **more}


def thing(required: str, **members: Schema) -> Schema:
    """An object of these members, of which some must be there, and no others."""
    return {
        "type": "object",
        "properties": members,
        "required": required.split(),
        "additionalProperties": False,
    }


def said(pattern: str, **more: Any) -> Schema:
    """Text that has such a part."""
    return {"type": "string", "pattern": pattern, **more}


def within(least: float, most: float, kind: str = "integer") -> Schema:
    """A number between two."""
    return {"type": kind, "minimum": least, "maximum": most}


POINT = thing("x y", x=NUMBER, y=NUMBER)
DATE: Schema = {"type": "string", "format": "date"}
NODE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {"node": thing("value", value=INT, next=maybe({"$ref": "#/$defs/node"}))},
}
TREE: Schema = {
    "$defs": {"tree": thing("name", name=TEXT, below=each({"$ref": "#/$defs/tree"}))},
    "$ref": "#/$defs/tree",
}

TOOLS: list[Schema] = [
    thing("city", city=TEXT, unit=one_of("celsius", "fahrenheit")),
    thing("path", path=TEXT, offset=INT, limit=INT),
    thing("path content", path=TEXT, content=TEXT),
    thing("path old new", path=TEXT, old=TEXT, new=TEXT, all=FLAG),
    thing("command", command=TEXT, timeout=within(0, 600000), background=FLAG),
    thing("pattern", pattern=TEXT, path=TEXT, mode=one_of("content", "files", "count")),
    thing(
        "todos",
        todos=each(
            thing(
                "text state",
                text={"type": "string", "minLength": 1},
                state=one_of("open", "running", "done"),
            ),
            maxItems=4,
        ),
    ),
    thing("query", query={"type": "string", "minLength": 2}, domains=each(TEXT)),
    thing("url prompt", url=said("^https://"), prompt=TEXT),
    thing("sql", sql=TEXT, parameters=each({"type": ["string", "number", "null"]})),
    thing(
        "to subject body",
        to=each({"type": "string", "format": "email"}, minItems=1),
        subject=TEXT,
        body=TEXT,
    ),
    thing(
        "title start end",
        title=TEXT,
        start={"type": "string", "format": "date-time"},
        end={"type": "string", "format": "date-time"},
    ),
    thing(
        "origin destination day",
        origin=said("^[A-Z]{3}$"),
        destination=said("^[A-Z]{3}$"),
        day=DATE,
        seats=within(1, 9),
    ),
    thing(
        "amount currency",
        amount={"type": "number", "exclusiveMinimum": 0},
        currency=one_of("EUR", "USD", "CHF"),
    ),
    thing("id", id={"type": "string", "format": "uuid"}),
    thing("host", host={"type": "string", "format": "ipv4"}, port=within(1, 65535)),
    thing("owner repo", owner=TEXT, repo=TEXT, labels=each(TEXT), assignee=maybe(TEXT)),
    thing("expression", expression=said("^[0-9+*/() -]+$")),
    thing(
        "patch",
        patch=each(thing("op path", op=one_of("add", "remove"), path=said("^/"), value=TEXT)),
    ),
    thing(
        "steps", steps=each(thing("why", why=TEXT, done=FLAG), minItems=1, maxItems=3), answer=TEXT
    ),
    thing(
        "shape",
        shape={
            "anyOf": [
                thing("kind r", kind={"const": "circle"}, r=NUMBER),
                thing("kind a", kind={"const": "square"}, a=NUMBER),
            ]
        },
    ),
    thing(
        "shape",
        shape={
            "oneOf": [
                thing("kind r", kind={"const": "circle"}, r=NUMBER),
                thing("kind a", kind={"const": "square"}, a=NUMBER),
            ]
        },
    ),
    {"type": "object", "additionalProperties": TEXT},
    {"type": "object", "additionalProperties": INT, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x_": INT}, "additionalProperties": False},
    {"type": "object", "properties": {"a": INT}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"a": INT, "b": INT},
        "minProperties": 1,
        "additionalProperties": False,
    },
    {"type": "object"},
    thing(""),
    thing("a", a={}),
]
PLAIN: list[Schema] = [
    TEXT,
    INT,
    NUMBER,
    FLAG,
    {"type": "null"},
    {},
    one_of("a", "b"),
    one_of(1, "1", None, True, [1], {"a": 1}),
    {"const": {"deep": [1, {"er": None}]}},
    {"const": 'quo"te\n\u00e4'},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "maxLength": 0},
    said("^[a-z]+-[0-9]{2,4}$"),
    said("b+"),
    said("^(yes|no)$"),
    said("^\\d{4}-\\d{2}$"),
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "duration"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "hostname"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "uri"},
    within(0, 10),
    within(-5, 5, "number"),
    within(100, 1000),
    {"type": "integer", "multipleOf": 5},
    {"type": "integer", "minimum": 0, "multipleOf": 3},
    {"type": "number", "multipleOf": 0.5},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": ["integer", "null"]},
    {"type": ["string", "boolean"], "maxLength": 2},
    maybe(INT),
    each(INT),
    each(FLAG, minItems=2, maxItems=2),
    each(one_of("a", "b", "c"), minItems=1),
    each(each(INT, maxItems=2), maxItems=2),
    {"type": "array", "prefixItems": [TEXT, INT], "items": False},
    {"type": "array", "prefixItems": [TEXT, INT], "minItems": 2, "items": FLAG},
    {"type": "array"},
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]},
    {"allOf": [thing("a", a=INT), {"type": "object", "properties": {"a": {"minimum": 0}}}]},
    {"anyOf": [INT, thing("a", a=INT), each(INT)]},
    {"oneOf": [INT, TEXT]},
    NODE,
    TREE,
    {"$defs": {"p": POINT}, "type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2},
    {"definitions": {"n": INT}, "properties": {"n": {"$ref": "#/definitions/n"}}, "type": "object"},
    {"title": "T", "description": "D", "default": 1, "examples": [1], "x-order": 1, **INT},
]
WIDE: list[Schema] = [
    thing(" ".join(f"m{n}" for n in range(0, count, 2)), **{f"m{n}": kind for n in range(count)})
    for count in (3, 6, 10)
    for kind in (INT, FLAG, one_of("on", "off"), maybe(NUMBER), {"type": "string", "maxLength": 4})
]
NESTED: list[Schema] = [
    thing("a", a=thing("b", b=schema)) for schema in (INT, FLAG, DATE, each(FLAG), POINT, {})
]
SCHEMAS = [*TOOLS, *PLAIN, *WIDE, *NESTED]
