"""What the tables of misuse are made of: right calls of every operation, and kinds of wrong arguments.

A row is (what it is, the wrong value or how to make it of the right one, the error's type, what its message says,
and the name that it begins with where that is not the argument's).
"""

import re

import ml_dtypes
import numpy as np
import torch

import numba_mla

BFLOAT16, FLOAT8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
NUM_BLOCKS, BLOCK_SIZE, RANK, ROPE = 6, 4, 5, 3


def values(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def pages(dtype=np.float32):
    return values(NUM_BLOCKS, BLOCK_SIZE, RANK + ROPE, dtype=dtype)


def outputs(num_tokens, width):
    return {"out": values(num_tokens, 2, width), "lse": values(num_tokens, 2)}


# Right calls: a function, and its arguments, new ones each time.


def decode(dtype=np.float32):
    return numba_mla.decode, {
        "q": values(3, 2, RANK + ROPE),
        "kv_cache": pages(dtype),
        "block_table": [[0, 1, 2147480000], [2, 3, 4], [5, -1, 9]],
        "seq_lens": [8, 9, 1],
        "scale": 0.5,
        "kv_lora_rank": RANK,
        "cache_scale": None,
        **outputs(3, RANK),
        "isa": None,
        "tiling": None,
        "validate": True,
    }


def decode_pair():
    function, arguments = decode()
    q = arguments["q"]
    return function, arguments | {"q": (q[..., :RANK], q[..., RANK:])}


def decode_fp8():
    function, arguments = decode(FLOAT8)
    return function, arguments | {"cache_scale": 0.5}


def decode_656():
    function, arguments = decode()
    cache = np.zeros((NUM_BLOCKS, BLOCK_SIZE, 656), np.uint8)
    return function, arguments | {"q": values(3, 2, 576), "kv_cache": cache, "kv_lora_rank": 512, **outputs(3, 512)}


def extend():
    _, arguments = decode()
    return numba_mla.extend, arguments | {
        "q": values(7, 2, RANK + ROPE),
        "query_start_loc": [0, 2, 6, 7],
        "causal": True,
        **outputs(7, RANK),
    }


def prefill():
    return numba_mla.prefill, {
        "q": values(5, 2, 6),
        "k": values(9, 2, 6),
        "v": values(9, 2, 3),
        "query_start_loc": [0, 2, 5],
        "kv_start_loc": [0, 5, 9],
        "scale": 0.5,
        "causal": True,
        **outputs(5, 3),
        "isa": None,
        "tiling": None,
        "validate": True,
    }


def default_tiling():
    return numba_mla.default_tiling, {"op": "decode", "isa": None, "dtype": "bfloat16"}


def tune():
    """Without time to try anything, so that the answer is always the same."""
    return numba_mla.tune, {
        "op": "extend",
        "num_requests": 2,
        "num_heads": 2,
        "seq_len": 5,
        "num_new": 2,
        "block_size": 4,
        "dtype": "bfloat16",
        "isa": None,
        "budget_s": 1e-9,
        "change_bits": False,
        "progress": None,
    }


def merge_states():
    return numba_mla.merge_states, {
        "out_a": values(3, 2, 4),
        "lse_a": values(3, 2),
        "out_b": values(3, 2, 4) + 1,
        "lse_b": values(3, 2) + 1,
        **outputs(3, 4),
    }


def write_cache():
    return numba_mla.write_cache, {
        "kv_c": values(4, RANK),
        "k_pe": values(4, ROPE),
        "kv_cache": pages(),
        "slot_mapping": [23, -1, 0],
        "cache_scale": None,
        "pad_slot_id": -1,
        "validate": True,
    }


def gather_cache():
    _, arguments = decode()
    kept = {name: arguments[name] for name in ("kv_cache", "block_table", "seq_lens", "kv_lora_rank", "validate")}
    return numba_mla.gather_cache, kept | {
        "starts": [0, 3, 1],
        "cache_scale": None,
        "dtype": None,
        "out": (values(14, RANK), values(15, ROPE)),
    }


def expand_block_table():
    return numba_mla.expand_block_table, {"block_table": [[2, 0, -1]], "block_size": 3}


def plan_context_chunks():
    return numba_mla.plan_context_chunks, {"context_lens": [9, 0, 4], "workspace_tokens": 6, "block_size": 2}


def plan_path():
    config = numba_mla.MLAConfig(
        hidden_size=24, num_heads=2, q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=4, qk_rope_head_dim=2,
        v_head_dim=4,
    )  # fmt: skip
    return numba_mla.plan_path, {"num_new": 40, "prefix": 100, "config": config, "isa": None}


def num_kv_splits():
    return numba_mla.num_kv_splits, {"max_seq_len": 4096, "num_threads": 2}


def block_quant_to_tensor_quant():
    return numba_mla.block_quant_to_tensor_quant, {
        "weight": values(5, 7, dtype=FLOAT8),
        "weight_scale": np.ones((3, 2), np.float32),
        "block_size": (2, 4),
    }


def pack_weight():
    return numba_mla.pack_weight, {"w": values(2, 5, 7), "scale": 0.5, "block_size": None, "isa": None}


def pack_weight_fp8():
    return numba_mla.pack_weight, {
        "w": values(2, 5, 7, dtype=FLOAT8),
        "scale": np.ones((2, 3, 2), np.float32),
        "block_size": (2, 4),
        "isa": None,
    }


def bmm():
    return numba_mla.bmm, {
        "a": values(2, 3, 7),
        "w": numba_mla.pack_weight(values(2, 5, 7)),
        "scale": 0.5,
        "out": values(2, 3, 5),
    }


def absorb_weights():
    return numba_mla.absorb_weights, {
        "kv_b_proj": values(14, 5),
        "num_heads": 2,
        "qk_nope_head_dim": 3,
        "v_head_dim": 4,
    }


def apply_rope():
    return numba_mla.apply_rope, {
        "x": values(3, 2, 4),
        "positions": [0, 7, 5],
        "inv_freq": np.ones(2),
        "interleaved": True,
        "scaling": 1.0,
    }


# Kinds of wrong values: (what it is, the value or how to make it of the right one, error, what the message says).

RAGGED = [[1, 2], [3]]


def masked(x):
    return np.ma.masked_array(x, np.ones(x.shape, bool))


ARRAY = [
    ("float64", lambda x: x.astype(np.float64), TypeError, r"got float64 array.*\.astype\(np\.float32\)"),
    ("V2", lambda x: x.astype(BFLOAT16).view("V2"), TypeError, r"got \|V2 array.*\.view\(ml_dtypes\.bfloat16\)"),
    ("int32", lambda x: x.astype(np.int32), TypeError, "got int32 array"),
    ("bool", lambda x: x > 0, TypeError, "got bool array"),
    ("complex64", lambda x: x.astype(np.complex64), TypeError, "got complex64 array"),
    ("object", lambda x: x.astype(object), TypeError, "got object array"),
    ("big-endian", lambda x: x.astype(">f4"), TypeError, "got >f4 array"),
    ("list", lambda x: x.tolist(), TypeError, "got list"),
    ("ragged", RAGGED, TypeError, "got list"),
    ("text", "text", TypeError, "got str 'text'"),
    ("number", 1.5, TypeError, "got float 1.5"),
    ("tensor", lambda x: torch.zeros(x.shape), TypeError, "got Tensor"),
    ("masked", masked, TypeError, "got MaskedArray"),
    ("rank too high", lambda x: x[None], ValueError, r"got float32 array of shape \(1, "),
    ("rank too low", lambda x: x[0], ValueError, r"got float32 array of shape \("),
    ("scalar", lambda x: x.reshape(-1)[0], TypeError, "got float32"),
    ("rank 0", lambda x: x.reshape(-1)[0, ...], ValueError, r"got float32 array of shape \(\)"),
]
REQUIRED = [("None", None, TypeError, "got NoneType")]


def longer(axis):
    """One more along an axis."""
    return (
        f"axis {axis} too long",
        lambda x: np.concatenate([x, np.take(x, [0], axis)], axis),
        ValueError,
        r"(got|and) .*array of shape \(",
    )


INTEGERS = [
    ("floats", lambda x: np.array(x, np.float64), TypeError, "got float64 array"),
    ("NaN", lambda x: np.full(np.shape(x), np.nan), TypeError, "got float64 array"),
    ("bools", lambda x: np.array(x, bool), TypeError, "got bool array"),
    ("objects", lambda x: np.array(x, object), TypeError, "got object array"),
    ("complex", lambda x: np.array(x, complex), TypeError, "got complex128 array"),
    ("text", "text", TypeError, "got str 'text'"),
    ("words", ["a", "b"], TypeError, "got <U1 array"),
    ("a set", {1, 2}, TypeError, "got set"),
    ("a float", 1.0, TypeError, "got float 1.0"),
    ("an integer", 7, ValueError, r"got int64 array of shape \(\)"),
    ("ragged", RAGGED, ValueError, "got list"),
    ("2**63", lambda x: np.zeros(np.shape(x), np.uint64) + np.uint64(2**63), ValueError, "got 9223372036854775808"),
    ("2**64", lambda x: [2**64], ValueError, "int64's range, got list"),
    ("huge and small", lambda x: [2**63, -1], ValueError, "int64's range, got list"),
    ("tensor with gradient", torch.ones(3, requires_grad=True), TypeError, "got Tensor"),
    ("masked", lambda x: masked(np.array(x)), TypeError, "got MaskedArray"),
    ("rank too high", lambda x: [x], ValueError, r"got int64 array of shape \(1, "),
    ("one more", lambda x: [*x, x[0]], ValueError, ""),
]
SCALE = [
    *((str(x), x, ValueError, f"got {x}$") for x in (0.0, -1.0, np.nan, np.inf, -np.inf)),
    ("0", 0, ValueError, "got 0.0"),
    *((str(x), x, ValueError, "got ") for x in (1e-50, 1e-40, 1e300, 3e38)),
    ("10**400", 10**400, ValueError, "got inf"),
    ("True", True, TypeError, "got bool True"),
    ("text", "1", TypeError, "got str '1'"),
    ("complex", 1j, TypeError, "got complex"),
    ("list", [1.0], TypeError, "got list"),
    ("array", np.ones(1), TypeError, "got float64 array"),
]
COUNT = [
    ("-1", -1, ValueError, "got -1"),
    ("float", 1.0, TypeError, "got float 1.0"),
    ("True", True, TypeError, "got bool True"),
    ("text", "4", TypeError, "got str '4'"),
    ("list", [4], TypeError, "got list"),
    ("NaN", np.nan, TypeError, "got float nan"),
    *REQUIRED,
]
ZERO = [("0", 0, ValueError, "got 0")]
FLAG = [
    ("None", None, TypeError, "got NoneType"),
    ("1", 1, TypeError, "got int 1"),
    ("text", "no", TypeError, "got str 'no'"),
    ("array", np.ones(2, bool), TypeError, "got bool array"),
]
ISA = [
    ("123", 123, TypeError, "got int 123"),
    ("0", 0, TypeError, "got int 0"),
    ("bytes", b"generic", TypeError, "got bytes"),
    ("list", ["generic"], TypeError, "got list"),
    *((repr(x), x, numba_mla.IsaUnavailableError, f"got {x!r}") for x in ("", "sse9", "GENERIC", "generic ")),
]
TILING = [
    ("123", 123, TypeError, "got int 123"),
    ("text", "auto", TypeError, "got str 'auto'"),
    ("dict", {"lane_group": 64}, TypeError, "got dict"),
    ("class", numba_mla.Tiling, TypeError, "got type"),
    ("does not divide", numba_mla.Tiling(lane_group=65), ValueError, "got Tiling.lane_group=65.: .* is not divided"),
]


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def repeated(x):
    """An array of that shape whose rows are all the same memory."""
    return np.lib.stride_tricks.as_strided(x, x.shape, (0, *x.strides[1:]))


def crossing(x):
    """An array of that shape whose rows begin one element apart."""
    return np.lib.stride_tricks.as_strided(x, x.shape, (x.itemsize, *x.strides[1:]))


OUTPUT = [
    ("float64", lambda x: x.astype(np.float64), TypeError, "got float64 array"),
    ("int32", lambda x: x.astype(np.int32), TypeError, "got int32 array"),
    ("list", lambda x: x.tolist(), TypeError, "got list"),
    ("tensor", lambda x: torch.zeros(x.shape), TypeError, "got Tensor"),
    ("masked", masked, TypeError, "got MaskedArray"),
    ("True", True, TypeError, "got bool True"),
    ("read-only", frozen, ValueError, "got a read-only float32 array"),
    ("repeated rows", repeated, ValueError, r"places of their own, got float32 array .* strides \(0,"),
    ("crossing rows", crossing, ValueError, r"places of their own, got float32 array .* strides \(4,"),
    ("rank too high", lambda x: x[None], ValueError, "got float32 array"),
    ("too many rows", lambda x: np.concatenate([x, x]), ValueError, "got float32 array"),
    ("too few rows", lambda x: x[1:], ValueError, "got float32 array"),
]


def over(argument, at=0, says=None):
    """An output over the memory of another argument."""

    def make(x, arguments):
        other = arguments[argument]
        return (other[0] if isinstance(other, tuple) else other).reshape(-1)[at : at + x.size].reshape(x.shape)

    return (f"over {argument}", make, ValueError, f"apart from {says or argument}'s, got")


def spread(x):
    """The same values with a strided last axis."""
    return np.repeat(x, 2, axis=-1)[..., ::2]


PAGED = [
    ("no rows in a page", lambda x: x[:, :0], ValueError, "block_size of at least 1, got float32 array"),
    ("strided rows", spread, ValueError, "side by side, got a last axis with stride 8"),
    ("uint8", lambda x: x.astype(np.uint8), ValueError, "rows of 656 bytes"),
    ("too wide", lambda x: np.concatenate([x, x], -1), ValueError, r"got .*\(6, 4, 16\)"),
]


def array(axes=(), without=()):
    return [row for row in (*ARRAY, *REQUIRED, *(longer(axis) for axis in axes)) if row[0] not in without]


def array_of_q_dtype(axes=()):
    """bfloat16 is no choice where another array has decided for float32."""
    return array(axes, without=["V2"])


def filled(number):
    return (str(number), lambda x: np.full_like(x, number), ValueError, f"got {number}")


def text(pattern, value, error=ValueError, says=None):
    """One value, described by itself."""
    label = re.sub(r"\s+", " ", repr(value))
    return (label if len(label) < 40 else f"{label[:36]} ...", value, error, pattern, *([says] if says else []))


def entry(request, page, value):
    """A block table with one entry changed."""

    def make(x):
        table = np.array(x)
        table[request, page] = value
        return table

    return (f"[{request}, {page}] = {value}", make, ValueError, rf"0 to 5 .*got {value} at \[{request}, {page}\]")


TABLE = [
    entry(0, 0, -1),
    entry(0, 1, 6),
    entry(1, 2, 2147480000),
    entry(2, 0, -(2**40)),
    ("too few rows", lambda x: x[:2], ValueError, r"got int64 array of shape \(2, 3\)"),
    text("0 to 4 ", None, says="seq_lens"),
]
LENGTHS = [
    text("0 to 12 .*got -1 in request 1", [8, -1, 1]),
    text("0 to 12 .*got 13 in request 0", [13, 9, 1]),
    text(f"0 to 12 .*got {2**62} in request 2", [8, 9, 2**62]),
    ("too few", lambda x: x[:2], ValueError, r"shape \(3,\), got int64 array of shape \(2,\)"),
]
STARTS = [
    ("from 1", lambda x: [1, *x[1:]], ValueError, "run from 0 to .*got "),
    ("from -1", lambda x: [-1, *x[1:]], ValueError, "run from 0 to .*got "),
    ("falling", lambda x: [0, x[-1], *x[2:-1], 1, x[-1]], ValueError, "without falling.*got "),
    ("short of the end", lambda x: [*x[:-1], x[-1] - 1], ValueError, "run from 0 to .*got "),
    ("past the end", lambda x: [*x[:-1], x[-1] + 1], ValueError, "run from 0 to .*got "),
    ("empty", [], ValueError, "run from 0 to .*got "),
]
PAIR_PARTS = [
    (
        "wrong latent",
        lambda q: (q[0][..., 1:], q[1]),
        ValueError,
        r"got float32 array of shape \(3, 2, 4\)",
        "q_latent",
    ),
    ("wrong heads", lambda q: (q[0], q[1][:, :1]), ValueError, r"got float32 array of shape \(3, 1, 3\)", "q_pe"),
    ("wrong tokens", lambda q: (q[0], q[1][:2]), ValueError, r"got float32 array of shape \(2, 2, 3\)", "q_pe"),
    ("two dtypes", lambda q: (q[0], q[1].astype(np.float16)), TypeError, "got float16 array", "q_pe"),
    ("None", lambda q: (q[0], None), TypeError, "got NoneType", "q_pe"),
    ("three", lambda q: (*q, q[1]), ValueError, "got 3 items"),
    ("one", lambda q: q[:1], ValueError, "got 1 items"),
]
NO_HEADS = [("no heads", lambda x: x[:, :0], ValueError, r"at least one head.*got float32 array of shape \(\d, 0, ")]
Q = array(without=["list", "ragged"])  # a list of two is a pair
FLOAT_CACHE_SCALE = [text("None with float32 .*got float 0.5", 0.5)]
