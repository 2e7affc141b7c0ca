"""Words and code put together: verb forms, plurals, brackets around an expression."""

from __future__ import annotations

import re

IRREGULAR = {"have": "has", "be": "is", "do": "does"}
PLURALS = """vowel,consonant,digit,letter,uppercase letter,lowercase letter,palindrome,prime number,
perfect square,multiple of,power of two""".replace("\n", "").split(",")
# A name, a call or an item: binds more tightly than any operator.
TIGHT = re.compile(r"[\w.]+(\([^()]*\)|\[[^\[\]]*\])*")


def third(phrase: str) -> str:
    """'square each and return their sum' -> 'squares each and return their sum'."""
    first, space, rest = phrase.partition(" ")
    if first.endswith(("s", "x", "ch", "sh", "z")):
        first += "es"
    elif first.endswith("y") and first[-2] not in "aeiou":
        first = first[:-1] + "ies"
    else:
        first = IRREGULAR.get(first, first + "s")
    if "duplicates and sort them" in rest:
        # "sortss" is what the published text has: the model was trained on it, the tasks ask it.
        rest = rest.replace(" and sort ", " and sorts ")
        rest = rest.replace("duplicates and sort", "duplicates and sorts")
    return first + space + rest


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def plural_verb(phrase: str) -> str:
    """'is even' -> 'are even', 'contains a digit' -> 'contain a digit'."""
    for one, many in (("is ", "are "), ("has ", "have "), ("does not", "do not")):
        if phrase.startswith(one):
            return phrase.replace(one, many, 1)
    first, _, rest = phrase.partition(" ")
    return f"{first.removesuffix('s')} {rest}"


def plural_nouns(phrase: str) -> str:
    """'are a vowel' -> 'are vowels'."""
    for one in PLURALS:
        many = one.replace("multiple", "multiples").replace("power", "powers")
        many = many if " of" in one else one + "s"
        pattern = rf"\bare (not )?an? {one}\b"
        phrase = re.sub(pattern, lambda m, many=many: f"are {m.group(1) or ''}{many}", phrase)
    return phrase


def bracketed(code: str) -> str:
    return code if TIGHT.fullmatch(code) else f"({code})"


def insert(code: str, x: str) -> str:
    """`code` with the expression `x` for `{x}`, in brackets where precedence could change it."""
    if TIGHT.fullmatch(x) or code == "{x}":
        return code.replace("{x}", x)

    def one(match: re.Match[str]) -> str:
        before, after = code[match.start() - 1 : match.start()], code[match.end() : match.end() + 1]
        return x if before == "(" and after in (")", ",") else f"({x})"

    return re.sub(r"\{x\}", one, code)
