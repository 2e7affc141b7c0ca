"""The arithmetic of the bench reports, on runs written by hand."""

from __future__ import annotations

import kie
import numpy as np
import pytest
from conftest import TINY
from kie import machine
from kie.bench import inside, report
from kie.bench.compare import compare
from kie.bench.measure import Run


def run(*, gaps_us: list[float], label: str = "16") -> Run:
    """A run with these gaps."""
    moments = [0]
    for gap in gaps_us:
        moments.append(moments[-1] + round(gap * 1000))
    return Run(
        label=label,
        prompt_tokens=16,
        completion_tokens=len(moments),
        cached_tokens=0,
        ttft_ms=5.0,
        prefill_ms=4.0,
        e2e_ms=5.0 + sum(gaps_us) / 1e3,
        seed=0,
        finish_reason="length",
        bytes_per_token=1000,
        mbu=0.5,
        token_ns=tuple(moments),
        handover_us=tuple(1.0 for _ in moments),
    )


def test_quantiles_are_numpy_s() -> None:
    values = np.random.default_rng(0).exponential(size=101).tolist()
    for point in (0, 0.1, 0.5, 0.99, 0.999, 1):
        assert report.quantile(values, point) == pytest.approx(np.quantile(values, point))
    assert report.quantile([], 0.5) == 0.0


def test_stalls_and_windows() -> None:
    steady = run(gaps_us=[1000.0] * 2500)
    assert report.stalls(0, steady) == []
    found = report.windows(0, steady)
    assert [window["tokens"] for window in found] == [1000, 1000]
    assert [window["tokens_per_second"] for window in found] == [1000, 1000]
    short = report.windows(0, run(gaps_us=[1000.0] * 10))
    assert [window["tokens_per_second"] for window in short] == [1000]
    stalled = run(gaps_us=[100.0] * 50 + [900.0] + [100.0] * 50)
    assert report.stalls(3, stalled) == [{"run": 3, "token": 51, "gap_us": 900.0, "medians": 9.0}]


def test_a_document_has_the_flat_keys() -> None:
    runs = [run(gaps_us=[100.0] * 99), run(gaps_us=[200.0] * 99, label="32")]
    document = report.document(runs, {"kind": "test"}, {"device": "cpu"}, duration_s=2.0)
    assert document["schema_version"] == 1
    total = document["summary"]
    assert total["output_throughput"] == 100.0
    assert total["mean_itl_ms"] == pytest.approx(0.15)
    assert total["mean_ttft_ms"] == total["p99_ttft_ms"] == 5.0
    assert [point["decode_tokens_per_second"] for point in document["points"]] == pytest.approx(
        [10_000, 5_000]
    )
    assert report.markdown(document).count("\n") == 3
    assert len(report.comma_separated(document).splitlines()) == 3


def test_compare_knows_better_from_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    # Reading a gigabyte for each of seven documents takes seconds, and nobody looks at it here.
    monkeypatch.setattr(machine, "_read_bandwidth", lambda free: 1e10)

    def document(gap: float, label: str = "16") -> dict[str, object]:
        return report.document([run(gaps_us=[gap] * 99, label=label)], {}, {}, duration_s=1.0)

    slower = {c.name: c.worse_by for c in compare(document(100.0), document(150.0))}
    assert slower["decode_tokens_per_second"] == pytest.approx(0.5)
    assert slower["median_itl_ms"] == pytest.approx(0.5)
    assert slower["median_ttft_ms"] == 0
    faster = {c.name: c.worse_by for c in compare(document(150.0), document(100.0))}
    assert faster["median_itl_ms"] < 0
    with pytest.raises(kie.InvalidRequestError):
        compare(document(1.0), document(1.0, label="99"))
    with pytest.raises(kie.InvalidRequestError):
        compare({"schema_version": 0}, document(1.0))


def test_a_step_is_told_from_inside() -> None:
    found = inside.measure(
        TINY, device="sim:blocks=8", prompt_tokens=3, max_tokens=3, runs=1, max_seq_len=128
    )
    kernels = inside.KERNELS[:-1]  # one device
    for kernel in kernels:
        assert 0 < found[kernel]["p50"] <= found[kernel]["max"]
    assert len(found["phases"]) == 16
    assert sum(phase["bytes"] for phase in found["phases"]) >= found["bytes_per_token"]
    lines = inside.table(found).splitlines()
    assert len(lines) == 2 + len(kernels) + 2 + len(found["phases"]) + 1
    with pytest.raises(kie.DeviceError):
        inside.measure(TINY, device="cpu")


def test_the_host_answers_a_token() -> None:
    found = inside.echo("sim", rounds=20)
    assert 0 < found["p50"] <= found["p99"] <= found["max"]
    with pytest.raises(kie.NoDeviceError):
        inside.echo("cpu")
    with pytest.raises(kie.InvalidRequestError):
        inside.echo("sim", rounds=0)
