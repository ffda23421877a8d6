"""Files in the safetensors format: mapped for reading, replaced whole for writing."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

# The safetensors library refuses longer headers too.
MAX_HEADER_BYTES = 100_000_000

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class CheckpointError(ValueError):
    """A saved file or folder that is there but cannot be used; the message names the file and the tensor."""


class SafetensorsFile:
    """One safetensors file, its header checked against its size, its data mapped and not read.

    Parameters
    ----------
    path : path
        The file.

    Attributes
    ----------
    metadata : dict
        What the header says beside its tensors.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    CheckpointError
        The file is cut short or its header does not describe it.

    References
    ----------
    The safetensors format: an 8-byte little-endian header length, a JSON header, the data.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        self._header, self._data_start = self._read_header()
        metadata = self._header.pop("__metadata__", {})
        self.metadata: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
        size_bytes = path.stat().st_size - self._data_start
        for name, entry in self._header.items():
            self._check_entry(name, entry, size_bytes)

    def __contains__(self, name: str) -> bool:
        return name in self._header

    @property
    def names(self) -> list[str]:
        """Names of the tensors in the file."""
        return list(self._header)

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only array over the mapped file."""
        if name not in self._header:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        entry = self._header[name]
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"{self.path}: tensor {name} has unsupported dtype {entry['dtype']!r}")
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if 0 in shape:
            return np.empty(shape, dtype)
        start = self._data_start + entry["data_offsets"][0]
        mapped = np.memmap(self.path, dtype=dtype, mode="r", offset=start, shape=shape)
        # The format packs tensors without padding, so one may start between its elements' boundaries.
        return np.require(mapped, requirements="A")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size_bytes = self.path.stat().st_size
        if size_bytes < 8:
            raise CheckpointError(f"{self.path}: truncated: {size_bytes} bytes, a header length takes 8")
        with self.path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > min(size_bytes - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{self.path}: bad header: its length is {header_bytes} bytes, the file's {size_bytes}"
                )
            text = file.read(header_bytes)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: bad header: not valid JSON ({error})") from None
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: bad header: not a JSON object")
        return header, 8 + header_bytes

    def _check_entry(self, name: str, entry: Any, size_bytes: int) -> None:
        where = f"{self.path}: tensor {name}"
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(
                f"{where}: bad header: needs dtype, shape and two data_offsets, got {entry!r}"
            ) from None
        if not isinstance(dtype, str) or not isinstance(shape, list) or not _are_sizes([*shape, begin, end]):
            raise CheckpointError(f"{where}: bad header: {entry!r}")
        if end > size_bytes:
            raise CheckpointError(
                f"{where}: the file is truncated: the tensor ends at byte {end} of the data, which has {size_bytes}"
            )
        if dtype in DTYPES:
            expected = math.prod(shape) * DTYPES[dtype].itemsize
            if end - begin != expected:
                raise CheckpointError(
                    f"{where}: bad header: {dtype} of shape {tuple(shape)} takes {expected} bytes, "
                    f"data_offsets give {end - begin}"
                )


def save_whole(tensors: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a file that is either there whole or, whatever stops the writing, as it was before.

    Parameters
    ----------
    tensors : mapping of str to ndarray
        C-contiguous.
    path : path
        Replaced if it is there.
    metadata : mapping of str to str
        For the header.

    Raises
    ------
    OSError
        The folder is not there, the disk is full, or the like.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        save_file(dict(tensors), temporary, metadata=dict(metadata))
        # The name must not change hands before the bytes are on the disk.
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _are_sizes(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)
