"""Misuse of the layer, its configuration and its cache: a clear error, and the object is as it was."""

import re

import ml_dtypes
import numpy as np
import pytest
from misuse_rows import COUNT, FLAG, OUTPUT, SCALE, ZERO

import numba_mla
from numba_mla import MLAConfig, MLALayer, PagedLatentCache
from numba_mla.checkpoint import attention_shapes

NUMBERS = {
    "hidden_size": 24, "num_heads": 2, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
CONFIG = MLAConfig(**NUMBERS)
RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.standard_normal(shape, dtype=np.float32) for name, shape in attention_shapes(CONFIG).items()}
LAYER = MLALayer(CONFIG, WEIGHTS)
HIDDEN = RNG.standard_normal((3, 24), dtype=np.float32)


def new_cache(**options):
    return PagedLatentCache(CONFIG, **{"num_blocks": 4, "block_size": 4, "dtype": np.float32} | options)


def used_cache():
    """A cache with the requests a (three tokens, of a prompt of five) and b (none)."""
    cache = new_cache(num_layers=2)
    cache.add("a", [1, 2, 3, 4, 5])
    cache.add("b")
    cache.append({"a": 3})
    return cache


def state(cache):
    """All that a refused call could have changed."""
    lengths = {request_id: cache.seq_len(request_id) for request_id in cache.request_ids}
    return lengths, cache.num_free_blocks, cache.data.tobytes()


def refused(error, message, call, *arguments, **options):
    with pytest.raises(error, match=rf"(?s)^{message}") as caught:
        call(*arguments, **options)
    assert type(caught.value) is error


BAD_CACHES = [
    *((name, value, error, pattern) for name in ("num_blocks", "block_size", "num_layers")
      for _, value, error, pattern in (*COUNT, *ZERO, ("2**70", 2**70, ValueError, "got "))),
    *(("dtype", value, TypeError, "got ") for value in ("nonsense", 5, object, np.float64, None, np.int8)),
    *(("layout", value, ValueError, "got ") for value in ("fp8", 5, [])),
    *(("cache_scale", value, ValueError, "expected None") for value in (0.5, "1", True)),
    *(("storage", value, error, "got ") for value, error in (
        (5, TypeError), ([1], TypeError), (np.zeros((1, 4, 4, 20)), TypeError),
        (np.zeros((1, 4, 4, 21), np.float32), ValueError), (np.ma.zeros((1, 4, 4, 20), np.float32), TypeError))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "pattern"), BAD_CACHES)
def test_cache_arguments(name, value, error, pattern):
    refused(error, rf"[a-z_, ]*{name}[a-z_, ]*: .*{pattern}", new_cache, **{name: value})


@pytest.mark.parametrize("row", SCALE, ids=lambda row: row[0])
def test_cache_scale_of_fp8(row):
    _, value, error, pattern = row
    refused(error, f"cache_scale: .*{pattern}", new_cache, dtype=ml_dtypes.float8_e4m3fn, cache_scale=value)


@pytest.mark.parametrize("config", [None, 5, {}, NUMBERS], ids=lambda config: type(config).__name__)
def test_config_of_another_type(config):
    refused(TypeError, "config: expected an MLAConfig, got ", PagedLatentCache, config, 4)
    refused(TypeError, "config: expected an MLAConfig, got ", MLALayer, config, WEIGHTS)


UNHASHABLE = [[1], {}, np.zeros(2)]
BAD_CALLS = [
    *((method, (value, *rest), TypeError, "request_id: .*got ") for value in UNHASHABLE
      for method, rest in (("add", ()), ("free", ()), ("seq_len", ()), ("truncate", (0,)), ("fork", ("c",)))),
    *(("fork", ("a", value), TypeError, "request_id: .*got ") for value in UNHASHABLE),
    *((method, ("zz", *rest), ValueError, "request_id: 'zz'")
      for method, rest in (("free", ()), ("seq_len", ()), ("truncate", (0,)), ("fork", ("c",)))),
    ("add", ("a",), ValueError, "request_id: 'a'"),
    ("fork", ("a", "a"), ValueError, "request_id: 'a'"),
    ("fork", ("a", "b"), ValueError, "request_id: 'b'"),
    *(("add", ("c", value), error, "prompt_ids: expected .*got ") for value, error in (
        (5, ValueError), ("abc", TypeError), ([1.5], TypeError), ([True], TypeError), ([[1], [1, 2]], ValueError),
        ([[1]], ValueError), ([2**64], ValueError), ({1: 2}, TypeError), (object(), TypeError),
        (np.ma.array([1, 2], mask=[0, 1]), TypeError))),
    *(("truncate", ("a", value), error, f"n: .*{pattern}") for _, value, error, pattern in COUNT),
    ("truncate", ("a", 4), ValueError, "n: request 'a' holds 3 tokens, got 4"),
    *(("append", (value,), TypeError, "num_new_tokens: .*got ") for value in (None, 5, [("a", 1)], "a")),
    ("append", ({"b": 1, "zz": 1},), ValueError, "request_id: 'zz'"),
    *(("append", ({"b": 1, "a": value},), error, rf"num_new_tokens\['a'\]: .*{pattern}")
      for _, value, error, pattern in COUNT),
    *(("append", ({"b": 1, "a": value},), numba_mla.CacheFullError, f"{value + 1} new tokens need ")
      for value in (13, 2**70)),
    *(("commit", (value,), TypeError, "batch: .*got ") for value in (None, 5, {})),
]  # fmt: skip


@pytest.mark.parametrize(("method", "arguments", "error", "message"), BAD_CALLS)
def test_cache_methods(method, arguments, error, message):
    cache = used_cache()
    before = state(cache)
    refused(error, message, getattr(cache, method), *arguments)
    assert state(cache) == before
    assert cache.append({"a": 2, "b": 4}).seq_lens.tolist() == [5, 4]


NOT_POSITIVE = (0, -1, np.nan, np.inf, "1", True, [1], 10**400)
NOT_COUNTS = (0, -1, 1.5, True, "8", [8], np.float64(8), np.nan)
ROPE_SCALINGS = [
    (5, TypeError, "rope_scaling: expected a mapping or None, got int 5"),
    ("yarn", TypeError, "rope_scaling: expected a mapping or None, got str 'yarn'"),
    ([], TypeError, "rope_scaling: expected a mapping or None, got list"),
    *((values, ValueError, message) for values, message in (
        ({}, "rope_type: "), ({"rope_type": 5}, "rope_type: "), ({"rope_type": []}, "rope_type: "),
        ({"rope_type": "yarn"}, "factor: missing"), ({"rope_type": "linear", "factor": 10**400}, "factor: expected"),
        ({"rope_type": "linear", "factor": "4"}, "factor: expected"))),
]  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_config_counts(name):
    for value in NOT_COUNTS[1:] if name == "qk_rope_head_dim" else NOT_COUNTS:
        refused(ValueError, f"{name}: expected an integer >= .*got ", MLAConfig, **NUMBERS | {name: value})


@pytest.mark.parametrize("name", ["norm_eps", "rope_theta", "q_latent_scale", "kv_latent_scale"])
def test_config_factors(name):
    for value in NOT_POSITIVE:
        refused(ValueError, f"{name}: expected a finite number > 0, got ", MLAConfig, **NUMBERS | {name: value})


@pytest.mark.parametrize(("value", "error", "message"), ROPE_SCALINGS)
def test_config_rope_scaling(value, error, message):
    refused(error, message, MLAConfig, **NUMBERS | {"rope_scaling": value})


def test_config_others():
    for value in (None, 1, "yes", []):
        refused(ValueError, "rope_interleave: .*got ", MLAConfig, **NUMBERS | {"rope_interleave": value})
    for value in (*NOT_POSITIVE[1:], None):
        refused(ValueError, "query_scale_beta: .*got ", MLAConfig, **NUMBERS | {"query_scale_beta": value})
    for value in (None, 5, [], "x"):
        refused(TypeError, "values: expected a mapping, got ", MLAConfig.from_dict, value)
    for value in (None, 5, [], b"folder"):
        refused(TypeError, "folder: expected a path, got ", MLAConfig.from_pretrained, value)
        refused(TypeError, "folder: expected a path, got ", MLALayer.from_pretrained, value)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name):
    right = WEIGHTS[name]
    wrong = {
        "None": (None, TypeError), "list": ([1.0], TypeError), "complex": (right.astype(complex), TypeError),
        "float64": (right.astype(np.float64), TypeError), "masked": (np.ma.array(right), TypeError),
        "short": (right[1:], ValueError), "rank": (right[None], ValueError),
    }  # fmt: skip
    for value, error in wrong.values():
        message = rf"weights\['{re.escape(name)}'\]: expected .*got "
        refused(error, message, MLALayer, CONFIG, WEIGHTS | {name: value})
    without = {other: weight for other, weight in WEIGHTS.items() if other != name}
    refused(ValueError, f"weights: {re.escape(name)} is missing", MLALayer, CONFIG, without)


def test_weights_of_another_kind():
    for value in (None, 5, []):
        refused(TypeError, "weights: expected a mapping .*got ", MLALayer, CONFIG, value)
    refused(ValueError, "weights: what is not a weight", MLALayer, CONFIG, WEIGHTS | {"what": HIDDEN})
    for _, value, error, pattern in FLAG:
        refused(error, f"requantize_kv_b_proj: .*{pattern}", MLALayer, CONFIG, WEIGHTS, requantize_kv_b_proj=value)


BAD_STEPS = [
    *(("hidden_states", value, error) for value, error in (
        (None, TypeError), ([1], TypeError), (HIDDEN.astype(np.float64), TypeError), (HIDDEN[1:], ValueError),
        (HIDDEN[:, 1:], ValueError), (HIDDEN[:, None], ValueError), (np.ma.array(HIDDEN), TypeError))),
    *(("cache", value, TypeError) for value in (None, 5, HIDDEN)),
    *(("batch", value, TypeError) for value in (None, 5, {})),
    *(("cache_layer", value, error) for _, value, error, _ in COUNT),
    *(("cache_layer", value, ValueError) for value in (2, 2**70)),
    *(("path", value, ValueError) for value in ("fast", "", 5, None, [])),
    *(("out", make(HIDDEN.copy()) if callable(make) else make, error) for _, make, error, _ in OUTPUT),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error"), BAD_STEPS)
def test_layer_call(name, value, error):
    cache = new_cache(num_layers=2)
    cache.add("a")
    arguments = {"hidden_states": HIDDEN, "cache": cache, "batch": cache.append({"a": 3})}
    before = state(cache)
    refused(error, rf"{name}: expected .*got ", LAYER, **arguments | {name: value})
    assert state(cache) == before
    other = new_cache(num_layers=2)
    other.add("a")
    assert LAYER(**arguments).tobytes() == LAYER(HIDDEN, other, other.append({"a": 3})).tobytes()
