"""Hugging Face checkpoint folders: reading tensors by name, and writing such folders."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from .checks import FLOAT_DTYPES, check_flag, check_type, names
from .config import MLAConfig, read_config
from .families import LAYER_ROOTS, attention_name, attention_prefix, find_family, text_config
from .quant import FLOAT8_DTYPES, BlockScaled
from .safetensors_file import CheckpointError, SafetensorsFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

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
    NotADirectoryError
        It is a file.
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
        check_type("folder", folder, (str, os.PathLike), "a path")
        self.folder = Path(folder)
        if self.folder.is_file():
            raise NotADirectoryError(f"{folder} is a file; expected the checkpoint folder that holds config.json")
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


def read_attention(checkpoint: Checkpoint, config: MLAConfig, layer: int) -> dict[str, np.ndarray | BlockScaled]:
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
    dict of str to ndarray or BlockScaled
        Read-only arrays over the mapped files; fp8 projections with their scales.

    Raises
    ------
    CheckpointError
        A tensor is missing, has another shape than the config gives it, or is neither float32, float16,
        bfloat16 nor (a projection alone) fp8 with scales; or there is one that the layer has no place for.
    ValueError
        The layer is not MLA.
    """
    if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
        raise ValueError(f"layer: expected an integer >= 0, got {layer!r}")
    prefix = _find_prefix(checkpoint, layer)
    wanted = attention_shapes(config)
    biases = bias_shapes(config)
    # The modules that `attention_bias` gives a bias; the queries' other projections never have one from it.
    promised = {"q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"} & biases.keys()
    has_biases = text_config(checkpoint.config).get("attention_bias")
    wanted |= {
        name: shape
        for name, shape in biases.items()
        if prefix + name in checkpoint or (has_biases and name in promised)
    }
    tensors: dict[str, np.ndarray | BlockScaled] = {}
    used = set()
    for name, shape in wanted.items():
        tensor = checkpoint.tensor(prefix + name, shape)
        used.add(prefix + name)
        if tensor.dtype in FLOAT8_DTYPES and len(shape) == 2:
            scale_name = _find_scale(checkpoint, prefix + name)
            used.add(scale_name)
            tensors[name] = _with_scales(checkpoint, tensor, scale_name)
        elif tensor.dtype in FLOAT_DTYPES:
            tensors[name] = tensor
        else:
            expected = FLOAT_DTYPES if len(shape) == 1 else (*FLOAT_DTYPES, *FLOAT8_DTYPES)
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {prefix}{name}: expected {names(expected)}, got {tensor.dtype}"
            )
    _refuse_others(checkpoint, prefix, used)
    return tensors


# What may lie below `self_attn` and bear on nothing here: frequencies, which follow from the config, and
# the ranges of activations and cached keys that other programs quantise with.
_WITHOUT_EFFECT = ("rotary_emb.inv_freq", ".input_scale", ".activation_scale", ".k_scale", ".v_scale")
# What every MLA layer has, and other attention has not.
_LATENT_PROJECTION = re.compile(r"\.(\d+)\.self_attn\.(?:(\d+)\.)?kv_a_proj_with_mqa\.weight$")
_SCALE_SUFFIXES = ("_scale_inv", "_scale")


def _find_prefix(checkpoint: Checkpoint, layer: int) -> str:
    """Return what the layer's tensors start with in this checkpoint, or say which layers it has."""
    name = attention_name(checkpoint.config, layer)
    for root in LAYER_ROOTS:
        if any(tensor.startswith(root + name) for tensor in checkpoint.names):
            return root + name
    layers = ", ".join(map(str, _find_layers(checkpoint))) or "none"
    raise CheckpointError(
        f"layer: {layer} is not in {checkpoint.folder}, which has no {attention_prefix(checkpoint.config, layer)}*; "
        f"attention layers there: {layers}"
    )


def _find_layers(checkpoint: Checkpoint) -> list[int]:
    """Return the numbers of the attentions whose tensors are there."""
    per_layer = find_family(checkpoint.config).attentions_per_layer
    matches = (_LATENT_PROJECTION.search(name) for name in checkpoint.names)
    return sorted({int(m[1]) * per_layer + int(m[2] or 0) for m in matches if m})


def _find_scale(checkpoint: Checkpoint, weight_name: str) -> str:
    """Return the name of an fp8 weight's scales, as they are there or should be."""
    candidates = [weight_name + suffix for suffix in _SCALE_SUFFIXES]
    return next((name for name in candidates if name in checkpoint), candidates[0])


def _with_scales(checkpoint: Checkpoint, weight: np.ndarray, scale_name: str) -> BlockScaled:
    """Return an fp8 weight with its scales: one per block, or one for all of it where the config has no blocks."""
    block_size = _weight_block_size(checkpoint)
    scale = checkpoint.tensor(scale_name)
    if block_size is None:
        if scale.size != 1:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {scale_name}: scales of shape {scale.shape} need "
                "quantization_config.weight_block_size in config.json"
            )
        block_size, scale = (weight.shape[0], weight.shape[1]), scale.reshape(1, 1)
    else:
        checkpoint.tensor(scale_name, tuple(-(-n // b) for n, b in zip(weight.shape, block_size, strict=True)))
    if scale.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {scale_name}: expected {names(FLOAT_DTYPES)}, got {scale.dtype}"
        )
    return BlockScaled(weight, scale.astype(np.float32), block_size)


def _weight_block_size(checkpoint: Checkpoint) -> tuple[int, int] | None:
    values = text_config(checkpoint.config).get("quantization_config") or checkpoint.config.get("quantization_config")
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{checkpoint.folder}: quantization_config: expected an object, got {values!r}")
    size = values.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise CheckpointError(f"{checkpoint.folder}: weight_block_size: expected two integers > 0, got {size!r}")
    return size[0], size[1]


def _refuse_others(checkpoint: Checkpoint, prefix: str, used: set[str]) -> None:
    """Refuse tensors of the layer that would be left out of its result."""
    for name in checkpoint.names:
        if name.startswith(prefix) and name not in used and not name.endswith(_WITHOUT_EFFECT):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} is not one of this attention's; expected {', '.join(sorted(used))}"
            )


def save_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
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
    overwrite : bool
        Write over a checkpoint that is there; other files of the folder stay.

    Raises
    ------
    FileExistsError
        The folder is a file, or holds anything and `overwrite` is False; nothing is written.

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
    _check_free(folder, check_flag("overwrite", overwrite))
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
    overwrite: bool = False,
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
    max_shard_bytes, overwrite
        As in `save_checkpoint`.

    Raises
    ------
    FileExistsError
        As `save_checkpoint` does.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save_random_checkpoint(folder)
    >>> MLAConfig.from_pretrained(folder).kv_lora_rank
    512
    """
    _check_free(Path(folder), check_flag("overwrite", overwrite))  # before the drawing, which takes a while
    generator = np.random.default_rng(seed)
    shapes = attention_shapes(MLAConfig.from_dict(config))
    tensors = {}
    for layer in range(num_layers):
        prefix = attention_prefix(config, layer)
        for name, shape in shapes.items():
            drawn = generator.standard_normal(shape, dtype=np.float32)
            values = drawn / math.sqrt(shape[1]) if len(shape) == 2 else 1 + drawn / 8
            tensors[prefix + name] = values.astype(dtype)
    save_checkpoint(folder, config, tensors, max_shard_bytes=max_shard_bytes, overwrite=overwrite)


def _check_free(folder: Path, overwrite: bool) -> None:
    """Refuse to write where something is, unless asked to."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"folder: {folder} is a file")
    if overwrite or not folder.exists():
        return
    found = sorted(path.name for path in folder.iterdir())
    if found:
        listing = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise FileExistsError(f"folder: {folder} holds {listing}; expected a new or empty one, or overwrite=True")


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
