"""How tokens are chosen: the keywords, and the class that may replace them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from kie.grammar import Grammar


class Sampling(TypedDict, total=False):
    """The sampling keywords of `generate` and `stream`; `SamplingParams` documents each."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    logit_bias: Mapping[int, float] | None
    timeout: float | None
    speculate: Literal["lookup", "mtp"] | None
    prediction: str | Sequence[int] | None
    grammar: Grammar | None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. May replace the keywords: `engine.stream(prompt, params=...)`.

    `None` takes the model's generation_config.json, else the neutral value.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None: to the end of the context."""
    temperature: float | None = None
    """0 is greedy; neutral 1.0."""
    top_p: float | None = None
    """Smallest set of tokens whose probabilities reach this; neutral 1.0."""
    top_k: int | None = None
    """Only the k most probable tokens; 0: all."""
    min_p: float | None = None
    """Only tokens at least this probable relative to the best; neutral 0.0."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens seen; neutral 1.0."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of generated tokens."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits once for each earlier generation of the token."""
    stop: str | Sequence[str] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: Sequence[int] = ()
    """Ids that end the sequence, besides the model's own."""
    min_tokens: int = 0
    """Tokens before which nothing stops the sequence."""
    ignore_eos: bool = False
    """The model's own end-of-sequence ids do not stop."""
    seed: int | None = None
    """Key of the random numbers; None draws one. Always reported."""
    logprobs: int | None = None
    """0: log-probability of the chosen token; k: with the k most probable ones; None: none."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these ids."""
    timeout: float | None = None
    """Seconds after which the request ends with reason `timeout`."""
    speculate: Literal["lookup", "mtp"] | None = None
    """Steps check drafts, for the same tokens sooner. "lookup": what followed where prompt and
    output last read as they end now; "mtp": what the model's layers for it predict, of an engine
    with `mtp=True`."""
    prediction: str | Sequence[int] | None = None
    """What is expected to be generated, text or ids, such as a file before an edit: drafts come
    from it, too. The tokens are the same whatever it says."""
    grammar: Grammar | None = None
    """What the text must be; a finished one ends with reason `stop`."""

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
