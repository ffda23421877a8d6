"""The register blocks of tile operands, on the hardware or the emulator, against their numpy twins."""

import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from test_codegen import SAPPHIRE, at, draw_steps, function, join_keys, rows_of
from tile_programs import run

import numba_mla
from numba_mla import runtime
from numba_mla.codegen import blocks, link, listing, module, tiles
from numba_mla.isa import select
from numba_mla.isa.amx_bf16 import TILES
from numba_mla.machine import Yardstick
from numba_mla.testing.amx.model import Tiles, tile_config
from numba_mla.testing.inputs import latent_problem

pytestmark = pytest.mark.amx
ROWS = tiles.TILE_ROWS


@pytest.fixture
def record(amx_emulation):
    with numba_mla.use_isa("amx_bf16"):
        record = runtime.select_isa(None, "bfloat16")
        function(record, "configure_tiles", 0)()
        yield record
        function(record, "release_tiles", 0)()


def product(record, a, b, total):
    """total (+)= a b by the twin, 16 steps at a time, for whole tiles."""
    for row in range(0, len(a), ROWS):
        for column in range(0, b.shape[1], ROWS):
            here = np.s_[row : row + ROWS, column : column + ROWS]
            for step in range(0, a.shape[1], ROWS):
                left, right = a[row : row + ROWS, step : step + ROWS], b[step : step + ROWS, column : column + ROWS]
                total[here] = record.tiles.twin(left, right, total[here])


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("steps", [16, 32, 288])
def test_dot_block(record, rng, steps, accumulate):
    dots = module.weight_shapes(record) + module.score_shapes(record)
    for rows, vectors in dots:
        columns = vectors * record.vector_width
        a, b = draw_steps(rng, record, rows, steps + 3), draw_steps(rng, record, steps, columns + 5)
        c = rng.standard_normal((rows + 2, columns + 4), dtype=np.float32)
        expected = c.copy()
        inner = expected[1:-1, 2:-2]
        if not accumulate:
            inner[:] = 0
        product(record, a[:, :steps], b[:, :columns], inner)
        pointers = rows_of(a)
        function(record, blocks.dot_name(rows, vectors), 8)(
            at(pointers), at(pointers), at(b), b.strides[0], steps, at(c[1:, 2:]), c.strides[0], accumulate
        )
        np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("accumulate", [0, 1])
def test_scaled_dot_block(record, rng, accumulate):
    rows, vectors = record.blocks.weight
    columns, steps = vectors * record.vector_width, 64
    a, b = draw_steps(rng, record, rows, steps + 3), draw_steps(rng, record, steps, columns + 5)
    scales = rng.random(columns, dtype=np.float32)
    c = rng.standard_normal((rows + 2, columns + 4), dtype=np.float32)
    expected, sums = c.copy(), np.zeros((rows, columns), np.float32)
    product(record, a[:, :steps], b[:, :columns], sums)
    present = expected[1:-1, 2:-2] * np.float64(accumulate)
    expected[1:-1, 2:-2] = (sums.astype(np.float64) * scales + present).astype(np.float32)
    pointers = rows_of(a)
    function(record, blocks.scaled_name(rows, vectors), 9)(
        at(pointers), at(pointers), at(b), b.strides[0], steps, at(c[1:, 2:]), c.strides[0], at(scales), accumulate
    )
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("accumulate", [0, 1])
def test_value_block_on_transposed_probabilities_and_a_panel_of_pairs(record, rng, accumulate):
    keys = 96
    for lanes, vectors in module.value_shapes(record):
        columns = vectors * record.vector_width
        padded = -(-columns // record.column_step) * record.column_step
        v = rng.standard_normal((keys, padded), dtype=np.float32).astype(ml_dtypes.bfloat16)
        p = draw_steps(rng, record, keys // 2, lanes + 3)
        steps = p[:, :lanes].copy()
        alpha = rng.random(lanes, dtype=np.float32)
        o = rng.standard_normal((lanes + 2, columns + 4), dtype=np.float32)
        expected = o.copy()
        inner = expected[1:-1, 2:-2]
        inner[:] = inner * alpha[:, None] if accumulate else 0
        product(record, np.ascontiguousarray(steps.T), join_keys(record, v[:, :columns]), inner)
        pointers, panel = rows_of(v), np.full((keys // 2 + 1, padded + 16), 7.5, np.float32)
        function(record, "transpose_steps", 4)(at(p), p.strides[0], keys // 2, lanes)
        function(record, "interleave", 5)(at(pointers), keys, padded, at(panel), panel.strides[0])
        assert (panel[-1] == 7.5).all()
        assert (panel[:, padded:] == 7.5).all()
        function(record, blocks.value_name(lanes, vectors), 10)(
            at(panel),
            panel.strides[0],
            0,
            keys,
            at(p),
            p.strides[0],
            at(o[1:, 2:]),
            o.strides[0],
            at(alpha),
            accumulate,
        )
        np.testing.assert_array_equal(o, expected)


def test_twin_is_the_manuals_pseudocode(rng):
    """The record's twin against the model that the emulator is checked against, subnormals and infinities included."""
    for scale in (1.0, 1e-38, 1e19):
        left = (scale * rng.standard_normal((ROWS, 2 * ROWS))).astype(np.float32).astype(ml_dtypes.bfloat16)
        right = (scale * rng.standard_normal((ROWS, 2 * ROWS))).astype(np.float32).astype(ml_dtypes.bfloat16)
        total = rng.standard_normal((ROWS, ROWS)).astype(np.float32)
        model, memory = Tiles(), np.zeros((4, ROWS, 64), np.uint8)
        model.load_config(tile_config([(ROWS, 64)] * 3))
        for tile, operand in enumerate((total, left, right)):
            memory[tile] = operand.view(np.uint8)
            model.load(tile, memory.reshape(-1), tile * memory[0].size, 64)
        model.dot_bf16(0, 1, 2)
        model.store(0, memory.reshape(-1), 3 * memory[0].size, 64)
        with np.errstate(over="ignore", invalid="ignore"):
            ours = TILES.twin(left.view(np.float32), right.view(np.float32), total)
        np.testing.assert_array_equal(ours, memory[3].view(np.float32))


def test_assembly_has_dots_and_no_tile_traffic_but_operands():
    """In a K loop: each operand loaded once, nothing stored; the configuration is nobody's business there."""
    machine = type(SAPPHIRE)(SAPPHIRE.triple, SAPPHIRE.cpu, SAPPHIRE.feature_string, tiles=True)
    record = select(machine, forced="amx_bf16")
    code = link.assembly(record, machine.triple)
    dots = module.weight_shapes(record) + module.score_shapes(record)
    values = module.value_shapes(record)
    shapes = [(blocks.dot_name(*s), s) for s in dots] + [(blocks.value_name(*s), s) for s in values]
    for symbol, (rows, vectors) in shapes:
        mix = listing.instruction_mix(listing.inner_loop(listing.function_body(code, symbol)))
        count = {
            word: sum(n for name, n in mix.items() if word in name)
            for word in ("tdpbf16ps", "tileloadd", "tilestored", "tilecfg")
        }
        left, right = rows // ROWS, vectors
        assert count == {"tdpbf16ps": left * right, "tileloadd": left + right, "tilestored": 0, "tilecfg": 0}, symbol
    assert len(re.findall(r"\bldtilecfg\b", code)) == len(re.findall(r"\btilerelease\b", code)) == 2


THREADS = """
import threading
import ml_dtypes, numpy as np, numba_mla
from numba_mla.testing import amx
from numba_mla.testing.inputs import latent_problem
rng = np.random.default_rng(0)
problems = [latent_problem(rng, heads, [seq_len], [2], 16, 32, 16, ml_dtypes.bfloat16)
            for heads, seq_len in ((1, 40), (3, 33), (16, 17), (17, 300))]
def answer(problem):
    with numba_mla.use_isa("amx_bf16"):
        return b"".join(x.tobytes() for x in numba_mla.extend(**problem))
wrong, firsts = [], [None] * 8
def alternate(i):
    with numba_mla.threads(1):
        firsts[i] = answer(problems[i % 4])
        for turn in range(6):
            if answer(problems[(i + turn) % 4]) != firsts[(i + turn) % 4 if turn else i]:
                wrong.append((i, turn))
def first_use(i):
    with numba_mla.threads(1):
        firsts[i] = answer(problems[i])
with amx.emulate():
    for i in range(4):
        worker = threading.Thread(target=first_use, args=(i,)); worker.start(); worker.join()
    firsts[4:] = firsts[:4]
    workers = [threading.Thread(target=alternate, args=(i,)) for i in range(8)]
    [w.start() for w in workers]; [w.join() for w in workers]
    assert [answer(p) for p in problems] == firsts[:4]
assert not wrong, wrong
print("same")
"""


def test_first_use_in_worker_threads_and_shapes_that_alternate():
    """The configuration is a thread's own: first AMX use from a worker thread; 8 threads alternating shapes."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr


def test_calls_release_the_configuration(amx_emulation, rng):
    """Each kernel loads it and releases it on its way out: after a call there is none."""
    a, w = (rng.standard_normal((2, 17, 33)).astype(ml_dtypes.bfloat16) for _ in range(2))
    problem = latent_problem(rng, 3, [40], [2], 16, 32, 16, ml_dtypes.bfloat16)
    seen = np.zeros(64, np.uint8)
    with numba_mla.use_isa("amx_bf16"), numba_mla.threads(1):
        for call in (lambda: numba_mla.bmm(a, numba_mla.pack_weight(w)), lambda: numba_mla.extend(**problem)):
            call()
            seen[:] = 7
            run("sttilecfg", seen)
            assert (seen == 0).all()


def test_peak_loop_runs(record):
    yardstick = Yardstick("amx_bf16", threads=1)
    assert yardstick.take_peak() > 0
