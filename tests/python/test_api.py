"""What one caller sees: completions, tokens, parameters, and the error for each bad input."""

from __future__ import annotations

import math
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import kie
import numpy as np
import pytest
from conftest import TINY
from kie.engine import compile_ahead, compiler_folders

LONG = {"max_tokens": 200, "ignore_eos": True}


def test_a_completion_has_all_its_parts(engine: kie.Engine) -> None:
    done = engine.generate("def f(x):", max_tokens=12, temperature=0, ignore_eos=True)
    assert isinstance(done, kie.Completion)
    assert len(done.token_ids) == 12
    assert done.finish_reason == "length"
    assert done.stop_reason is None
    assert done.usage.prompt_tokens == len(engine.tokenize("def f(x):"))
    assert done.usage.completion_tokens == 12
    assert done.timings.predicted_n == 12
    assert done.timings.ttft_ms > 0
    assert done.timings.itl_max_us >= done.timings.itl_p50_us > 0
    assert isinstance(done.seed, int)
    assert done.model
    assert done.to_dict()["usage"] == done.usage.to_dict()
    assert done.to_dict()["token_ids"] == list(done.token_ids)


def test_a_stream_is_what_generate_returns(engine: kie.Engine) -> None:
    whole = engine.generate("abc", max_tokens=40, temperature=0, ignore_eos=True)
    with engine.stream("abc", max_tokens=40, temperature=0, ignore_eos=True) as stream:
        tokens = list(stream)
        done = stream.result()
        assert stream.finished
        assert list(stream) == []
    assert "".join(token.text for token in tokens) == done.text == whole.text
    assert [i for token in tokens for i in token.token_ids] == list(done.token_ids)
    assert done.token_ids == whole.token_ids
    assert [token.index for token in tokens] == list(range(40))
    moments = [token.t_ns for token in tokens]
    assert moments == sorted(moments)
    pieces = engine.stream("abc", max_tokens=40, temperature=0, ignore_eos=True).text_stream
    parts = list(pieces)
    assert "".join(parts) == done.text
    assert all(parts)


def test_result_alone_reads_to_the_end(engine: kie.Engine) -> None:
    stream = engine.stream("abc", max_tokens=9, ignore_eos=True)
    assert next(stream).index == 0
    assert len(stream.result().token_ids) == 9
    assert stream.result() == stream.result()


def test_read_available_never_waits_and_misses_nothing(engine: kie.Engine) -> None:
    stream = engine.stream("abc", max_tokens=30, ignore_eos=True)
    seen: list[kie.Token] = []
    while not stream.finished:
        seen += stream.read_available()
    assert [token.index for token in seen] == list(range(30))


def test_prompts_may_be_ids_of_any_kind(engine: kie.Engine) -> None:
    ids = engine.tokenize("def")
    greedy: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    wanted = engine.generate("def", **greedy).token_ids
    for prompt in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint16), range(3, 6)):
        got = engine.generate(prompt, **greedy).token_ids
        assert got == wanted or isinstance(prompt, range)


def test_types_are_frozen_and_match(engine: kie.Engine) -> None:
    token = next(engine.stream("abc", max_tokens=2, logprobs=3, ignore_eos=True))
    for value in (token, token.top_logprobs[0]):
        assert not hasattr(value, "__dict__")
        for name in type(value).__match_args__:
            with pytest.raises(AttributeError):
                setattr(value, name, None)
    match token:
        case kie.Token(text, ids, index):
            assert (text, ids, index) == (token.text, token.token_ids, 0)
        case _:
            pytest.fail("no match")
    done = engine.generate("abc", max_tokens=2, ignore_eos=True)
    for value in (done, done.usage, done.timings):
        assert not hasattr(value, "__dict__")
        assert set(type(value).__match_args__) <= set(value.to_dict())
        assert repr(value).startswith(type(value).__name__)


def test_same_seed_same_tokens_and_the_seed_is_reported(engine: kie.Engine) -> None:
    first = engine.generate("abc", temperature=1.0, **LONG)
    again = engine.generate("abc", temperature=1.0, seed=first.seed, **LONG)
    assert again.token_ids == first.token_ids
    assert again.seed == first.seed
    others = [engine.generate("abc", temperature=1.0, seed=s, **LONG).token_ids for s in (1, 2)]
    assert others[0] != others[1]


def test_params_replace_keywords(engine: kie.Engine) -> None:
    params = kie.SamplingParams(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True)
    assert (
        engine.generate("abc", params=params).token_ids
        == engine.generate("abc", max_tokens=6, temperature=1.0, seed=5, ignore_eos=True).token_ids
    )
    with pytest.raises(TypeError, match="max_tokens"):
        engine.generate("abc", params=params, max_tokens=3)
    with pytest.raises(AttributeError):
        params.max_tokens = 7  # type: ignore[misc]


def test_a_stop_string_appears_nowhere(engine: kie.Engine) -> None:
    free = engine.generate("abc", temperature=0, max_tokens=100, ignore_eos=True)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    cut = free.text[: free.text.index(stop)]
    for wanted in (stop, [stop], ("never to be seen", stop)):
        with engine.stream(
            "abc", temperature=0, max_tokens=100, ignore_eos=True, stop=wanted
        ) as stream:
            text = "".join(token.text for token in stream)
            done = stream.result()
        assert text == done.text == cut
        assert done.finish_reason == "stop"
        assert done.stop_reason == stop
        assert done.token_ids == free.token_ids[: len(done.token_ids)]


def test_a_stop_id_ends_it(engine: kie.Engine) -> None:
    free = engine.generate("abc", temperature=0, max_tokens=50, ignore_eos=True)
    wanted = free.token_ids[20]
    first = free.token_ids.index(wanted)
    done = engine.generate(
        "abc", temperature=0, max_tokens=50, ignore_eos=True, stop_token_ids=[wanted]
    )
    assert done.token_ids == free.token_ids[: first + 1]
    assert (done.finish_reason, done.stop_reason) == ("stop", wanted)
    later = engine.generate(
        "abc",
        temperature=0,
        max_tokens=50,
        ignore_eos=True,
        stop_token_ids=[wanted],
        min_tokens=first + 2,
    )
    assert len(later.token_ids) >= first + 2


def test_logprobs_are_those_of_the_raw_logits() -> None:
    from conftest import DATA

    # Float32 weights: prefill and decode then differ by rounding only, on every processor.
    with kie.Engine(DATA / "own_mistral", threads=1) as engine:
        _check_logprobs(engine)


def _check_logprobs(engine: kie.Engine) -> None:
    ids = engine.tokenize("def f")
    with engine.stream(ids, temperature=0, max_tokens=4, ignore_eos=True, logprobs=5) as stream:
        tokens = list(stream)
    sequence = ids + [token.token_ids[0] for token in tokens]
    logits = engine.logits(sequence, path="decode").astype(np.float64)
    for place, token in enumerate(tokens, start=len(ids) - 1):
        row = logits[place] - logits[place].max()
        row -= math.log(np.exp(row).sum())
        assert token.logprob == pytest.approx(row[token.token_ids[0]], abs=2e-3)
        assert token.top_logprobs[0].id == token.token_ids[0]
        assert len(token.top_logprobs) == 5
        for top in token.top_logprobs:
            assert top.logprob == pytest.approx(row[top.id], abs=2e-3)
    chosen = next(engine.stream(ids, max_tokens=1, logprobs=0))
    assert chosen.logprob is not None
    assert chosen.top_logprobs == ()
    assert next(engine.stream(ids, max_tokens=1)).logprob is None


def test_logit_bias_decides(engine: kie.Engine) -> None:
    done = engine.generate("abc", temperature=0, max_tokens=5, logit_bias={77: 1e4})
    assert done.token_ids == (77,) * 5


def test_cancel_ends_with_its_reason(engine: kie.Engine) -> None:
    with engine.stream("abc", **LONG) as stream:
        next(stream)
        stream.cancel()
        done = stream.result()
    assert done.finish_reason == "cancelled"
    assert 1 <= len(done.token_ids) < 200
    with engine.stream("abc", **LONG) as stream:
        next(stream)
    assert stream.result().finish_reason == "cancelled"


def test_timeout_ends_with_its_reason(demo: kie.Engine) -> None:
    done = demo.generate("def f", max_tokens=1500, ignore_eos=True, timeout=0.05)
    assert done.finish_reason == "timeout"
    assert len(done.token_ids) < 1500


def test_tokenize_and_back(engine: kie.Engine) -> None:
    for text in ("def f(x): return x", "naïve € 漢字 🙂", ""):
        ids = engine.tokenize(text, add_special=False)
        assert engine.detokenize(ids) == text
        assert engine.tokenize(text)[-len(ids) or None :] == ids or not ids


def test_logits_have_their_shape(engine: kie.Engine) -> None:
    logits = engine.logits([1, 2, 3])
    assert logits.shape == (3, 512)
    assert logits.dtype == np.float32
    assert logits.flags.writeable
    with pytest.raises(kie.InvalidRequestError):
        engine.logits([1], path="sideways")  # type: ignore[arg-type]


def test_reports_are_plain_data(engine: kie.Engine) -> None:
    engine.warmup()
    before = engine.metrics()
    engine.generate("abc", max_tokens=3)
    assert engine.metrics() != before
    assert engine.info()


BAD_TYPES: list[dict[str, Any]] = [
    {},
    {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
    {"prompt": 5},
    {"prompt": b"bytes"},
    {"prompt": {"a": 1}},
    {"messages": "a"},
    {"messages": {"role": "user"}},
    {"messages": [{"role": ...}]},
    {"prompt": "a", "temprature": 1},
    {"prompt": "a", "max_tokens": "7"},
    {"prompt": "a", "max_tokens": 7.5},
    {"prompt": "a", "max_tokens": True},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "stop": 5},
    {"prompt": "a", "stop": [5]},
    {"prompt": "a", "logit_bias": [1]},
    {"prompt": "a", "seed": 1.5},
]


@pytest.mark.parametrize("call", BAD_TYPES, ids=repr)
def test_wrong_types_are_type_errors(engine: kie.Engine, call: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        engine.generate(**call)


BAD_VALUES: list[dict[str, Any]] = [
    {"prompt": []},
    {"prompt": [512]},
    {"prompt": [2**32]},
    {"prompt": [-1]},
    {"prompt": [True]},
    {"prompt": [1.0]},
    {"prompt": [None]},
    {"prompt": np.array([-1])},
    {"prompt": np.array([1.5])},
    {"prompt": "\ud800"},
    {"prompt": "a\udfffb"},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "temperature": math.nan},
    {"prompt": "a", "temperature": math.inf},
    {"prompt": "a", "top_p": 1.5},
    {"prompt": "a", "top_p": -0.1},
    {"prompt": "a", "min_p": 2},
    {"prompt": "a", "repetition_penalty": 0},
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "top_k": -1},
    {"prompt": "a", "seed": -1},
    {"prompt": "a", "seed": 2**64},
    {"prompt": "a", "stop": "\ud800"},
    {"prompt": "a", "stop": [""]},
    {"prompt": "a", "stop_token_ids": [512]},
    {"prompt": "a", "logit_bias": {512: 1.0}},
    {"prompt": "a", "logit_bias": {1: math.nan}},
    {"prompt": "a", "timeout": -1},
    {"messages": []},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [5]},
]


@pytest.mark.parametrize("call", BAD_VALUES, ids=repr)
def test_values_without_sense_are_refused(engine: kie.Engine, call: dict[str, Any]) -> None:
    with pytest.raises(kie.InvalidRequestError) as caught:
        engine.generate(**call)
    assert caught.value.code in ("invalid_request", "template")
    # It names what was wanted and what came: no remedy is left to tell.
    assert caught.value.message
    assert "correct" not in str(caught.value)


def test_an_empty_text_is_refused_or_only_its_start(engine: kie.Engine) -> None:
    # This tokenizer puts a beginning-of-sequence id in front, so that something is left.
    assert engine.generate("", max_tokens=1).usage.prompt_tokens == 1


def test_too_long_prompts_name_the_numbers(engine: kie.Engine) -> None:
    with pytest.raises(kie.ContextLengthError) as caught:
        engine.generate([1] * 513)
    assert caught.value.context["prompt_tokens"] == 513
    assert caught.value.context["limit"] == 512
    with pytest.raises(kie.ContextLengthError):
        engine.generate([1] * 500, max_tokens=100)
    with pytest.raises(kie.ContextLengthError):
        engine.generate("x y " * 250_000)
    assert len(engine.generate([1] * 500, ignore_eos=True).token_ids) == 12


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": "/nowhere/at/all"}, kie.LoadError),
        ({"model": "no such folder"}, kie.LoadError),
        ({"model": "some-org/some-model"}, kie.LoadError),
        ({"device": "cuda:7"}, kie.DeviceError),
        ({"device": "toaster"}, (kie.DeviceError, kie.InvalidRequestError)),
        ({"dtype": "f7"}, kie.InvalidRequestError),
        ({"idle": "sometimes"}, kie.InvalidRequestError),
        ({"max_batch": 0}, kie.InvalidRequestError),
        ({"max_seq_len": 0}, kie.InvalidRequestError),
        ({"threads": 0}, kie.InvalidRequestError),
        ({"kv_bytes": 1}, (kie.OutOfMemoryError, kie.InvalidRequestError)),
    ],
    ids=repr,
)
def test_bad_engines_are_refused(
    arguments: dict[str, Any], error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(error) as caught:
        kie.Engine(**arguments)
    assert caught.value.hint or isinstance(caught.value, kie.InvalidRequestError)


def test_load_errors_name_the_file(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(kie.LoadError) as caught:
        kie.Engine(tmp_path)
    assert "config.json" in str(caught.value.context["file"])


def test_a_closed_engine_says_so() -> None:
    from conftest import TINY

    opened = kie.Engine(TINY, threads=1)
    stream = opened.stream("abc", **LONG)
    opened.close()
    opened.close()
    assert opened.closed
    for call in (lambda: opened.generate("a"), lambda: opened.stream("a"), opened.session):
        with pytest.raises(kie.EngineClosedError):
            call()
    with pytest.raises(kie.EngineClosedError):
        stream.result()


def test_a_dropped_engine_warns() -> None:
    from conftest import TINY

    opened = kie.Engine(TINY, threads=1)
    with pytest.warns(ResourceWarning, match="close"):
        del opened


def test_the_queue_has_an_end() -> None:
    from conftest import TINY

    with kie.Engine(TINY, threads=1, max_batch=1, max_queue=1) as opened:
        streams: list[kie.Stream] = []

        def fill() -> None:
            for _ in range(50):
                streams.append(opened.stream([1] * 100, max_tokens=400, ignore_eos=True))

        with pytest.raises(kie.QueueFullError) as caught:
            fill()
        assert caught.value.code == "queue_full"
        for stream in streams:
            stream.cancel()


def test_the_exceptions_stand_as_documented() -> None:
    tree = {
        kie.KieError: [
            kie.LoadError,
            kie.UnsupportedModelError,
            kie.DeviceError,
            kie.OutOfMemoryError,
            kie.InvalidRequestError,
            kie.EngineClosedError,
            kie.QueueFullError,
        ],
        kie.DeviceError: [
            kie.NoDeviceError,
            kie.DriverTooOldError,
            kie.BackendMissingError,
            kie.EngineHangError,
        ],
        kie.InvalidRequestError: [kie.ContextLengthError, kie.TemplateError, kie.GrammarError],
    }
    for parent, children in tree.items():
        for child in children:
            assert child.__bases__ == (parent,)
            error = child("what", hint="do this", context={"need": 2, "free": 1, "dump": "d"})
            again = pickle.loads(pickle.dumps(error))
            assert (again.message, again.code, again.hint) == ("what", error.code, "do this")
            assert again.context == error.context
            assert "do this" in str(error)
    oom = kie.OutOfMemoryError("x", context={"need": 2, "free": 1, "plan": "p"})
    assert (oom.need, oom.free, oom.plan) == (2, 1, "p")
    assert kie.EngineHangError("x", context={"dump": "d"}).dump == "d"


def test_the_doctor_reports() -> None:
    report = kie.doctor()
    assert report.cores >= 1
    assert 0 < report.memory_free_bytes <= report.memory_bytes
    assert report.isa in ("amx-bf16", "avx512-bf16", "avx512", "avx2", "scalar")
    assert report.read_bandwidth is not None
    assert report.read_bandwidth > 1e8
    assert report.kie == kie.__version__
    assert all(finding.command for finding in report.missing)
    assert report.to_dict()["will_use"] == report.will_use
    gpu = any(gpu.name == "cuda:0" for gpu in report.gpus)
    assert report.will_use.startswith("cuda:0 (" if gpu else "cpu (")


def test_a_gpu_that_is_not_there_is_an_error_with_a_remedy() -> None:
    if kie.doctor().gpus:
        pytest.skip("a GPU is here")
    for open_it in (
        lambda: kie.Engine(TINY, device="cuda:0"),
        lambda: compile_ahead(TINY, device="cuda:0"),
    ):
        with pytest.raises(kie.NoDeviceError, match="cuda:0") as caught:
            open_it()
        assert caught.value.code == "no_device"
        assert "kie doctor" in caught.value.hint
        assert caught.value.context["device"] == "cuda:0"
    with pytest.raises(kie.NoDeviceError, match="abacus"):
        kie.Engine(TINY, device="abacus")
    with pytest.raises(kie.InvalidRequestError, match="nothing is compiled"):
        compile_ahead(TINY, device="cpu")
    with pytest.raises(kie.InvalidRequestError, match="hang_timeout_s"):
        kie.Engine(TINY, device="cpu", hang_timeout_s=0)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(kie.InvalidRequestError, match="max_itl_ms"):
            kie.Engine(TINY, device="cpu", max_itl_ms=wrong)
        with pytest.raises(kie.InvalidRequestError, match="max_launch_ms"):
            kie.Engine(TINY, device="cpu", max_launch_ms=wrong)


def test_a_compiler_in_site_packages_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer, older = tmp_path / "nvidia/cu13/lib", tmp_path / "nvidia/cuda_nvrtc/lib"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    older.mkdir(parents=True)
    assert compiler_folders("cuda:0") == [str(older)]
    newer.mkdir(parents=True)
    assert compiler_folders("cuda:0") == [str(newer), str(older)]
    assert compiler_folders("cpu") == []


def test_the_kernels_of_a_simulated_gpu_compile_ahead() -> None:
    plan = compile_ahead(TINY, device="sim:blocks=8")
    assert "partition 8 blocks" in plan
    with kie.Engine(TINY, device="sim:blocks=8") as engine:
        assert "partition 8 blocks" in engine.info()["plan"]
        assert len(engine.generate([1, 2, 3], max_tokens=2, ignore_eos=True).token_ids) == 2


def test_auto_on_the_cpu_beside_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kie.engine.GPU_NODES", (__file__,))
    with kie.Engine(device="cpu") as engine:
        assert engine.info()["passed_over"] is None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with kie.Engine(device="auto") as engine:
            device, why = engine.info()["device"], engine.info()["passed_over"]
    # A machine of developers may have a GPU, CI's has none.
    assert device.startswith("cuda") == (why is None)
    assert [str(w.message).endswith(str(why)) for w in told] == [True] * (why is not None)


@pytest.mark.parametrize(
    "name",
    ["max_seq_len", "max_batch", "max_queue", "kv_bytes", "threads", "max_itl_ms", "max_launch_ms"],
)
def test_options_out_of_range_are_named(name: str) -> None:
    options: dict[str, Any] = {name: -1}
    with pytest.raises(kie.InvalidRequestError, match=name):
        kie.Engine(TINY, device="cpu", **options)
    options = {name: "1"}
    with pytest.raises(TypeError, match=name):
        kie.Engine(TINY, device="cpu", **options)


def test_a_device_is_a_name_of_ranks_that_divide() -> None:
    for device in (None, 3):
        with pytest.raises(TypeError, match="device must be str"):
            kie.Engine(TINY, device=device)  # type: ignore[arg-type]
    for device in ("cpu:1", "cpu:0,0", "cpu:0,", "sim:1,0", "sim:ranks=9", "cuda:0,0", "gpu"):
        with pytest.raises(kie.NoDeviceError) as caught:
            kie.Engine(TINY, device=device)
        assert device in caught.value.message
    for device in ("cpu:0,1,2,3,4,5,6", "sim:0,1,2,3,4,5,6"):
        with pytest.raises(kie.UnsupportedModelError, match="do not divide by 7 ranks"):
            kie.Engine(TINY, device=device)
