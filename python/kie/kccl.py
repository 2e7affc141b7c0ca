"""Collectives among the GPUs of one host, or among virtual ranks.

    from kie.kccl import Communicator

    ranks = Communicator(["cuda:0", "cuda:1"])        # one rank a GPU
    ranks = Communicator("sim:blocks=8", ranks=4)     # virtual ranks of one device
    sums = ranks.all_reduce([array_of_rank_0, array_of_rank_1, ...])

Arrays of any type are moved; those of 16- and 32-bit floats are added, too. All ranks get the same
bits: sums are float32, in the order of the ranks. A rank that dies or comes too late raises
`DeviceError` with code `"stalled"`; the communicator is then ready again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from kie import _kie
from kie.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Arrays = Sequence[NDArray[Any]]

Op = Literal["all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all", "barrier"]
Dtype = Literal["f16", "bf16", "f32", "u8"]

_DTYPES = {"float16": "f16", "float32": "f32", "uint16": "bf16", "bfloat16": "bf16"}


class Communicator:
    """Ranks that work together.

    Args:
        devices: one name a rank, such as `["cuda:0", "cuda:1"]`, or all in one (`"cuda:0,1"`); or
            the name of one device, with `ranks`.
        ranks: virtual ranks on the one device (`cpu`, `sim:...` or a GPU).
        message_bytes: the largest message, the larger of a rank's input and output.
        budget_s: longest wait of a rank for another.
        threads: most threads of a block.
        topology: a file that says what lies between the ranks, instead of what the machine tells.
        nvrtc_dirs: further folders in which the CUDA run-time compiler may lie.
    """

    __slots__ = ("_core",)

    def __init__(
        self,
        devices: str | Sequence[str],
        *,
        ranks: int | None = None,
        message_bytes: int = 64 << 20,
        budget_s: float = 1.0,
        threads: int = 1024,
        topology: str | os.PathLike[str] | None = None,
        nvrtc_dirs: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        names = [devices] if isinstance(devices, str) else list(devices)
        self._core = _kie.Communicator(
            names,
            ranks=ranks,
            message_bytes=message_bytes,
            budget_s=budget_s,
            threads=threads,
            topology=topology,
            nvrtc_dirs=list(nvrtc_dirs),
        )

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._core.ranks

    def __str__(self) -> str:
        """The topology, and the algorithm of every operation and size."""
        return self._core.table()

    def save_topology(self, path: str | os.PathLike[str]) -> None:
        """Write what lies between the ranks to a JSON file, which `topology=` takes."""
        self._core.save_topology(path)

    def plan(self, op: Op, bytes: int) -> str:
        """How a message of so many bytes goes; the same on all ranks."""
        return self._core.plan(op, bytes)

    def all_reduce(self, arrays: Arrays) -> list[NDArray[Any]]:
        """Every rank gets the sum of all arrays. uint16 arrays hold bfloat16 numbers."""
        return self._run("all-reduce", arrays)

    def reduce_scatter(self, arrays: Arrays) -> list[NDArray[Any]]:
        """Rank r gets part r of the sum of all arrays, flat."""
        return self._run("reduce-scatter", arrays)

    def all_gather(self, arrays: Arrays) -> list[NDArray[Any]]:
        """Every rank gets all arrays, flat, in the order of the ranks."""
        return self._run("all-gather", arrays)

    def broadcast(self, arrays: Arrays, root: int = 0) -> list[NDArray[Any]]:
        """Every rank gets the root's array; the others are of its shape, whatever they hold."""
        return self._run("broadcast", arrays, root)

    def all_to_all(self, arrays: Arrays) -> list[NDArray[Any]]:
        """Rank r gets part r of every array, flat."""
        return self._run("all-to-all", arrays)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._core.run("barrier", "f32", 0, [b""] * self.ranks)

    def measure(
        self, op: Op, bytes: int, *, steps: int = 1000, dtype: Dtype = "f16"
    ) -> list[float]:
        """Microseconds of one operation on each rank.

        The mean of `steps` of them, one after another inside one kernel. Each all-reduce takes the
        last one's result.
        """
        return self._core.measure(op, dtype, bytes, steps)

    def _run(self, op: Op, arrays: Arrays, root: int = 0) -> list[NDArray[Any]]:
        import numpy as np

        try:
            given: list[NDArray[Any]] = [np.asarray(array, order="C") for array in arrays]
        except ValueError as why:
            raise InvalidRequestError(f"{op}: wanted {self.ranks} arrays: {why}") from None
        kinds = {(str(array.dtype), array.shape) for array in given}
        name = str(given[0].dtype) if given else ""
        adds = op in ("all-reduce", "reduce-scatter")
        objects = any(array.dtype.hasobject for array in given)
        if len(kinds) != 1 or objects or (adds and name not in _DTYPES):
            found = ", ".join(sorted(f"{kind}{list(shape)}" for kind, shape in kinds)) or "none"
            types = f"one type of {sorted(_DTYPES)}" if adds else "one type without objects"
            wanted = f"wanted {self.ranks} arrays of one shape and {types}"
            raise InvalidRequestError(f"{op}: {wanted}, got {found}")
        dtype: np.dtype[Any] = given[0].dtype
        data = [array.tobytes() for array in given]
        outputs = self._core.run(op, _DTYPES.get(name, "u8"), root, data)
        same = op in ("all-reduce", "broadcast")
        flat: list[NDArray[Any]] = [np.frombuffer(output, dtype=dtype) for output in outputs]
        return [np.reshape(array, given[0].shape) if same else array for array in flat]
