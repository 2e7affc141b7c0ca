"""`kie.kccl` from Python: arrays in, arrays out, and typed errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kie import errors
from kie.kccl import Communicator

DEVICES = ["cpu", "sim:blocks=8"]
FOUR = Path(__file__).parents[2] / "crates" / "kie-kccl" / "topologies" / "h200x4.json"


def ranks_of(device: str, ranks: int = 4) -> Communicator:
    return Communicator(device, ranks=ranks, threads=64, message_bytes=1 << 16)


def arrays(dtype: str, ranks: int = 4, numbers: int = 120) -> list[np.ndarray]:
    draw = np.random.default_rng(7)
    return [draw.standard_normal(numbers).astype(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_operation(device: str, dtype: str) -> None:
    communicator = ranks_of(device)
    given = arrays(dtype)
    total = given[0].astype("float32")
    for array in given[1:]:
        total = total + array.astype("float32")
    total = total.astype(dtype)
    parts = np.stack(given).reshape(4, 4, 30)
    wanted = {
        "all_reduce": [total] * 4,
        "reduce_scatter": list(total.reshape(4, 30)),
        "all_gather": [np.concatenate(given)] * 4,
        "broadcast": [given[0]] * 4,
        "all_to_all": [parts[:, rank].ravel() for rank in range(4)],
    }
    for name, outputs in wanted.items():
        got = getattr(communicator, name)(given)
        for one, other in zip(got, outputs, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, err_msg=name)
    communicator.barrier()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float64"])
def test_arrays_of_any_type_are_moved(device: str, dtype: str) -> None:
    communicator = ranks_of(device)
    given = [(array * 100).astype(dtype) for array in arrays("float32")]
    moved = communicator.all_to_all(given)
    np.testing.assert_array_equal(moved[2], np.stack(given).reshape(4, 4, 30)[:, 2].ravel())
    np.testing.assert_array_equal(communicator.broadcast(given, root=3)[1], given[3])
    with pytest.raises(errors.InvalidRequestError, match="one type of"):
        communicator.all_reduce(given)


def test_shapes_and_roots_are_kept() -> None:
    communicator = ranks_of("cpu", 2)
    assert communicator.all_reduce([np.float32(1), np.float32(2)])[0].shape == ()
    given = [np.full((3, 5), rank, dtype="float32") for rank in range(2)]
    assert communicator.all_reduce(given)[1].shape == (3, 5)
    np.testing.assert_array_equal(communicator.broadcast(given, root=1)[0], given[1])


def test_brain_floats_travel_as_uint16() -> None:
    given = [np.array([0x3F80, 0x4000], dtype="uint16"), np.array([0x3F80, 0x3F80], dtype="uint16")]
    got = ranks_of("sim:blocks=8", 2).all_reduce(given)
    assert got[0].tolist() == [0x4000, 0x4040]  # 1 + 1, 2 + 1


def test_the_plan_prints_and_is_saved(tmp_path: Path) -> None:
    communicator = ranks_of("sim:blocks=8")
    assert "all-reduce: one-shot up to" in str(communicator)
    assert communicator.plan("all-reduce", 64).startswith("one-shot")
    file = tmp_path / "topology.json"
    communicator.save_topology(file)
    again = Communicator("sim:blocks=8", ranks=4, topology=file, threads=64, message_bytes=1 << 16)
    assert str(again) == str(communicator)
    assert all(us > 0 for us in communicator.measure("all-reduce", 64, steps=5))


@pytest.mark.parametrize("device", ["cpu:0,1,2", "sim:0,1,2", "sim:ranks=3,blocks=2"])
def test_ranks_that_are_listed(device: str) -> None:
    communicator = Communicator(device, threads=64, message_bytes=1 << 16)
    assert communicator.ranks == 3
    given = arrays("float32", 3)
    total = given[0] + given[1] + given[2]
    np.testing.assert_array_equal(communicator.all_reduce(given)[1], total)
    with pytest.raises(errors.InvalidRequestError, match=r"2 ranks: .* has 3"):
        Communicator(device, ranks=2)


@pytest.mark.parametrize(
    ("devices", "options", "told"),
    [
        ("cpu", {"ranks": 0}, "0 ranks: wanted 1 to 8"),
        ("cpu", {"ranks": -1}, "ranks must be 0 to 2^64 - 1, got -1"),
        ("sim:blocks=2", {"ranks": 3}, "2 multiprocessors"),
        ("sim:blocks=2", {"ranks": 2, "threads": 0}, "threads: wanted 1 or more, got 0"),
        ("sim:blocks=2", {"ranks": 2, "threads": -1}, "threads must be 0 to 2^32 - 1, got -1"),
        (
            "sim:blocks=2",
            {"ranks": 2, "message_bytes": -1},
            "message_bytes must be 0 to 2^64 - 1, got -1",
        ),
        # Three times this is a little more than 64 bits hold.
        ("sim:blocks=2", {"ranks": 2, "message_bytes": 2**64 // 3 + 1}, "message_bytes: wanted at"),
        ("sim:blocks=8", {"ranks": 2, "topology": FOUR}, "2 ranks: the topology 4x H200"),
        ("sim:0,1", {"topology": FOUR}, "2 ranks: the topology 4x H200"),
        ("cpu", {"budget_s": float("nan")}, "budget_s NaN"),
        ("cpu", {"budget_s": -1.0}, "budget_s -1"),
        (["cpu", "cpu"], {}, "the CPU is one"),
        (["sim:blocks=2", "sim:blocks=2"], {}, "several simulators is not built"),
        ([], {}, "devices: one name"),
    ],
)
def test_options_that_make_no_sense_are_named(
    devices: str | list[str], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=re.escape(told)):
        Communicator(devices, **options)


@pytest.mark.parametrize(
    "device", ["", "gpu", "cpu:1", "cpu:0,0", "cpu:0,", "cuda:", "cuda:0,0", "cuda:x", "sim:0,2"]
)
def test_devices_that_are_none_are_named(device: str) -> None:
    with pytest.raises(errors.NoDeviceError, match=re.escape(f"no such device: {device}")):
        Communicator(device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_no_collective_takes_is_named(device: str) -> None:
    communicator = ranks_of(device)
    given = arrays("float32", numbers=8)
    strange: list[tuple[Callable[[], object], str]] = [
        (lambda: communicator.broadcast(given, root=-1), "root must be 0 to 2^64 - 1, got -1"),
        (lambda: communicator.broadcast(given, root=4), "root: wanted below 4, got 4"),
        (lambda: communicator.all_gather([np.array([object()])] * 4), "one type without objects"),
        (lambda: communicator.all_gather([[1, [2]]] * 4), "inhomogeneous"),  # type: ignore[list-item]
        (lambda: communicator.all_reduce([]), "got none"),
        (lambda: communicator.all_reduce([*given[:3], given[3][:4]]), "float32[4], float32[8]"),
        (lambda: communicator.all_reduce([*given[:3], given[3] > 0]), "bool[8], float32[8]"),
        (lambda: communicator.all_reduce([a.astype(">f4") for a in given]), "got >f4[8]"),
        (lambda: communicator.plan("all-reduce", -1), "bytes must be 0 to 2^64 - 1, got -1"),
        (lambda: communicator.plan("all-redcue", 1), "there are all-reduce, "),  # type: ignore[arg-type]
        (lambda: communicator.measure("barrier", 0, dtype="f64"), "there are f16, "),  # type: ignore[arg-type]
        (
            lambda: communicator.measure("barrier", 0, steps=-1),
            "steps must be 0 to 2^32 - 1, got -1",
        ),
    ]
    if device != "cpu":
        strange += [
            (lambda: communicator.measure("barrier", 0, steps=0), "steps: wanted 1 or more"),
            (lambda: communicator.measure("all-gather", 1 << 20), "raise message_bytes"),
            (lambda: communicator.all_gather(arrays("float32", numbers=8192)), "131072 bytes"),
        ]
    for call, told in strange:
        with pytest.raises(errors.InvalidRequestError, match=re.escape(told)):
            call()
    np.testing.assert_array_equal(communicator.broadcast(given)[3], given[0])


def test_errors_are_typed() -> None:
    communicator = ranks_of("cpu")
    with pytest.raises(errors.InvalidRequestError, match="one a rank, 4, got 3"):
        communicator.all_reduce(arrays("float32", ranks=3))
    with pytest.raises(errors.InvalidRequestError, match="wanted 4 arrays"):
        communicator.all_reduce(arrays("float64"))
    with pytest.raises(errors.InvalidRequestError, match="a multiple of 16"):
        communicator.all_to_all(arrays("float32", numbers=3))
    with pytest.raises(errors.InvalidRequestError, match="9 ranks"):
        Communicator("cpu", ranks=9)
    with pytest.raises(errors.InvalidRequestError, match="one name a rank"):
        Communicator(["cpu", "cpu"], ranks=2)
    with pytest.raises(errors.InvalidRequestError, match="no-such-file"):
        Communicator("sim:blocks=2", ranks=2, topology="no-such-file")
    with pytest.raises(errors.NoDeviceError):
        Communicator(["nothing:0", "nothing:1"])
