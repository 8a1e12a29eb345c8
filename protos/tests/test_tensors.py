"""Arrays survive the trip, and malformed ones are refused."""

import numpy as np
import pytest

from opentinkerapi.data.v1 import blob_pb2, tensor_pb2
from opentinkerapi.runtime import tensors


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "bool", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_arrays_survive(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(dtype)
    back = tensors.unpack(tensors.pack(array))
    assert (back.dtype, back.shape) == (array.dtype, shape)
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


def test_order_of_bytes_and_memory_does_not_matter() -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3).T
    np.testing.assert_array_equal(tensors.unpack(tensors.pack(array)), array)


def test_bits_survive() -> None:
    array = np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)
    assert tensors.unpack(tensors.pack(array)).tobytes() == array.tobytes()
    assert tensors.unpack_floats(tensors.pack_floats(array)).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("array", "text"),
    [(np.zeros(2, np.float16), "float16"), (np.zeros((1 << 19) + 1, np.float32), "BlobRef")],
)
def test_what_cannot_travel_is_refused(array: np.ndarray, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tensors.pack(array)


@pytest.mark.parametrize(
    "tensor",
    [
        tensor_pb2.Tensor(inline=b"1234"),
        tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_INT32, shape=[2], inline=b"1234"),
        tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_INT32, shape=[-1, -1], inline=b"1234"),
        tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_BOOL, shape=[1], inline=b"\x02"),
        tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_INT32, blob=blob_pb2.BlobRef(sha256="ab")),
    ],
)
def test_malformed_tensors_are_refused(tensor: tensor_pb2.Tensor) -> None:
    with pytest.raises(ValueError, match=r"bytes|dtype|blob"):
        tensors.unpack(tensor)


def test_ids() -> None:
    ids = [0, 1, 49_151, 2**31 - 1, -(2**31)]
    assert tensors.unpack_ids(tensors.pack_ids(ids)) == ids
    assert tensors.pack_ids([1]) == b"\x01\0\0\0"
    assert tensors.unpack_ids(tensors.pack_ids([])) == []
    with pytest.raises(OverflowError):
        tensors.pack_ids([2**31])
    with pytest.raises(ValueError, match="multiple"):
        tensors.unpack_ids(b"123")
