"""The engine: a loaded model that answers requests, from any thread and any event loop."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from kie import _kie, bandwidth, hub
from kie.errors import InvalidRequestError
from kie.stream import Stream
from kie.types import Completion, Info, Message, Metrics

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self, Unpack

    from kie.sampling import Sampling, SamplingParams

Progress = Callable[[str, int, int], None]
"""Called while loading with (stage, done, total), on the thread that opens the engine."""

Dtype = Literal["auto", "f32", "f16", "bf16", "fp8", "int4", "mxfp4"]
"""How weights are held: as stored, in another type, or quantised at load."""


class Engine:
    """A model on a device. A context manager; `close()` may be called twice.

    Args:
        model: a folder as Hugging Face writes it, a hub id (`org/name`, needs `kie[hub]`), or
            None for the model that ships with the package.
        device: "auto" (the first NVIDIA GPU that takes the model, else the CPU; `info()` says why
            under "passed_over"), "cpu", "cuda", "cuda:0", "cuda:0,1", ... One that is asked for
            and not there is an error. Bits may differ between numbers of GPUs. For tests, several
            ranks without GPUs: "cpu:0,1" (lanes in one address space), "sim:0,1" (the GPUs'
            kernels, simulated).
        dtype: "auto" (as stored), "f32", "f16" or "bf16"; "fp8", "int4" or "mxfp4" quantises the
            matrices of layers at load, and `info()["plan"]` says what it saved and lost.
        revision: of a hub id: branch, tag or commit; None: `main`.
        token: the hub's access token; None: HF_TOKEN, or what `hf auth login` left.
        adapter: folder of a LoRA adapter as PEFT writes it (adapter_config.json,
            adapter_model.safetensors), merged into the weights at load: in float32, rounded to
            the weights' type, or to `dtype`. DoRA, biases, modules_to_save and matrices that the
            model has not are refused by name. `info()["adapter"]` names it.
        max_seq_len: longest sequence in tokens; None: what the model was made for.
        max_batch: requests that run at once.
        max_queue: requests that may wait.
        kv_bytes: bytes for KV pages; None: one sequence of `max_seq_len` a slot, as memory allows.
        threads: CPU threads; None: all that this process may use.
        prefix_cache: share KV between requests with equal beginnings.
        reproducible: the same request gives the same tokens whatever ran before it. KV that
            decoding made is then computed again by prefill where it becomes part of a prompt, since
            the two differ in rounding; with False a session's next turn starts sooner by that much.
        exact: on a GPU, two halves for each number on its way between products, and keys and values
            in float32: logits differ from float32 arithmetic by about 1e-6, as on the CPU, instead
            of 1e-3. Steps take longer, pages twice the bytes, and prompts go through the decode
            kernel, some positions a pass (`info()["plan"]` says how many). Matrices that a GPU
            cannot hold as stored are rounded all the same; the plan names them.
        mtp: load the layers of multi-token prediction that the checkpoint has beside the model
            (`mtp.` of Qwen3-Next), so that `speculate="mtp"` can draft. Prompts take longer by
            such a layer, which on a GPU sees eight positions a launch; on the CPU so does every
            token. With experts not on a GPU with `exact`.
        idle: "park" (idle costs nothing) or "hot".
        max_itl_ms: bound on the gap of a decoding request beside a prefill, above 0.
        max_launch_ms: milliseconds after which a launch on a GPU ends, with the step or layer that
            it is in, so that a display on the same GPU stays usable; None: when nothing is left
            to do. The tokens are the same.
        hang_timeout_s: seconds after which a silent device is reported as hanging.
        cache_dir: where compiled kernels are kept; None: the user's cache folder.
        progress: called while loading with (stage, done, total); what it raises ends loading.

    Raises:
        LoadError, UnsupportedModelError, DeviceError, OutOfMemoryError, InvalidRequestError.
    """

    _core: _kie.Engine

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        device: str = "auto",
        dtype: Dtype = "auto",
        revision: str | None = None,
        token: str | None = None,
        adapter: str | os.PathLike[str] | None = None,
        max_seq_len: int | None = None,
        max_batch: int = 8,
        max_queue: int = 64,
        kv_bytes: int | None = None,
        threads: int | None = None,
        prefix_cache: bool = True,
        reproducible: bool = True,
        exact: bool = False,
        mtp: bool = False,
        idle: Literal["park", "hot"] = "park",
        max_itl_ms: float | None = None,
        max_launch_ms: float | None = None,
        hang_timeout_s: float = 1.0,
        cache_dir: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        found = hub.resolve(model, revision=revision, token=token)
        self._core = _kie.Engine(
            found.folder,
            name=found.name,
            device=device,
            dtype=dtype,
            adapter=adapter,
            max_seq_len=max_seq_len,
            max_batch=max_batch,
            max_queue=max_queue,
            kv_bytes=kv_bytes,
            threads=threads,
            prefix_cache=prefix_cache,
            reproducible=reproducible,
            exact=exact,
            mtp=mtp,
            idle=idle,
            max_itl_ms=max_itl_ms,
            max_launch_ms=max_launch_ms,
            hang_timeout_s=hang_timeout_s,
            cache_dir=cache_dir,
            read_bandwidth=bandwidth.known() if threads is None else None,
            nvrtc_dirs=compiler_folders(device),
            progress=progress,
        )
        if device == "auto":
            _warn_of_idle_gpus(self.info()["passed_over"])

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion: ...

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """The whole completion of one request. Arguments as for `stream`."""
        variables = _variables(tools, chat_template_kwargs)
        with self._stream(prompt, messages, variables, params, sampling) as stream:
            return stream.result()

    @overload
    async def agenerate(
        self,
        prompt: str | Sequence[int],
        *,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion: ...

    @overload
    async def agenerate(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion: ...

    async def agenerate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """`generate` for asynchronous code: the loop goes on meanwhile, and cancelling the task
        cancels the request. Arguments as for `stream`."""
        variables = _variables(tools, chat_template_kwargs)
        async with self._stream(prompt, messages, variables, params, sampling) as stream:
            return await stream.aresult()

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int] | Sequence[Message]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Completion]:
        """The completions of many requests, in the order of `prompts`.

        As many run as the engine takes at once and few wait, so that the queue is never full of
        them; where others fill it, these wait. The first error ends all of them.

        Args:
            prompts: text, token ids or lists of messages, in any mixture.
            tools: as for `stream`, for all of them; all are lists of messages then.
            chat_template_kwargs: as for `stream`, in the same way.
            progress: draw a progress bar on standard error.
            params: a `SamplingParams` instead of keywords, for all of them.
            sampling: the fields of `SamplingParams` as keywords, for all of them.
        """
        from kie.many import generate_many

        keywords = _keywords(params, sampling)
        keywords |= {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        return generate_many(self, prompts, keywords, progress)

    @overload
    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Stream: ...

    @overload
    def stream(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Stream: ...

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Stream:
        """Starts one request and returns its tokens as they come.

        Args:
            prompt: text (encoded with the special tokens in front) or token ids as they are.
            messages: chat messages instead of a prompt, through the model's template.
            tools: what the template is given as `tools`; calls come back as the model's own text.
            chat_template_kwargs: further variables of the template (`enable_thinking`, ...).
            params: a `SamplingParams` instead of keywords.
            sampling: the fields of `SamplingParams` as keywords.

        Raises:
            TypeError: unknown keyword, wrong type, or not exactly one of prompt and messages.
            InvalidRequestError, ContextLengthError, TemplateError: a request that makes no sense.
            QueueFullError, EngineClosedError.
        """
        variables = _variables(tools, chat_template_kwargs)
        return self._stream(prompt, messages, variables, params, sampling)

    def _stream(
        self,
        prompt: str | Sequence[int] | None,
        messages: Sequence[Message] | None,
        variables: Mapping[str, Any],
        params: SamplingParams | None,
        sampling: Mapping[str, Any],
    ) -> Stream:
        keywords = _keywords(params, sampling)
        return Stream(self._core.stream(prompt, messages, keywords, variables or None))

    def session(self, system: str | None = None) -> Session:
        """A conversation whose KV stays between turns. Without a chat template it continues
        plain text."""
        return Session(self._core.session(system))

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """The session that `Session.save` wrote to `path`: its turns, and the keys and values that
        the engine had of them, so that the next turn begins where it would have.

        It goes on with the tokens that it would have had. Keys and values are taken over where
        this engine would have computed the same bits: with the same kie, device and instruction
        set, and no `reproducible=False` behind the file of an engine with `reproducible=True`.
        Elsewhere they are computed again with the next turn.

        Raises LoadError for a file that is none, is cut short or damaged, or belongs to other
        weights, another `dtype` or a later format; it names the field, what was wanted and what
        was there. Ctrl-C is heard.
        """
        return Session(self._core.load_session(path))

    def logits(
        self, ids: Sequence[int], *, path: Literal["prefill", "decode"] = "prefill"
    ) -> npt.NDArray[np.float32]:
        """Teacher forcing: float32 `[len(ids), vocab]`, row i after reading ids[0..=i].

        `path="decode"` feeds one token at a time, as generation does.
        """
        import numpy as np

        values, tokens, vocab = self._core.logits(ids, path)
        return np.ndarray((tokens, vocab), dtype=np.float32, buffer=values)

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens a prompt starts with."""
        return self._core.tokenize(text, add_special)

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`."""
        return self._core.detokenize(ids, skip_special)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The text that the model's chat template makes of `messages`; further keywords are its
        variables."""
        variables = _variables(tools, template_kwargs)
        return self._core.apply_chat_template(messages, add_generation_prompt, variables)

    def core(self) -> _kie.Engine:
        """The engine as the extension module has it, for what is built on it."""
        return self._core

    def warmup(self) -> None:
        """Touches every page, so that the first request is as fast as later ones."""
        self._core.warmup()

    def info(self) -> Info:
        """Model, device, plan and memory, as plain data."""
        return cast(Info, _object(self._core.info()))

    def metrics(self) -> Metrics:
        """Counters since the engine was opened, as plain data."""
        return cast(Metrics, _object(self._core.metrics()))

    @property
    def closed(self) -> bool:
        """Whether `close()` has been called."""
        return self._core.is_closed()

    def close(self) -> None:
        """Ends running requests and frees the device. Later calls do nothing."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not core.is_closed():
            warnings.warn(
                "an engine was dropped without close(); use `with kie.Engine(...) as engine:`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


class Session:
    """A conversation whose KV stays on the device between turns."""

    __slots__ = ("_core",)

    def __init__(self, core: _kie.Session) -> None:
        self._core = core

    @overload
    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Stream: ...

    @overload
    def stream(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Stream: ...

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> Stream:
        """The next turn; arguments and errors as for `Engine.stream`.

        A `prompt` is what the user says, so `tools` go with it, too. They and
        `chat_template_kwargs` are of this turn: name the same ones in each, and nothing that was
        said is computed again.
        """
        variables = _variables(tools, chat_template_kwargs)
        keywords = _keywords(params, sampling)
        return Stream(self._core.stream(prompt, messages, keywords, variables or None))

    def fork(self) -> Session:
        """A second conversation that shares everything said so far; nothing is copied."""
        return Session(self._core.fork())

    def rollback(self, to: int) -> None:
        """Forgets the turns after the first `to`."""
        self._core.rollback(to)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all turns to the file `path` (safetensors), with the keys and values that the
        engine has of them, for `Engine.load_session`.

        The file appears whole or not at all and replaces what stood there. It is as large as the
        keys and values: `info()["kv_bytes_per_position"]` a token. A GPU's stay where they are:
        the file then holds words and ids alone, and they are computed again. A running turn is
        waited for; Ctrl-C is heard.

        Raises KieError (`code="write"`) where the file cannot be written.
        """
        self._core.save(path)

    @property
    def turns(self) -> int:
        """Turns so far, a running one included."""
        return self._core.turns()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A session holds no thread; its KV is freed with the object."""


def _keywords(params: SamplingParams | None, sampling: Mapping[str, Any]) -> dict[str, Any]:
    if params is None:
        return dict(sampling)
    if sampling:
        raise TypeError(f"params= and the keyword {next(iter(sampling))!r} exclude each other")
    return params.to_dict()


def _variables(
    tools: Sequence[Mapping[str, Any]] | None, others: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Variables of a chat template, beside the messages."""
    if others is not None and not isinstance(others, Mapping):  # pyright: ignore
        kind = type(others).__name__
        raise TypeError(f"chat_template_kwargs must be a dict, got {kind}")
    variables = dict(others or {})
    return variables if tools is None else {**variables, "tools": list(tools)}


def _object(text: str) -> dict[str, Any]:
    import json

    value: dict[str, Any] = json.loads(text)
    return value


def compile_ahead(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "cuda:0",
    dtype: Dtype = "auto",
    exact: bool = False,
    max_seq_len: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> str:
    """Compiles the kernels that an `Engine` with these arguments needs, so that it opens at once.

    Reads the shape of the model, none of its weights. Returns the printed plan.

    Raises:
        LoadError, UnsupportedModelError, DeviceError, InvalidRequestError.
    """
    if device == "auto" or device.split(":")[0] == "cpu":
        raise InvalidRequestError(
            f'nothing is compiled for device="{device}"',
            hint='pass the GPU, device="cuda:0"',
            context={"device": device},
        )
    return _kie.compile(
        hub.resolve(model).folder,
        device=device,
        dtype=dtype,
        exact=exact,
        max_seq_len=max_seq_len,
        cache_dir=cache_dir,
        nvrtc_dirs=compiler_folders(device),
    )


def quantize_folder(
    model: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    to: str,
    revision: str | None = None,
    progress: Progress | None = None,
) -> str:
    """Writes a model of 16 or 32 bits into the new folder `out`, the matrices of its layers
    quantised to "fp8", "int4" or "mxfp4". Returns a line on what it saved and lost.

    The folder has a `quantization_config`, as other loaders of the scheme read it, and the bits
    that `Engine(model, dtype=to)` has. It appears whole or not at all.

    Raises:
        InvalidRequestError: an unknown scheme, a folder that exists, a model quantised already.
        LoadError, UnsupportedModelError: the model. KieError (code "write"): no room for it.
    """
    folder = hub.resolve(model, revision=revision).folder
    return _kie.quantize(folder, out, to=to, progress=progress)


def plan_ahead(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
    exact: bool = False,
    mtp: bool = False,
    revision: str | None = None,
    token: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    max_seq_len: int | None = None,
    max_batch: int = 8,
    threads: int | None = None,
    topology: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """How an `Engine` with these arguments would run: machines, links, messages, who holds what.

    Reads the shape of the model, none of its weights. With `topology`, a file that
    `kie doctor --topology FILE` or `kie.kccl` wrote, `device` names GPUs on it ("auto": all), which
    need not be there.

    Raises:
        LoadError, UnsupportedModelError, DeviceError, OutOfMemoryError, InvalidRequestError (with
        code "topology" for the file).
    """
    found = _kie.plan(
        hub.resolve(model, revision=revision, token=token).folder,
        device=device,
        dtype=dtype,
        exact=exact,
        mtp=mtp,
        adapter=adapter,
        max_seq_len=max_seq_len,
        max_batch=max_batch,
        threads=threads,
        topology=topology,
        cache_dir=None,
        nvrtc_dirs=[] if topology is not None else compiler_folders(device),
    )
    return _object(found)


def compiler_folders(device: str) -> list[str]:
    """Where `pip install kie[cuda]` has put the compiler of a GPU's kernels."""
    if device != "auto" and not str(device).startswith("cuda"):  # of a wrong type others tell
        return []
    from importlib.util import find_spec

    found = find_spec("nvidia")
    roots = list(found.submodule_search_locations or ()) if found else []
    folders = [
        os.path.join(root, *parts, "lib")
        for parts in (("cu13",), ("cuda_nvrtc",))
        for root in roots
    ]
    return [folder for folder in folders if os.path.isdir(folder)]


GPU_NODES = ("/dev/nvidia0", "/dev/kfd")


def _warn_of_idle_gpus(passed_over: str | None) -> None:
    """Says, once a process, that `device="auto"` is the CPU although a GPU is there, and why."""
    found = next((node for node in GPU_NODES if os.path.exists(node)), None)
    if found is not None and passed_over is not None:
        text = f'{found} is there, but device="auto" is "cpu": {passed_over}'
        warnings.warn(text, RuntimeWarning, stacklevel=3)
