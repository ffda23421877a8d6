"""Misuse of every argument of every operation: a clear error before anything is written, and nothing lost.

A row of the table is one wrong value of one argument. The error must have the stated type and say, after the
argument's name, what was expected and what came; arrays that the call was to write hold their old bytes; and
the same call with right arguments then gives the bits that it gave before.
"""

import inspect
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from misuse_rows import (
    BFLOAT16,
    COUNT,
    FLAG,
    FLOAT8,
    FLOAT_CACHE_SCALE,
    INTEGERS,
    ISA,
    LENGTHS,
    NO_HEADS,
    OUTPUT,
    PAGED,
    PAIR_PARTS,
    RANK,
    REQUIRED,
    ROPE,
    SCALE,
    STARTS,
    TABLE,
    TILING,
    ZERO,
    Q,
    absorb_weights,
    apply_rope,
    array,
    array_of_q_dtype,
    block_quant_to_tensor_quant,
    bmm,
    crossing,
    decode,
    decode_656,
    decode_fp8,
    decode_pair,
    default_tiling,
    expand_block_table,
    extend,
    filled,
    frozen,
    gather_cache,
    merge_states,
    num_kv_splits,
    over,
    pack_weight,
    pack_weight_fp8,
    plan_context_chunks,
    plan_path,
    prefill,
    repeated,
    text,
    tune,
    values,
    write_cache,
)

import numba_mla
from numba_mla import BlockScaled

MISUSE = {
    decode: {
        "q": [
            *Q,
            *NO_HEADS,
            ("narrower than the latent", lambda q: q[..., :4], ValueError, "kv_lora_rank = 5, got .*array"),
            ("other width", lambda q: q[..., :7], ValueError, "rows of 7 values.*got 8 in", "kv_cache"),
            ("other dtype", lambda q: q.astype(np.float16), TypeError, "dtype float32, got float16 array"),
            (
                "768 rows",
                values(768, 2, RANK + ROPE),
                ValueError,
                r"\(768,\), got int64 array of shape \(3,\)",
                "seq_lens",
            ),
        ],
        "kv_cache": [*array([2]), *PAGED],
        "block_table": [*INTEGERS, *TABLE],
        "seq_lens": [*INTEGERS, *LENGTHS, *REQUIRED],
        "scale": [*SCALE, *REQUIRED],
        "kv_lora_rank": [
            *COUNT,
            *ZERO,
            text("at least kv_lora_rank = 9", 9, says="q"),
            text(str(2**70), 2**70, says="q"),
        ],
        "cache_scale": FLOAT_CACHE_SCALE,
        "out": [*OUTPUT, over("q"), over("kv_cache")],
        "lse": [*OUTPUT, over("kv_cache", 30), over("out")],
        "isa": ISA,
        "tiling": TILING,
        "validate": FLAG,
    },
    decode_pair: {"q": PAIR_PARTS},
    decode_fp8: {
        "cache_scale": SCALE,
        "kv_cache": [("too wide", lambda x: x.repeat(2, -1), ValueError, "got 16 in a float8_e4m3fn array")],
    },
    decode_656: {
        "kv_cache": [
            ("655 bytes", lambda x: x[..., 1:], ValueError, r"656 bytes.*got uint8 array of shape \(6, 4, 655\)"),
            ("int8", lambda x: x.view(np.int8), TypeError, "got int8 array"),
        ],
        "q": [("narrow", lambda q: q[..., :570], ValueError, "570 values.*got 576 in", "kv_cache")],
        "kv_lora_rank": [text("512 with rows of 656 bytes.*got 256", 256)],
        "cache_scale": [text("None with uint8 array", 0.5)],
    },
    extend: {
        "q": [*Q, *NO_HEADS],
        "kv_cache": [*array([2]), *PAGED],
        "block_table": [*INTEGERS, *TABLE],
        "seq_lens": [
            *INTEGERS,
            *LENGTHS[1:],
            *REQUIRED,
            text("got seq_len -1", [8, -1, 1]),
            text("seq_len 3 with 4 new tokens in request 1", [8, 3, 1]),
        ],
        "query_start_loc": [
            *INTEGERS,
            *REQUIRED,
            *STARTS,
            text(r"shape \(7,\), got int64 array of shape \(3,\)", [0, 1, 2, 3, 4, 5, 6, 7], says="seq_lens"),
        ],
        "scale": [*SCALE, *REQUIRED],
        "kv_lora_rank": [*COUNT, *ZERO],
        "cache_scale": FLOAT_CACHE_SCALE,
        "causal": FLAG,
        "out": [*OUTPUT, over("kv_cache")],
        "lse": [*OUTPUT, over("out")],
        "isa": ISA,
        "tiling": TILING,
        "validate": FLAG,
    },
    prefill: {
        "q": [*array(), *NO_HEADS, ("no columns", lambda x: x[..., :0], ValueError, "one column, got float32 array")],
        "k": [
            *array_of_q_dtype([1, 2]),
            ("other dtype", lambda x: x.astype(BFLOAT16), TypeError, "float32, got bfloat16 array"),
        ],
        "v": [
            *array_of_q_dtype([0, 1]),
            ("no columns", lambda x: x[..., :0], ValueError, "one column, got float32 array"),
        ],
        "query_start_loc": [*INTEGERS, *REQUIRED, *STARTS],
        "kv_start_loc": [*INTEGERS, *STARTS, text("run from 0 to 9 .*got", None, says="query_start_loc")],
        "scale": [*SCALE, *REQUIRED],
        "causal": FLAG,
        "out": [*OUTPUT, over("q"), over("k"), over("v")],
        "lse": [*OUTPUT, over("q"), over("out")],
        "isa": ISA,
        "tiling": TILING,
        "validate": FLAG,
    },
    default_tiling: {
        "op": [text("got 'bmm'", "bmm"), text("got None", None), text("got ", ["decode"])],
        "isa": ISA,
        "dtype": [text("got 'float64'", "float64"), text("got None", None), text("got", np.float32)],
    },
    tune: {
        "op": [text("got 'bmm'", "bmm"), text("got None", None), text("got ", ["decode"])],
        **{name: [*COUNT, *ZERO] for name in ("num_requests", "num_heads", "seq_len", "block_size")},
        "num_new": [*COUNT[:-1], *ZERO, text("1 to seq_len = 5, got 6", 6)],
        "dtype": [text("got 'float64'", "float64"), text("got None", None), text("got", np.float32)],
        "isa": ISA,
        "budget_s": [*SCALE, *REQUIRED],
        "change_bits": FLAG,
        "progress": [text("got int 1", 1, TypeError), text("got bool", False, TypeError)],
    },
    merge_states: {
        "out_a": array(without=["rank too high", "rank too low"]),
        "lse_a": array_of_q_dtype([0, 1]),
        "out_b": array([0, 1, 2]),
        "lse_b": array_of_q_dtype([0, 1]),
        "out": [*OUTPUT, ("other dtype", lambda x: x.astype(np.float16), TypeError, "got float16")],
        "lse": [*OUTPUT, over("out_a"), over("out_b"), over("out")],
    },
    write_cache: {
        "kv_c": [
            *array(),
            ("too wide", lambda x: values(4, 9), ValueError, "at least Dc = 9 values, got float32 array", "kv_cache"),
            ("other dtype", lambda x: x.astype(np.float16), TypeError, "float32, got float16 array"),
        ],
        "k_pe": [
            *array([0, 1], without=["V2", "rank too high"]),
            (
                "two heads",
                lambda x: x[:, None].repeat(2, 1),
                ValueError,
                r"\(4, 1, 3\), got float32 array of shape \(4, 2, 3\)",
            ),
        ],
        "kv_cache": [
            *array(),
            *PAGED[:3],
            ("read-only", frozen, ValueError, "got a read-only float32 array"),
            ("repeated pages", repeated, ValueError, "places of their own"),
            ("crossing pages", crossing, ValueError, "places of their own"),
        ],
        "slot_mapping": [
            *INTEGERS,
            *REQUIRED,
            text("0 to 23 .*got 24 at 1", [0, 24]),
            text("or the padding's -1, got -2 at 0", [-2]),
            text("got 2147480000 at 0", [2147480000]),
            text(f"got {2**62} at 2", [0, 1, 2**62]),
            text("once, got 7 more than once", [7, 3, 7]),
            text("at most 4 slots.*got 5", [0, 1, 2, 3, 4]),
        ],
        "cache_scale": FLOAT_CACHE_SCALE,
        "pad_slot_id": [*COUNT[1:], *ZERO, text("got 5", 5), text("-1", -(2**70))],
        "validate": FLAG,
    },
    gather_cache: {
        "kv_cache": [*array(), *PAGED[:3]],
        "block_table": [*INTEGERS, *TABLE],
        "seq_lens": [*INTEGERS[:-1], *LENGTHS[:-1], *REQUIRED],
        "starts": [
            *INTEGERS,
            text(r"0 to seq_lens\[1\] = 9, got 10 in request 1", [0, 10, 1]),
            text("got -1 in request 0", [-1, 3, 1]),
        ],
        "kv_lora_rank": [*COUNT, *ZERO, text("at least Dc = 9 values, got float32 array", 9, says="kv_cache")],
        "cache_scale": FLOAT_CACHE_SCALE,
        "dtype": [
            text("got float64", np.float64, TypeError),
            text("got str 'nonsense'", "nonsense", TypeError),
            text("got object", object, TypeError),
            text("got int 5", 5, TypeError),
        ],
        "out": [
            text("the pair .*got int 5", 5, TypeError),
            ("one array", lambda out: out[0], TypeError, "the pair .*got float32 array"),
            ("three arrays", lambda out: (*out, out[0]), TypeError, "the pair .*got tuple"),
            ("exchanged", lambda out: out[::-1], ValueError, "got float32 array"),
            ("too few rows", lambda out: (out[0], out[1][:13]), ValueError, "at least 14 rows, got float32 array"),
            ("read-only", lambda out: (out[0], frozen(out[1])), ValueError, "got a read-only"),
            (
                "one over the other",
                lambda out: (out[0], out[0].reshape(-1)[:42].reshape(14, 3)),
                ValueError,
                "apart from",
            ),
            (
                "over the cache",
                lambda out, arguments: (out[0], arguments["kv_cache"].reshape(24, 8)[:, :3]),
                ValueError,
                "apart from kv_cache",
            ),
        ],
        "validate": FLAG,
    },
    expand_block_table: {
        "block_table": [
            *(row for row in INTEGERS if row[0] != "one more"),
            *REQUIRED,
            text("at least -1, got -2", [[0, -2]]),
            text("within int32", np.array([[2**30]], np.int32)),
            text("within int8", np.array([[100]], np.int8)),
        ],
        "block_size": [*COUNT, *ZERO, text("within int64", 2**70, says="block_table")],
    },
    plan_context_chunks: {
        "context_lens": [
            *(row for row in INTEGERS if row[0] != "one more"),
            *REQUIRED,
            text("at least 0, got -1", [9, -1, 4]),
        ],
        "workspace_tokens": [*COUNT, *ZERO, text("at least block_size = 2, got 1", 1)],
        "block_size": [*COUNT, *ZERO, text("at least block_size = 7, got 6", 7, says="workspace_tokens")],
    },
    plan_path: {
        "num_new": COUNT,
        "prefix": COUNT,
        "config": [
            *REQUIRED,
            text("got dict", {"num_heads": 2}, TypeError),
            text("got str 'v3'", "v3", TypeError),
            text("got type", numba_mla.MLAConfig, TypeError),
        ],
        "isa": ISA,
    },
    num_kv_splits: {"max_seq_len": COUNT, "num_threads": [*COUNT, *ZERO]},
    block_quant_to_tensor_quant: {
        "weight": [
            *REQUIRED,
            text("got list", [[1.0]], TypeError),
            text("got float32 array", values(5, 7), TypeError),
            ("e5m2", lambda x: x.astype(ml_dtypes.float8_e5m2), TypeError, "got float8_e5m2 array"),
            ("rank 3", lambda x: x[None], ValueError, "got float8_e4m3fn array"),
            ("NaN", lambda x: np.full_like(x, np.nan), ValueError, "got NaN"),
        ],
        "weight_scale": [
            *array([0, 1]),
            *(filled(number) for number in (0.0, -1.0, np.nan, np.inf)),
        ],
        "block_size": [
            *REQUIRED,
            text("got int 4", 4, TypeError),
            text("got tuple", (2, 4, 1), TypeError),
            text("got 0", (0, 4), says="block_size[0]"),
            text("got float", (2, 4.0), TypeError, "block_size[1]"),
            text("got float32 array", (1, 4), says="weight_scale"),
        ],
    },
    pack_weight: {
        "w": [*array(), text("got list", [[[1.0]]], TypeError)],
        "scale": SCALE,
        "block_size": [text("None for float32 weights, got .2, 4.", (2, 4))],
        "isa": ISA,
    },
    pack_weight_fp8: {
        "scale": [
            *array([0, 1, 2]),
            text("got float 0.5", 0.5, TypeError),
            ("zero", lambda s: s * 0, ValueError, "got 0.0"),
            (
                "transposed",
                lambda s: s.swapaxes(1, 2),
                ValueError,
                r"\(2, 3, 2\), got float32 array of shape \(2, 2, 3\)",
            ),
        ],
        "block_size": [text("got int 4", 4, TypeError), text("got 0", (0, 4), says="block_size[0]")],
    },
    bmm: {
        "a": array([0, 2]),
        "w": [
            *REQUIRED,
            text("got float32 array", values(2, 5, 7), TypeError),
            (
                "already scaled",
                lambda w: numba_mla.pack_weight(values(2, 5, 7), scale=2),
                ValueError,
                "packed with scale 2.0, got 0.5",
                "scale",
            ),
        ],
        "scale": SCALE,
        "out": [*OUTPUT, over("a")],
    },
    absorb_weights: {
        "kv_b_proj": [*array([0]), text("got str", BlockScaled("a", "b", (1, 1)), TypeError, "kv_b_proj.weight")],
        "num_heads": [*COUNT, *ZERO, text(r"got float32 array of shape \(14, 5\)", 3, says="kv_b_proj")],
        "qk_nope_head_dim": [*COUNT, *ZERO, text("got float32 array", 4, says="kv_b_proj")],
        "v_head_dim": [*COUNT, *ZERO, text("got float32 array", 2**70, says="kv_b_proj")],
    },
    apply_rope: {
        "x": [
            *array(without=["rank too low"]),
            ("odd", lambda x: x[..., :3], ValueError, r"even number.*got .*\(3, 2, 3\)"),
        ],
        "positions": [*INTEGERS, *REQUIRED],
        "inv_freq": [
            *array(without=["float64", "V2", "rank too low", "rank too high", "rank 0", "scalar"]),
            ("rank 2", lambda x: x[None], ValueError, "got float64 array"),
            ("too long", lambda x: np.ones(3), ValueError, "got float64 array"),
            ("float16", lambda x: x.astype(np.float16), TypeError, "got float16 array"),
        ],
        "interleaved": FLAG,
        "scaling": [*SCALE, *REQUIRED],
    },
}

ROWS = [
    pytest.param(call, name, *row, *[None] * (5 - len(row)), id=f"{call.__name__}-{name}-{row[0]}")
    for call, by_argument in MISUSE.items()
    for name, rows in by_argument.items()
    for row in rows
]


def wrong_value(value, right, arguments):
    if not inspect.isfunction(value):
        return value
    return value(right, arguments) if len(inspect.signature(value).parameters) == 2 else value(right)


def written(arguments):
    """The bytes of every array that the call could write to."""
    arrays = [*(arguments.get(name) for name in ("out", "lse", "kv_cache")), *arguments.values()]
    arrays = [part for x in arrays for part in (x if isinstance(x, tuple) else (x,))]
    return [x.tobytes() for x in arrays if isinstance(x, np.ndarray)]


def answer(call):
    """The bytes of all that a right call returns and writes."""
    function, arguments = call()
    result = function(**arguments)
    returned = result if isinstance(result, tuple) else (result,)
    return [getattr(x, "panels", x) for x in returned if x is not None], written(arguments)


ANSWERS = {call: repr(answer(call)) for call in MISUSE}


@pytest.mark.parametrize(("call", "name", "label", "value", "error", "pattern", "says"), ROWS)
def test_misuse(call, name, label, value, error, pattern, says):
    function, arguments = call()
    before = written(arguments)
    wrong = wrong_value(value, arguments[name], arguments)
    with pytest.raises(error, match=rf"(?s)^{re.escape(says or name)}: expected .*{pattern}") as caught:
        function(**arguments | {name: wrong})
    assert type(caught.value) is error
    assert ", got " in str(caught.value)
    assert written(arguments) == before
    assert repr(answer(call)) == ANSWERS[call]


def test_every_argument_of_every_operation_is_in_the_table():
    operations = {name: f for name, f in vars(numba_mla).items() if name in numba_mla.__all__ and inspect.isfunction(f)}
    missing = {
        (name, argument)
        for name, function in operations.items()
        for argument in inspect.signature(function).parameters
        if not any(call()[0] is function and argument in rows for call, rows in MISUSE.items())
    }
    assert missing == {("threads", "n"), ("use_isa", "name")}


@pytest.mark.parametrize("row", [*COUNT, *ZERO], ids=lambda row: row[0])
def test_misuse_of_threads(row):
    _, value, error, pattern = row
    with pytest.raises(error, match=f"^n: expected .*{pattern}"), numba_mla.threads(value):
        raise AssertionError("the block was entered")


@pytest.mark.parametrize("row", [*ISA, *REQUIRED], ids=lambda row: row[0])
def test_misuse_of_use_isa(row):
    _, value, error, pattern = row
    before = numba_mla.show_config()["isa"]
    with pytest.raises(error, match=f"^(name|isa): expected .*{pattern}"), numba_mla.use_isa(value):
        raise AssertionError("the block was entered")
    assert numba_mla.show_config()["isa"] == before


def test_positions_that_int32_does_not_hold():
    """Repeated pages and broadcast rows make requests longer than any memory."""
    cache, table = np.ones((1, 2**20, 1), np.float32), np.zeros((1, 2**11), np.int32)
    q = np.ones((1, 1, 1), np.float32)
    with pytest.raises(ValueError, match=r"^seq_lens: expected 0 to 2147483647 .* got 2147483648 in request 0"):
        numba_mla.decode(q, cache, table, [2**31], scale=1.0, kv_lora_rank=1)
    endless = np.broadcast_to(q, (2**31, 1, 1))
    with pytest.raises(ValueError, match=r"^k: expected at most 2147483647 keys, got float32 array"):
        numba_mla.prefill(q, endless, endless, [0, 1], [0, 2**31], scale=1.0)


def test_merged_output_over_a_log_sum_exp():
    """The first row's output would be the second row's log-sum-exp."""
    memory = np.ones(8, np.float32)
    lse, other = memory.reshape(4, 2), values(4, 2)
    for lse_a, lse_b, name in ((lse, other, "lse_a"), (other, lse, "lse_b")):
        with pytest.raises(ValueError, match=rf"^out: expected memory apart from {name}'s, got"):
            numba_mla.merge_states(values(4, 2, 1), lse_a, values(4, 2, 1), lse_b, out=memory.reshape(4, 2, 1))


def test_weight_packed_for_other_vectors():
    """One that comes from another machine, or was taken apart, is refused; its panels would be read beyond."""
    w = numba_mla.pack_weight(values(2, 70, 7))
    for panels in (w.panels[:, :, :, :8].copy(), w.panels[:, :, ::-1], w.panels[:1]):
        with pytest.raises(ValueError, match=r"^w: expected a weight packed for this machine's .*, got float32 array"):
            numba_mla.bmm(values(2, 3, 7), replace(w, panels=panels))


@pytest.mark.parametrize("size", [2**40, 2**70])
def test_blocks_larger_than_the_weight(size):
    w, scale = values(2, 5, 7, dtype=FLOAT8), np.full((2, 1, 1), 0.5, np.float32)
    blocks = numba_mla.pack_weight(w, scale=scale, block_size=(size, size))
    a = values(2, 3, 7)
    np.testing.assert_array_equal(numba_mla.bmm(a, blocks), numba_mla.bmm(a, numba_mla.pack_weight(w, scale=0.5)))


def test_numpy_subclasses_and_scalars_that_are_right(tmp_path):
    function, arguments = decode()
    expected = function(**arguments)[0].tobytes()
    mapped = np.memmap(tmp_path / "cache", np.float32, "w+", shape=arguments["kv_cache"].shape)
    mapped[...] = arguments["kv_cache"]
    frozen_map = np.memmap(tmp_path / "cache", np.float32, "r", shape=mapped.shape)
    rest = {"scale": np.float32(0.5), "kv_lora_rank": np.int16(RANK), "validate": np.bool_(True)}
    for cache in (mapped, frozen_map):
        assert function(**arguments | rest | {"kv_cache": cache})[0].tobytes() == expected
