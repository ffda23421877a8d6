"""Tilings: what they change and what they do not, what is refused and why, files."""

import dataclasses
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import numba_mla
from numba_mla import Tiling
from numba_mla.codegen import link
from numba_mla.isa import fit, select
from numba_mla.isa.host import Host
from numba_mla.runtime import host, select_isa
from numba_mla.testing.inputs import decode_problem, latent_problem, prefill_problem
from numba_mla.testing.tolerance import decode_bounds, extend_bounds, prefill_bounds

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CHANGING = ("key_tile", "kv_split")
VECTOR_TILINGS = [
    Tiling(lane_group=16),
    Tiling(lane_group=48),
    Tiling(lane_group=512),
    Tiling(least_lanes=64),
    Tiling(score_block=(1, 1)),
    Tiling(score_block=(7, 1)),
    Tiling(score_block=(4, 2)),
    Tiling(value_block=(3, 2)),
    Tiling(value_block=(1, 4)),
    Tiling(score_unroll=1),
    Tiling(score_unroll=32),
    Tiling(value_unroll=2),
    Tiling(value_unroll=16),
    Tiling(prefetch_rows=0),
    Tiling(prefetch_rows=256),
    Tiling(item_order="rows"),
    Tiling(item_order="heaviest"),
]
TILE_TILINGS = [
    Tiling(lane_group=16),
    Tiling(score_block=(16, 1)),
    Tiling(score_block=(48, 1)),
    Tiling(value_block=(16, 4)),
    Tiling(value_block=(48, 1)),
    Tiling(value_block=(16, 3), score_block=(16, 3)),
    Tiling(prefetch_rows=0),
]


def problems(rng, dtype):
    """Calls of each operation: several splits, masks, pages, a last vector that is not full."""
    latent = latent_problem(rng, 5, [1500, 70, 0], [9, 70, 0], 16, 64, 16, dtype)
    yield numba_mla.decode, decode_problem(rng, 17, [2100, 300, 1], 16, 64, 16, dtype)
    yield numba_mla.extend, latent
    yield numba_mla.prefill, prefill_problem(rng, 2, [300, 40], [1100, 40], 48, 32, dtype)


def bits(result):
    return [x.tobytes() for x in result]


def bounds_of(operation, problem):
    bounds = {"decode": decode_bounds, "extend": extend_bounds, "prefill": prefill_bounds}[operation.__name__]
    return bounds(**problem, p_rounding=select_isa(None, problem["q"].dtype.name).p_rounding)


def native(isa):
    return BFLOAT16 if select_isa(isa).native == "bfloat16" else np.dtype(np.float32)


@pytest.mark.parametrize("at", range(len(VECTOR_TILINGS)), ids=lambda at: repr(VECTOR_TILINGS[at])[7:-1])
def test_no_bit_changes_on_vectors(vector_isa, rng, at):
    for operation, problem in problems(rng, native(vector_isa)):
        for threads in (1, 2):
            with numba_mla.threads(threads):
                assert bits(operation(**problem, tiling=VECTOR_TILINGS[at])) == bits(operation(**problem))


@pytest.mark.parametrize("at", range(len(TILE_TILINGS)), ids=lambda at: repr(TILE_TILINGS[at])[7:-1])
def test_no_bit_changes_on_tiles(rng, amx_emulation, at):
    with numba_mla.use_isa("amx_bf16"):
        for operation, problem in problems(rng, BFLOAT16):
            assert bits(operation(**problem, tiling=TILE_TILINGS[at])) == bits(operation(**problem))


@pytest.mark.parametrize("interleave", ["fused", "separate"])
def test_interleaving_changes_no_bit(rng, interleave):
    """On the instruction sets whose dot step takes two keys; NaN in rows that some lanes do not see included."""
    for name in numba_mla.available_isas():
        if select_isa(name).k_pack == 1 or select_isa(name).tiles is not None:
            continue
        with numba_mla.use_isa(name):
            for operation, problem in problems(rng, BFLOAT16):
                tiling = Tiling(interleave=interleave)
                assert bits(operation(**problem, tiling=tiling)) == bits(operation(**problem))
            problem = latent_problem(rng, 3, [300], [40], 16, 64, 16, BFLOAT16)
            problem["kv_cache"][problem["block_table"][0, 18], 6:] = np.nan
            assert bits(numba_mla.extend(**problem, tiling=tiling)) == bits(numba_mla.extend(**problem))


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(key_tile=128),
        Tiling(key_tile=17, kv_split=51),
        Tiling(key_tile=1024),
        Tiling(kv_split=256),
        Tiling(kv_split=4096),
        Tiling(key_tile=512, kv_split=512, prefetch_rows=33),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_tiles_of_any_length_are_right(isa, rng, tiling, dtype):
    """They change bits, within the one tolerance, and are the same for any number of threads."""
    for operation, problem in problems(rng, dtype):
        result = operation(**problem, tiling=tiling)
        assert bounds_of(operation, problem).excess(*result) <= 1
        with numba_mla.threads(2):
            assert bits(operation(**problem, tiling=tiling)) == bits(result)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tiling_that_fits_changes_no_bit(rng, data):
    record = select_isa(None, "bfloat16")
    rows = st.integers(1, 12)
    tiling = Tiling(
        lane_group=data.draw(st.integers(1, 9)) * record.vector_width,
        score_block=(data.draw(rows), data.draw(st.integers(1, 3))),
        value_block=(data.draw(rows), data.draw(st.integers(1, 2)) * record.k_pack),
        score_unroll=data.draw(st.sampled_from([1, 2, 4, 8, 16, 32])),
        value_unroll=data.draw(st.sampled_from([2, 4, 8, 16, 32, 64])),
        prefetch_rows=data.draw(st.integers(0, 64)),
    )
    for operation, problem in problems(rng, BFLOAT16):
        try:
            result = operation(**problem, tiling=tiling)
        except ValueError as error:
            assert "would spill" in str(error)  # noqa: PT017 - which of the tilings do is the compiler's affair
            continue
        assert bits(result) == bits(operation(**problem))


def test_defaults_are_complete_and_the_same_for_every_shape():
    for name in numba_mla.available_isas():
        for op in ("decode", "extend", "prefill"):
            default = numba_mla.default_tiling(op, name)
            assert None not in dataclasses.asdict(default).values()
            assert (default.key_tile, default.kv_split) == (256, 1024)
    with pytest.raises(ValueError, match="op: expected one of 'decode'"):
        numba_mla.default_tiling("bmm")


def test_defaults_are_those_of_the_readme():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) / (\d+) \| (\d+)[^|]*\| (\d+) x (\d) \| (\d+) x (\d) \| (\S+) \|$",
                      (Path(__file__).parents[1] / "README.md").read_text(), re.MULTILINE)  # fmt: skip
    assert [row[0] for row in rows] == ["amx_bf16", "avx512bf16", "avx512f", "avx2"]
    for name, lanes, of_one_head, vector, *blocks, interleave in rows:
        record = select(TILES, forced=name)
        tiling = record.tiling
        assert (tiling.lane_group, record.prefill_group, record.vector_width) == (
            int(lanes),
            int(of_one_head),
            int(vector),
        )
        assert (*tiling.score_block, *tiling.value_block) == tuple(map(int, blocks))
        assert interleave == (tiling.interleave if record.k_pack > 1 else "-")
        assert (tiling.score_unroll, tiling.value_unroll) == (16, 32 if "bf16" in name else 4)
        assert (tiling.prefetch_rows, tiling.key_tile, tiling.kv_split) == (16, 256, 1024)


def test_default_spelt_out_is_the_default(isa, rng):
    for operation, problem in problems(rng, native(isa)):
        tiling = numba_mla.default_tiling(operation.__name__, isa)
        assert bits(operation(**problem, tiling=tiling)) == bits(operation(**problem))


TILES = Host(host().triple, "sapphirerapids", "+avx,+avx2,+fma,+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,"
             "+avx512bf16", tiles=True)  # fmt: skip


@pytest.mark.parametrize(
    ("isa", "tiling", "reason"),
    [
        ("avx512bf16", Tiling(score_block=(16, 2)), "would spill: 32 sums and 2 operands for 32 registers"),
        ("avx2", Tiling(score_block=(8, 2)), "would spill: 16 sums and 2 operands for 16 registers"),
        ("avx512bf16", Tiling(value_block=(16, 2)), "value_block .16, 2. would spill"),
        ("avx512bf16", Tiling(value_block=(8, 3)), r"value_block .8, 3.: its 3 vectors are not pairs"),
        ("avx2", Tiling(least_lanes=256), "least_lanes 256 are more than lane_group 128"),
        ("avx512bf16", Tiling(value_unroll=1), "not divided by the 2 keys"),
        ("avx512f", Tiling(interleave="separate"), "single values of float32"),
        ("avx512f", Tiling(lane_group=40), "lane_group 40 is not divided by a vector's 16 lanes"),
        ("avx2", Tiling(score_unroll=12), "not a power of two"),
        ("avx2", Tiling(key_tile=300), "kv_split 1024 is not divided by key_tile 300"),
        ("amx_bf16", Tiling(score_block=(32, 3)), "exceeds the 8 tiles"),
        ("amx_bf16", Tiling(value_block=(24, 1)), "not divided by a tile's 16 rows"),
        ("amx_bf16", Tiling(score_unroll=32), "a tile takes 16 steps"),
        ("amx_bf16", Tiling(value_unroll=16), "a tile takes 32 keys"),
        ("amx_bf16", Tiling(interleave="fused"), "interleaved already"),
    ],
    ids=repr,
)
def test_what_does_not_fit_is_refused_with_the_reason(isa, tiling, reason):
    with pytest.raises(ValueError, match=reason) as error:
        fit(select(TILES, forced=isa), tiling, one_head=False)
    assert str(error.value).startswith(f"tiling: expected one that fits {isa}, got {tiling}")


def test_operations_refuse_before_anything_is_written(rng):
    for operation, problem in problems(rng, np.dtype(np.float32)):
        out = np.full((*problem["q"].shape[:2], 32 if operation is numba_mla.prefill else 64), 7, np.float32)
        for wrong in (Tiling(lane_group=5 * 3), {"lane_group": 64}, 64, "auto"):
            with pytest.raises((ValueError, TypeError), match="tiling: expected"):
                operation(**problem, out=out, tiling=wrong)
        assert (out == 7).all()


@pytest.mark.parametrize(
    ("field", "value", "kind", "message"),
    [
        ("lane_group", 0, ValueError, "lane_group: expected at least 1, got 0"),
        ("lane_group", 16.0, TypeError, "lane_group: expected an integer"),
        ("lane_group", True, TypeError, "lane_group: expected an integer"),
        ("score_block", 8, ValueError, "score_block: expected a pair of numbers, MR and NR, got 8"),
        ("value_block", (8, 2, 1), ValueError, "value_block: expected a pair"),
        ("value_block", (8, "2"), TypeError, "value_block: expected an integer"),
        ("score_block", (65, 1), ValueError, "score_block: expected at most 64, got 65"),
        ("prefetch_rows", -1, ValueError, "prefetch_rows: expected at least 0"),
        ("interleave", "none", ValueError, "interleave: expected one of 'fused', 'separate', got 'none'"),
        ("item_order", 1, ValueError, "item_order: expected one of 'auto'"),
        ("key_tile", 1 << 20, ValueError, "key_tile: expected at most 4096"),
    ],
)
def test_fields_hold_what_they_may(field, value, kind, message):
    with pytest.raises(kind, match=message):
        Tiling(**{field: value})


def test_files(tmp_path):
    path = tmp_path / "tiling.json"
    for tiling in (Tiling(), Tiling(lane_group=np.int64(64), score_block=[8, 1]), numba_mla.default_tiling("decode")):
        tiling.save(path)
        assert Tiling.load(str(path)) == tiling
    path.write_text('{"lane_group": 64, "lanes": 3}')
    with pytest.raises(ValueError, match=r"path: expected fields of a tiling .* got \['lanes'\]"):
        Tiling.load(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="got list"):
        Tiling.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="path: expected a tiling in JSON"):
        Tiling.load(path)
    path.write_text('{"lane_group": "64"}')
    with pytest.raises(TypeError, match="lane_group: expected an integer"):
        Tiling.load(path)
    with pytest.raises(FileNotFoundError):
        Tiling.load(tmp_path / "none")


def test_a_tiling_is_a_value():
    assert hash(Tiling(score_block=[8, 1])) == hash(Tiling(score_block=(8, 1)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Tiling().lane_group = 5  # type: ignore[misc]
    assert eval(repr(Tiling(score_block=(8, 1), interleave="fused"))) == Tiling(score_block=(8, 1), interleave="fused")
    assert [name for name in CHANGING if not Tiling(**{name: 256}).changes_bits] == []


def test_reference_takes_and_ignores_it(rng):
    for operation, problem in problems(rng, np.dtype(np.float32)):
        reference = getattr(numba_mla.reference, operation.__name__)
        assert bits(reference(**problem, tiling=Tiling(lane_group=16))) == bits(reference(**problem))


def test_a_block_that_the_compiler_spills_is_refused(rng):
    """It may need more registers than its sums and operands: what came out of the compiler decides."""
    problem = decode_problem(rng, 3, [40], 16, 64, 16, BFLOAT16)
    refused = 0
    for name in numba_mla.available_isas():
        record = select_isa(name, "bfloat16")
        if record.tiles is not None:
            continue
        for rows in range(1, record.blocks.registers):
            tiling = Tiling(value_block=(rows, record.k_pack))
            if link.find_spills(fit(record, tiling, may_spill=True), host().triple):
                refused += 1
                with pytest.raises(ValueError, match="would spill"):
                    numba_mla.decode(**problem, isa=name, tiling=tiling)
    assert refused
