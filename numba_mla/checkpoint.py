"""Hugging Face checkpoint folders: reading tensors by name, and writing such folders."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from .checks import FLOAT_DTYPES, names
from .config import MLAConfig, attention_prefix, read_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
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

# A DeepSeek-V2-Lite config.json, cut to what concerns attention.
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}


class CheckpointError(ValueError):
    """A checkpoint folder that is there but cannot be used; the message names the file and the tensor."""


class SafetensorsFile:
    """One safetensors file, its header checked against its size, its data mapped and not read.

    Parameters
    ----------
    path : path
        The file.

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
        header.pop("__metadata__", None)
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


class Checkpoint:
    """A Hugging Face checkpoint folder: its config and its tensors by name.

    Only headers are read at first; a tensor's bytes are read where they are used.

    Parameters
    ----------
    folder : path
        Holds `config.json` and either `model.safetensors` or the shards of `model.safetensors.index.json`.

    Attributes
    ----------
    config : dict
        Contents of `config.json`.

    Raises
    ------
    FileNotFoundError
        The folder, `config.json` or the weights are missing.
    CheckpointError
        A file is there but broken.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save_checkpoint(folder, {"model_type": "deepseek_v3"}, {"w": np.ones((2, 3), ml_dtypes.bfloat16)})
    >>> checkpoint = Checkpoint(folder)
    >>> checkpoint.config["model_type"], checkpoint.tensor("w").shape, str(checkpoint.tensor("w").dtype)
    ('deepseek_v3', (2, 3), 'bfloat16')
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self._files: dict[str, SafetensorsFile] = {}
        if (self.folder / SINGLE_FILE).is_file():
            self._listing = self.folder / SINGLE_FILE
            self._file_of = dict.fromkeys(self._open(SINGLE_FILE).names, SINGLE_FILE)
        elif (self.folder / INDEX_FILE).is_file():
            self._listing = self.folder / INDEX_FILE
            self._file_of = _read_weight_map(self._listing)
        else:
            raise FileNotFoundError(f"{self.folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Return a tensor as a read-only array over the mapped file.

        Parameters
        ----------
        name : str
            Its full name.
        shape : tuple of int, optional
            What its shape has to be.

        Returns
        -------
        ndarray
            Read-only; bf16 and fp8 as ml_dtypes.

        Raises
        ------
        CheckpointError
            The tensor is missing or has another shape, or its file is broken.
        FileNotFoundError
            The shard that the index names is missing.
        """
        if name not in self._file_of:
            raise CheckpointError(f"{self._listing}: tensor {name} is missing")
        file = self._open(self._file_of[name])
        tensor = file.tensor(name)
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(f"{file.path}: tensor {name}: expected shape {shape}, got {tensor.shape}")
        return tensor

    def _open(self, file_name: str) -> SafetensorsFile:
        if file_name not in self._files:
            self._files[file_name] = SafetensorsFile(self.folder / file_name)
        return self._files[file_name]


def attention_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Return the name (below `self_attn.`) and shape of every weight that a layer of this config has.

    Examples
    --------
    >>> attention_shapes(MLAConfig.from_dict(DEEPSEEK_V2_LITE))["kv_b_proj.weight"]
    (4096, 512)
    """
    c = config
    q_width = c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    if c.q_lora_rank is None:
        shapes: dict[str, tuple[int, ...]] = {"q_proj.weight": (q_width, c.hidden_size)}
    else:
        shapes = {
            "q_a_proj.weight": (c.q_lora_rank, c.hidden_size),
            "q_a_layernorm.weight": (c.q_lora_rank,),
            "q_b_proj.weight": (q_width, c.q_lora_rank),
        }
    return shapes | {
        "kv_a_proj_with_mqa.weight": (c.cache_row_width, c.hidden_size),
        "kv_a_layernorm.weight": (c.kv_lora_rank,),
        "kv_b_proj.weight": (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj.weight": (c.hidden_size, c.num_heads * c.v_head_dim),
    }


def bias_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Return the name (below `self_attn.`) and shape of every bias that a layer of this config may have."""
    shapes = attention_shapes(config)
    biased = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    return {f"{module}.bias": shapes[f"{module}.weight"][:1] for module in biased if f"{module}.weight" in shapes}


def read_attention(checkpoint: Checkpoint, config: MLAConfig, layer: int) -> dict[str, np.ndarray]:
    """Return the tensors of attention `layer`, named as `attention_shapes` and `bias_shapes` name them.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where to read.
    config : MLAConfig
        The checkpoint's config, which gives the shapes.
    layer : int
        Which attention of the model, from 0.

    Returns
    -------
    dict of str to ndarray
        Read-only arrays over the mapped files.

    Raises
    ------
    CheckpointError
        A tensor is missing, has another shape than the config gives it, or is not of float32, float16 or
        bfloat16.
    """
    if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
        raise ValueError(f"layer: expected an integer >= 0, got {layer!r}")
    prefix = attention_prefix(checkpoint.config, layer)
    wanted = attention_shapes(config)
    biases = bias_shapes(config)
    # The modules that `attention_bias` gives a bias; the queries' other projections never have one from it.
    promised = {"q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"} & biases.keys()
    wanted |= {
        name: shape
        for name, shape in biases.items()
        if prefix + name in checkpoint or (checkpoint.config.get("attention_bias") and name in promised)
    }
    tensors = {name: checkpoint.tensor(prefix + name, shape) for name, shape in wanted.items()}
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {prefix}{name}: expected {names(FLOAT_DTYPES)}, got {tensor.dtype}"
            )
    return tensors


def save_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a Hugging Face checkpoint folder.

    Parameters
    ----------
    folder : path
        Created if it is not there.
    config : mapping
        Contents of `config.json`.
    tensors : mapping of str to ndarray
        Float, integer or ml_dtypes arrays by full name.
    max_shard_bytes : int, optional
        Split into shards of at most this size, unless one tensor alone is larger; None: one file.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_checkpoint(folder, {}, {"a": np.zeros(4), "b": np.zeros(4)}, max_shard_bytes=32)
    >>> sorted(path.name for path in folder.glob("*.safetensors"))
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if max_shard_bytes is not None and max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes: expected a number > 0 or None, got {max_shard_bytes}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    # The writer takes an array's memory as it lies, so it has to be contiguous.
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    metadata = {"format": "pt"}  # what transformers expects to find
    shards = _split_into_shards(contiguous, max_shard_bytes)
    if len(shards) == 1:
        save_file(contiguous, folder / SINGLE_FILE, metadata=metadata)
        return
    (folder / SINGLE_FILE).unlink(missing_ok=True)  # one from before would be read in place of the shards
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: contiguous[name] for name in members}, folder / file_name, metadata=metadata)
        weight_map |= dict.fromkeys(members, file_name)
    total_bytes = sum(tensor.nbytes for tensor in contiguous.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_random_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any] = DEEPSEEK_V2_LITE,
    *,
    num_layers: int = 1,
    dtype: Any = ml_dtypes.bfloat16,
    seed: int = 0,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a checkpoint folder with the attention tensors of the first layers, drawn at random.

    Weights are normal with variance ``1 / columns``, so that activations keep their size; norm weights are
    near 1.

    Parameters
    ----------
    folder : path
        Created if it is not there.
    config : mapping
        A `config.json`; the default is DeepSeek-V2-Lite's.
    num_layers : int
        How many attentions to write.
    dtype : dtype
        float32, float16 or bfloat16.
    seed : int
        Of numpy's default generator.
    max_shard_bytes : int, optional
        As in `save_checkpoint`.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save_random_checkpoint(folder)
    >>> MLAConfig.from_pretrained(folder).kv_lora_rank
    512
    """
    generator = np.random.default_rng(seed)
    shapes = attention_shapes(MLAConfig.from_dict(config))
    tensors = {}
    for layer in range(num_layers):
        prefix = attention_prefix(config, layer)
        for name, shape in shapes.items():
            drawn = generator.standard_normal(shape, dtype=np.float32)
            values = drawn / math.sqrt(shape[1]) if len(shape) == 2 else 1 + drawn / 8
            tensors[prefix + name] = values.astype(dtype)
    save_checkpoint(folder, config, tensors, max_shard_bytes=max_shard_bytes)


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: expected a JSON object with a weight_map") from None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: weight_map: expected an object, got {type(weight_map).__name__}")
    for name, file_name in weight_map.items():
        # A shard is a plain name beside the index: nothing outside the folder is ever opened.
        if not isinstance(file_name, str) or file_name in ("", ".", "..") or set(file_name) & set("/\\:"):
            raise CheckpointError(f"{path}: tensor {name}: {file_name!r} is not a file name")
    return weight_map


def _split_into_shards(tensors: Mapping[str, np.ndarray], max_shard_bytes: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, tensor in tensors.items():
        if max_shard_bytes is not None and shards[-1] and shard_bytes + tensor.nbytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += tensor.nbytes
    return shards


def _are_sizes(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)
