"""`kie.kccl` from Python: arrays in, arrays out, and typed errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kie import errors
from kie.kccl import Communicator

DEVICES = ["cpu", "sim:blocks=8"]


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
