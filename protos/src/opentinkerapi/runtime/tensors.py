"""Arrays on the wire: packed little-endian bytes, never repeated numbers (1 M of them: 15 ms, not 174).

`pack` and `unpack` carry any array of the supported element types; token ids and logprobs, whose types are
always int32 and float32, travel as bare bytes.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opentinkerapi.data.v1 import tensor_pb2

INLINE_MAX_BYTES = 2 * 1024 * 1024
"""What a Tensor may carry inline; more is uploaded and named by a BlobRef."""

IDS = np.dtype("<i4")
FLOATS = np.dtype("<f4")

_DTYPES: dict["tensor_pb2.DType.ValueType", np.dtype[Any]] = {
    tensor_pb2.D_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.D_TYPE_FLOAT64: np.dtype("<f8"),
    tensor_pb2.D_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.D_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.D_TYPE_BOOL: np.dtype("?"),
    tensor_pb2.D_TYPE_UINT8: np.dtype("u1"),
}


def pack(array: NDArray[Any]) -> tensor_pb2.Tensor:
    """A Tensor with the array's elements inline. ValueError if the type cannot travel or it is over 2 MiB."""
    little = array.dtype.newbyteorder("<")
    dtype = next((code for code, known in _DTYPES.items() if known == little), None)
    if dtype is None:
        raise ValueError(f"dtype {array.dtype} cannot travel; use one of {dtype_names()}")
    if array.nbytes > INLINE_MAX_BYTES:
        raise ValueError(
            f"{array.nbytes} bytes are over the {INLINE_MAX_BYTES} that travel inline; use a BlobRef"
        )
    data = np.ascontiguousarray(array, dtype=little).tobytes()
    return tensor_pb2.Tensor(dtype=dtype, shape=array.shape, inline=data)


def unpack(tensor: tensor_pb2.Tensor) -> NDArray[Any]:
    """The array that a Tensor carries inline, writable. ValueError if it is malformed or names a blob."""
    if tensor.WhichOneof("payload") == "blob":
        raise ValueError("the tensor's bytes are in the object store; download the blob first")
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"dtype {tensor.dtype} is unknown; use one of {dtype_names()}")
    shape = tuple(tensor.shape)
    if any(extent < 0 for extent in shape) or prod(shape) * dtype.itemsize != len(tensor.inline):
        raise ValueError(f"{len(tensor.inline)} bytes are no {dtype.name} array of shape {shape}")
    if dtype.kind == "b" and tensor.inline.strip(b"\x00\x01"):
        raise ValueError("a bool tensor holds bytes other than 0 and 1")
    return np.frombuffer(tensor.inline, dtype=dtype).reshape(shape).astype(dtype.newbyteorder("="))


def dtype_names() -> list[str]:
    """Element types that can travel."""
    return sorted(dtype.name for dtype in _DTYPES.values())


def pack_ids(ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Token ids [n] as int32 little-endian bytes. OverflowError if one does not fit."""
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    if array.size and (int(array.min()) < -(2**31) or int(array.max()) >= 2**31):
        raise OverflowError("a token id does not fit into 32 bits")
    return array.astype(IDS).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The token ids that `pack_ids` packed. ValueError if the length is no multiple of 4 bytes."""
    ids: list[int] = np.frombuffer(data, dtype=IDS).tolist()
    return ids


def pack_floats(values: Sequence[float] | NDArray[np.floating[Any]]) -> bytes:
    """Numbers [n] as float32 little-endian bytes."""
    return np.asarray(values, dtype=FLOATS).reshape(-1).tobytes()


def unpack_floats(data: bytes) -> NDArray[np.float32]:
    """The numbers that `pack_floats` packed, [n] and writable. ValueError if the length is no multiple of
    4.
    """
    return np.frombuffer(data, dtype=FLOATS).astype(np.float32)
