"""Checkpoint folders: what is read, what is refused and how it is named, what is written."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from numba_mla.checkpoint import (
    DEEPSEEK_V2_LITE,
    Checkpoint,
    CheckpointError,
    attention_shapes,
    bias_shapes,
    read_attention,
    save_checkpoint,
    save_random_checkpoint,
)
from numba_mla.config import MLAConfig
from numba_mla.safetensors_file import SafetensorsFile

TINY = {
    "model_type": "deepseek_v3",
    "hidden_size": 24,
    "num_attention_heads": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
PREFIX = "model.layers.0.self_attn."


def write_raw(path, header, data=b"", header_bytes=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data)
    return path


def tiny_tensors(layer=0, **changes):
    generator = np.random.default_rng(layer)
    shapes = attention_shapes(MLAConfig.from_dict(TINY))
    tensors = {
        f"model.layers.{layer}.self_attn.{name}": generator.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    return tensors | changes


def read_tiny(folder, layer=0):
    checkpoint = Checkpoint(folder)
    return read_attention(checkpoint, MLAConfig.from_dict(checkpoint.config), layer)


@pytest.mark.parametrize("max_shard_bytes", [None, 600, 1])
def test_tensors_come_back_as_written(tmp_path, max_shard_bytes):
    tensors = tiny_tensors(0) | tiny_tensors(1)
    save_checkpoint(tmp_path, TINY, tensors, max_shard_bytes=max_shard_bytes)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if max_shard_bytes is None else len(files) > 4
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint.names) == sorted(tensors)
    for name, tensor in tensors.items():
        read = checkpoint.tensor(name, tensor.shape)
        assert read.dtype == tensor.dtype
        assert np.array_equal(read.view(np.uint16), tensor.view(np.uint16))
        assert not read.flags.writeable
    layer_1 = read_tiny(tmp_path, layer=1)
    assert set(layer_1) == set(attention_shapes(MLAConfig.from_dict(TINY)))
    assert np.array_equal(layer_1["o_proj.weight"], tensors["model.layers.1.self_attn.o_proj.weight"])


@pytest.mark.parametrize(
    "dtype",
    [
        np.float64,
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        np.int64,
        np.int32,
        np.int8,
        np.uint8,
        np.bool_,
    ],
)
def test_every_dtype_is_mapped(tmp_path, dtype):
    tensor = np.arange(6).reshape(2, 3).astype(dtype)
    save_checkpoint(tmp_path, {}, {"t": tensor, "strided": tensor.T, "empty": tensor[:0]})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensor("t").dtype == tensor.dtype
    assert checkpoint.tensor("t").tobytes() == tensor.tobytes()
    assert checkpoint.tensor("strided").tolist() == tensor.T.tolist()
    assert checkpoint.tensor("empty").shape == (0, 3)


def test_only_headers_and_mapped_pages_are_read(tmp_path):
    """A sparse file of 8 GiB is read like any other."""
    header = {
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [1 << 33, (1 << 33) + 8]},
        "huge": {"dtype": "BF16", "shape": [1 << 12, 1 << 20], "data_offsets": [0, 1 << 33]},
    }
    path = write_raw(tmp_path / "m.safetensors", header)
    start = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(start + (1 << 33) + 8)
        file.seek(start + (1 << 33))
        file.write(np.array([1.5, -2.0], np.float32).tobytes())
    file = SafetensorsFile(path)
    assert file.tensor("small").tolist() == [1.5, -2.0]
    assert file.tensor("huge")[-1, -1] == 0


def test_tensors_between_element_boundaries_are_aligned(tmp_path):
    values = np.array([1.0, 2.0], np.float32)
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "floats": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    file = SafetensorsFile(write_raw(tmp_path / "m.safetensors", header, b"\x07" + values.tobytes()))
    assert file.tensor("floats").tolist() == [1.0, 2.0]
    assert file.tensor("floats").flags.aligned


def test_files_of_the_library_and_its_metadata_are_read(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"a": np.arange(3.0)}, path, metadata={"format": "np"})
    assert SafetensorsFile(path).names == ["a"]
    save_checkpoint(tmp_path / "ours", TINY, {"a": np.arange(3.0)})
    loaded = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    assert loaded["a"].tolist() == [0.0, 1.0, 2.0]


def test_biases_are_read_where_present_and_required_where_promised(tmp_path):
    bias = {PREFIX + "kv_a_proj_with_mqa.bias": np.ones(20, ml_dtypes.bfloat16)}
    save_checkpoint(tmp_path, TINY, tiny_tensors() | bias)
    assert "kv_a_proj_with_mqa.bias" in read_tiny(tmp_path)
    save_checkpoint(tmp_path, TINY | {"attention_bias": True}, tiny_tensors() | bias, overwrite=True)
    with pytest.raises(CheckpointError, match=r"q_a_proj\.bias is missing"):
        read_tiny(tmp_path)
    assert set(bias_shapes(MLAConfig.from_dict(TINY))) == {
        "q_a_proj.bias",
        "q_b_proj.bias",
        "kv_a_proj_with_mqa.bias",
        "o_proj.bias",
    }


@pytest.mark.parametrize("max_shard_bytes", [None, 600])
def test_a_missing_tensor_is_named_with_its_file(tmp_path, max_shard_bytes):
    tensors = tiny_tensors()
    del tensors[PREFIX + "kv_b_proj.weight"]
    save_checkpoint(tmp_path, TINY, tensors, max_shard_bytes=max_shard_bytes)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*self_attn\.kv_b_proj\.weight is missing"):
        read_tiny(tmp_path)


def test_a_tensor_missing_from_the_shard_that_should_hold_it(tmp_path):
    save_checkpoint(tmp_path, TINY, tiny_tensors(), max_shard_bytes=600)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    name = PREFIX + "o_proj.weight"
    wrong_shard = next(file for file in index["weight_map"].values() if file != index["weight_map"][name])
    index["weight_map"][name] = wrong_shard
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{wrong_shard}: tensor {name} is missing"):
        read_tiny(tmp_path)


@pytest.mark.parametrize("max_shard_bytes", [None, 600])
def test_a_wrong_shape_is_named_with_both_shapes(tmp_path, max_shard_bytes):
    wrong = {PREFIX + "o_proj.weight": np.zeros((24, 19), np.float32)}
    save_checkpoint(tmp_path, TINY, tiny_tensors(**wrong), max_shard_bytes=max_shard_bytes)
    with pytest.raises(
        CheckpointError,
        match=r"\.safetensors: tensor .*o_proj\.weight: expected .*\(24, 18\), got \(24, 19\)",
    ):
        read_tiny(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1, -500])
@pytest.mark.parametrize("max_shard_bytes", [None, 600])
def test_a_truncated_file_is_refused(tmp_path, kept, max_shard_bytes):
    save_checkpoint(tmp_path, TINY, tiny_tensors(), max_shard_bytes=max_shard_bytes)
    path = max(tmp_path.glob("*.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=r"truncated|bad header") as caught:
        read_tiny(tmp_path)
    assert path.name in str(caught.value)
    if kept < 0:
        assert f"tensor {PREFIX}" in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"not json",
        b"\xff\xfe{}",
        b"[]",
        b"[" * 100_000,
        {"t": 3},
        {"t": {"dtype": "F32", "shape": [2]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]}},
        {"t": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"t": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]}},
        {"t": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_bad_header_is_refused(tmp_path, header):
    path = write_raw(tmp_path / "m.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=r"m\.safetensors.*bad header"):
        SafetensorsFile(path)


@pytest.mark.parametrize("header_bytes", [1000, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path, header_bytes):
    path = write_raw(tmp_path / "m.safetensors", {}, bytes(8), header_bytes=header_bytes)
    with pytest.raises(CheckpointError, match="bad header"):
        SafetensorsFile(path)


def test_an_unknown_dtype_matters_only_where_it_is_read(tmp_path):
    header = {
        "odd": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]},
        "fine": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    }
    file = SafetensorsFile(write_raw(tmp_path / "m.safetensors", header, bytes(16)))
    assert file.tensor("fine").tolist() == [0.0, 0.0]
    with pytest.raises(CheckpointError, match=r"tensor odd .*'F4'"):
        file.tensor("odd")


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"t": 3}}',
        '{"weight_map": {"t": "../model.safetensors"}}',
        '{"weight_map": {"t": "/etc/passwd"}}',
        '{"weight_map": {"t": "a\\\\b"}}',
    ],
)
def test_a_bad_index_is_refused(tmp_path, index):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint(tmp_path)


def test_missing_files_are_not_found_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)
    save_checkpoint(tmp_path, TINY, tiny_tensors(), max_shard_bytes=600, overwrite=True)
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-.*\.safetensors"):
        read_tiny(tmp_path)


@pytest.mark.parametrize("layer", [-1, 1.0, True, "0"])
def test_a_wrong_layer_is_named(tmp_path, layer):
    save_checkpoint(tmp_path, TINY, tiny_tensors())
    with pytest.raises(ValueError, match="layer: "):
        read_tiny(tmp_path, layer=layer)


@pytest.mark.parametrize(("layers", "listed"), [((0,), "0"), ((1, 3), "1, 3"), ((), "none")])
def test_a_layer_that_is_not_there_is_named_with_those_that_are(tmp_path, layers, listed):
    tensors = {name: tensor for layer in layers for name, tensor in tiny_tensors(layer).items()}
    tensors["model.layers.5.self_attn.q_proj.weight"] = np.ones(4)  # attention of another kind
    save_checkpoint(tmp_path, TINY, tensors)
    with pytest.raises(CheckpointError, match=rf"layer: 7 .*model\.layers\.7\..*attention layers there: {listed}$"):
        read_tiny(tmp_path, layer=7)


def test_attentions_that_are_not_there_are_counted_as_layer_counts_them(tmp_path):
    tensors = {"model.layers.1.self_attn.0.kv_a_proj_with_mqa.weight": np.ones(4)}
    save_checkpoint(tmp_path, TINY | {"model_type": "longcat_flash"}, tensors)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.1\.\*; attention layers there: 2$"):
        read_tiny(tmp_path, layer=1)


def test_a_file_in_place_of_a_folder_is_said_to_be_one(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(NotADirectoryError, match=r"model\.safetensors is a file"):
        Checkpoint(path)
    with pytest.raises(FileExistsError, match=r"model\.safetensors is a file"):
        save_checkpoint(path, TINY, tiny_tensors(), overwrite=True)


def save_tiny(folder, **options):
    save_checkpoint(folder, TINY, tiny_tensors(), **options)


def save_tiny_at_random(folder, **options):
    save_random_checkpoint(folder, TINY, **options)


@pytest.mark.parametrize("save", [save_tiny, save_tiny_at_random])
def test_what_is_there_is_not_written_over_unless_asked(tmp_path, save):
    for name in ("config.json", "other", "some", "thing"):
        (tmp_path / name).write_text("mine")
    for options in ({}, {"overwrite": False}):
        with pytest.raises(FileExistsError, match=rf"folder: {tmp_path} holds config\.json, other, some and 1 more;"):
            save(tmp_path, **options)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}
    with pytest.raises(TypeError, match="overwrite: expected True or False"):
        save(tmp_path, overwrite="no")
    save(tmp_path, overwrite=True)
    assert set(read_tiny(tmp_path)) == set(attention_shapes(MLAConfig.from_dict(TINY)))
    assert (tmp_path / "other").read_text() == "mine"


def test_a_folder_is_overwritten_whole(tmp_path):
    ones, zeros = {"t": np.ones(4)}, {"t": np.zeros(4), "u": np.zeros(4)}
    for tensors, max_shard_bytes in [(ones, None), (zeros, 32), (ones, None)]:
        save_checkpoint(tmp_path, {}, tensors, max_shard_bytes=max_shard_bytes, overwrite=True)
        assert Checkpoint(tmp_path).tensor("t").tolist() == tensors["t"].tolist()
    with pytest.raises(ValueError, match=r"max_shard_bytes: .*0"):
        save_checkpoint(tmp_path, {}, ones, max_shard_bytes=0)


def test_random_checkpoints_follow_their_seed(tmp_path):
    for folder, seed in [("a", 1), ("b", 1), ("c", 2)]:
        save_random_checkpoint(tmp_path / folder, TINY, num_layers=2, dtype=np.float16, seed=seed)
    a, b, c = (read_tiny(tmp_path / folder, layer=1) for folder in "abc")
    for name in a:
        assert a[name].dtype == np.float16
        assert np.array_equal(a[name], b[name])
        assert not np.array_equal(a[name], c[name])
    assert np.std(a["o_proj.weight"].astype(float)) == pytest.approx(18**-0.5, rel=0.2)


def test_the_shipped_config_is_deepseek_v2_lite():
    config = MLAConfig.from_dict(DEEPSEEK_V2_LITE)
    assert (config.num_heads, config.q_lora_rank, config.cache_row_width) == (16, None, 576)
    assert config.softmax_scale * 192**0.5 == pytest.approx(1.5896, abs=5e-5)
