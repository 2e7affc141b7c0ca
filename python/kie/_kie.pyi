"""The extension module. Users import from `kie`; only the package itself imports this."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar, Literal, TypedDict, final

from typing_extensions import Unpack

from kie.types import Message

__all__ = [
    "Communicator",
    "Completion",
    "Engine",
    "Server",
    "Session",
    "Stream",
    "Timings",
    "Token",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
    "__commit__",
    "__version__",
    "compile",
    "compiler",
    "echo",
    "gpu_bandwidth",
    "gpus",
    "host",
    "measure",
    "plan",
    "quantize",
    "read_bandwidth",
    "supported",
    "topology",
]

__version__: str
__commit__: str

class _Options(TypedDict, total=False):
    name: str | None
    device: str
    dtype: str
    adapter: str | PathLike[str] | None
    max_seq_len: int | None
    max_batch: int
    max_queue: int
    kv_bytes: int | None
    threads: int | None
    prefix_cache: bool
    reproducible: bool
    exact: bool
    mtp: bool
    idle: str
    max_itl_ms: float | None
    max_launch_ms: float | None
    hang_timeout_s: float
    cache_dir: str | PathLike[str] | None
    read_bandwidth: float | None
    nvrtc_dirs: Sequence[str | PathLike[str]]

def compile(path: str | PathLike[str], **options: Unpack[_Options]) -> str:
    """Compiles ahead what an engine with these options would, and returns the printed plan."""

def quantize(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    to: str,
    progress: Callable[[str, int, int], None] | None,
) -> str:
    """Writes a model quantised into a new folder; returns a line on what it saved."""

def plan(
    path: str | PathLike[str],
    *,
    topology: str | PathLike[str] | None,
    **options: Unpack[_Options],
) -> str:
    """The plan of a model that is not loaded, as JSON; `topology`, a file, is the machine."""

def measure(
    path: str | PathLike[str],
    *,
    prompt_tokens: int,
    tokens: int,
    runs: int,
    **options: Unpack[_Options],
) -> str:
    """Times of decode steps from inside the kernel, as JSON; no tokens leave it."""

def echo(*, rounds: int, **options: Unpack[_Options]) -> list[float]:
    """Microseconds of each of `rounds` round trips of a token between a GPU and the host."""

def gpus() -> tuple[list[tuple[str, str, str, int, int, int]], list[str]]:
    """GPUs that can be used (name, model, architecture, multiprocessors, memory in all and free),
    and what the drivers said of the others.
    """

def topology() -> tuple[str, str] | None:
    """The GPUs and what lies between them, printed and as the JSON of a file; None without."""

def host() -> tuple[str, str, int, int, int]:
    """Processor, instruction set that the kernels use, memory in all and free, in bytes, and the
    threads that an engine on the CPU has.
    """

def supported() -> tuple[list[str], list[str]]:
    """The `model_type`s that kie runs, and how weights may be stored."""

def compiler() -> str | None:
    """The C++ compiler that `device="sim"` would use; None if there is none."""

def gpu_bandwidth(name: str, nvrtc_dirs: Sequence[str | PathLike[str]]) -> float | None:
    """Bytes a second that a GPU's kernels read from its memory, by the ring of copies that decode
    has (best of three runs of 60 ms); None where less than 2 GiB are free."""

def read_bandwidth(threads: int | None = None, gigabytes: float = 2.0) -> float:
    """Bytes a second that `threads` threads (all cores) read, the best of three passes.

    Raises MemoryError without room for the buffer, ValueError for threads outside 1 to 1024 or
    gigabytes outside 0 to 64.
    """

@final
class Token:
    """One generated token."""

    __match_args__: ClassVar[tuple[str, ...]]
    def __new__(
        cls,
        text: str,
        token_ids: Sequence[int],
        index: int,
        logprob: float | None,
        top_logprobs: Sequence[TopLogprob],
        t_ns: int,
    ) -> Token: ...
    def __reduce__(self) -> tuple[type[Token], tuple[Any, ...]]: ...
    @property
    def text(self) -> str:
        """Text that became certain with it.

        Empty while bytes or a possible stop string are held back.
        """
    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its id (one id a token)."""
    @property
    def index(self) -> int:
        """0 for the first generated token."""
    @property
    def logprob(self) -> float | None:
        """Natural log of its probability under the raw logits, where asked for."""
    @property
    def top_logprobs(self) -> tuple[TopLogprob, ...]:
        """The most probable alternatives, where asked for."""
    @property
    def t_ns(self) -> int:
        """Host CLOCK_MONOTONIC in nanoseconds when the device chose it."""
    def to_dict(self) -> dict[str, Any]:
        """All fields by name, nested."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class TopLogprob:
    """A token and how probable it was."""

    __match_args__: ClassVar[tuple[str, ...]]
    def __new__(
        cls,
        id: int,
        logprob: float,
    ) -> TopLogprob: ...
    def __reduce__(self) -> tuple[type[TopLogprob], tuple[Any, ...]]: ...
    @property
    def id(self) -> int:
        """The token."""
    @property
    def logprob(self) -> float:
        """Natural log of its probability under the raw logits."""
    def to_dict(self) -> dict[str, Any]:
        """All fields by name, nested."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class TokenLogprob:
    """A generated token, how probable it was, and what else was."""

    __match_args__: ClassVar[tuple[str, ...]]
    def __new__(
        cls,
        id: int,
        logprob: float,
        top_logprobs: Sequence[TopLogprob],
    ) -> TokenLogprob: ...
    def __reduce__(self) -> tuple[type[TokenLogprob], tuple[Any, ...]]: ...
    @property
    def id(self) -> int:
        """The token."""
    @property
    def logprob(self) -> float:
        """Natural log of its probability under the raw logits."""
    @property
    def top_logprobs(self) -> tuple[TopLogprob, ...]:
        """The most probable tokens, most probable first; as many as were asked for."""
    def to_dict(self) -> dict[str, Any]:
        """All fields by name, nested."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Usage:
    """Token counts of one request."""

    __match_args__: ClassVar[tuple[str, ...]]
    def __new__(
        cls,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
    ) -> Usage: ...
    def __reduce__(self) -> tuple[type[Usage], tuple[Any, ...]]: ...
    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
    @property
    def completion_tokens(self) -> int:
        """Tokens generated."""
    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was already there."""
    def to_dict(self) -> dict[str, Any]:
        """All fields by name, nested."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Timings:
    """Where the time went. Milliseconds unless the name says otherwise."""

    __match_args__: ClassVar[tuple[str, ...]]
    def __new__(
        cls,
        prompt_n: int,
        prompt_ms: float,
        prompt_per_second: float,
        predicted_n: int,
        predicted_ms: float,
        predicted_per_second: float,
        cache_n: int,
        draft_n: int,
        draft_n_accepted: int,
        queue_ms: float,
        ttft_ms: float,
        itl_p50_us: float,
        itl_p99_us: float,
        itl_max_us: float,
        bytes_per_token: int,
        mbu: float,
        mbu_peak: float,
    ) -> Timings: ...
    def __reduce__(self) -> tuple[type[Timings], tuple[Any, ...]]: ...
    @property
    def prompt_n(self) -> int:
        """Prompt tokens computed."""
    @property
    def prompt_ms(self) -> float:
        """Time from admission to the first token."""
    @property
    def prompt_per_second(self) -> float:
        """`prompt_n` a second."""
    @property
    def predicted_n(self) -> int:
        """Tokens generated."""
    @property
    def predicted_ms(self) -> float:
        """Time from the first to the last token."""
    @property
    def predicted_per_second(self) -> float:
        """Tokens a second after the first."""
    @property
    def cache_n(self) -> int:
        """Prompt tokens taken from the cache."""
    @property
    def draft_n(self) -> int:
        """Tokens that were drafted."""
    @property
    def draft_n_accepted(self) -> int:
        """Drafted tokens that were right."""
    @property
    def queue_ms(self) -> float:
        """Time spent waiting for a slot."""
    @property
    def ttft_ms(self) -> float:
        """Time from submission to the first token."""
    @property
    def itl_p50_us(self) -> float:
        """Median gap between tokens, in microseconds."""
    @property
    def itl_p99_us(self) -> float:
        """99th percentile of the gaps."""
    @property
    def itl_max_us(self) -> float:
        """Largest gap."""
    @property
    def bytes_per_token(self) -> int:
        """Bytes that one decoded token reads: weights and KV at the mean position."""
    @property
    def mbu(self) -> float:
        """Bytes a second over the measured stream limit; 0 where that was not measured."""
    @property
    def mbu_peak(self) -> float:
        """Bytes a second over the data sheet's; 0 where unknown."""
    def to_dict(self) -> dict[str, Any]:
        """All fields by name, nested."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Completion:
    """A finished request."""

    __match_args__: ClassVar[tuple[str, ...]]
    def __new__(
        cls,
        text: str,
        token_ids: Sequence[int],
        finish_reason: str,
        stop_reason: str | int | None,
        usage: Usage,
        timings: Timings,
        seed: int,
        model: str,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> Completion: ...
    def __reduce__(self) -> tuple[type[Completion], tuple[Any, ...]]: ...
    @property
    def text(self) -> str:
        """The generated text."""
    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated ids, a stop id included, what lies behind a stop string not."""
    @property
    def finish_reason(
        self,
    ) -> Literal["stop", "length", "tool_calls", "cancelled", "timeout", "error"]:
        """Why it ended."""
    @property
    def stop_reason(self) -> str | int | None:
        """What stopped it, where something did."""
    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry a token of `token_ids`, where `logprobs=` asked for them."""
    @property
    def usage(self) -> Usage:
        """Counts."""
    @property
    def timings(self) -> Timings:
        """Times."""
    @property
    def seed(self) -> int:
        """The seed in use."""
    @property
    def model(self) -> str:
        """Name of the model."""
    def to_dict(self) -> dict[str, Any]:
        """All fields by name, nested."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Communicator:
    """Ranks that work together."""

    def __new__(
        cls,
        devices: Sequence[str],
        *,
        ranks: int | None,
        message_bytes: int,
        budget_s: float,
        threads: int,
        topology: str | PathLike[str] | None,
        nvrtc_dirs: Sequence[str | PathLike[str]],
    ) -> Communicator: ...
    @property
    def ranks(self) -> int:
        """How many there are."""
    def table(self) -> str:
        """The topology, and the algorithm of every operation and size."""
    def save_topology(self, path: str | PathLike[str]) -> None:
        """Write the topology to a file."""
    def plan(self, op: str, bytes: int) -> str:
        """The algorithm of a message."""
    def run(self, op: str, dtype: str, root: int, inputs: Sequence[bytes]) -> list[bytes]:
        """Run an operation: one input a rank, one output a rank."""
    def measure(self, op: str, dtype: str, bytes: int, steps: int) -> list[float]:
        """Microseconds of one operation on each rank, inside one kernel."""

@final
class Engine:
    """A loaded model."""

    def __new__(
        cls,
        path: str | PathLike[str],
        *,
        progress: Callable[[str, int, int], None] | None,
        **options: Unpack[_Options],
    ) -> Engine: ...
    def stream(
        self,
        prompt: str | Sequence[int] | None,
        messages: Sequence[Message] | None,
        sampling: Mapping[str, Any],
        template: Mapping[str, Any] | None = None,
    ) -> Stream: ...
    def session(self, system: str | None) -> Session: ...
    def load_session(self, path: str | PathLike[str]) -> Session: ...
    def logits(self, ids: Sequence[int], path: str) -> tuple[bytearray, int, int]:
        """Little-endian float32 `[tokens, vocab]` and the two sizes."""
    def tokenize(self, text: str, add_special: bool) -> list[int]: ...
    def detokenize(self, ids: Sequence[int], skip_special: bool) -> str: ...
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        template: Mapping[str, Any],
    ) -> str: ...
    def warmup(self) -> None: ...
    def info(self) -> str:
        """The report as JSON."""
    def metrics(self) -> str:
        """The counters as JSON."""
    def close(self) -> None: ...
    def is_closed(self) -> bool: ...

@final
class Session:
    """A conversation whose KV stays between turns."""

    def stream(
        self,
        prompt: str | Sequence[int] | None,
        messages: Sequence[Message] | None,
        sampling: Mapping[str, Any],
        template: Mapping[str, Any] | None = None,
    ) -> Stream: ...
    def fork(self) -> Session: ...
    def rollback(self, to: int) -> None: ...
    def save(self, path: str | PathLike[str]) -> None: ...
    def turns(self) -> int: ...

class _ServerOptions(TypedDict, total=False):
    host: str
    port: int
    api_key: str | None
    served_model_name: str | None
    max_body_mb: int
    header_timeout_s: float
    body_timeout_s: float
    drain_s: float
    silence_s: float
    otlp_endpoint: str | None
    cors_origins: Sequence[str]
    allowed_hosts: Sequence[str]
    log_json: bool
    metrics_compat_vllm: bool
    protect_metrics: bool
    protect_page: bool

@final
class Server:
    """A port that answers; with 503 until it has an engine."""

    def __new__(cls, **options: Unpack[_ServerOptions]) -> Server: ...
    def address(self) -> tuple[str, int]: ...
    def serve(self, engine: Engine) -> None: ...
    def drain(self) -> None: ...
    def wait(self, timeout: float) -> bool: ...

@final
class Stream:
    """One request's tokens."""

    def __iter__(self) -> Stream: ...
    def __next__(self) -> Token:
        """The next token; waits for it."""
    def try_next(self) -> Token | None:
        """A token if one is ready; never waits. `finished` tells the two ends apart."""
    def read_available(self) -> list[Token]:
        """All tokens that are ready; never waits."""
    def result(self) -> Completion:
        """Reads to the end and returns the completion."""
    def cancel(self) -> None:
        """Asks the engine to stop; what is ready stays readable."""
    def poll_fd(self) -> int:
        """An eventfd that becomes readable when there may be something new."""
    @property
    def finished(self) -> bool:
        """Whether the end has been read."""
    @property
    def seed(self) -> int:
        """The seed in use."""
