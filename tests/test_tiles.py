"""The register blocks of tile operands, on the hardware or the emulator, against their numpy twins."""

import re

import ml_dtypes
import numpy as np
import pytest
from test_codegen import SAPPHIRE, at, draw_steps, function, inner_loop, join_keys, rows_of

import numba_mla
from numba_mla import runtime
from numba_mla.codegen import blocks, link, module, tiles
from numba_mla.isa import select
from numba_mla.isa.amx_bf16 import TILES
from numba_mla.machine import Yardstick
from numba_mla.testing.amx.model import Tiles, tile_config

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
    dots, _ = module.block_shapes(record)
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
def test_value_block_on_transposed_probabilities_and_a_panel_of_pairs(record, rng, accumulate):
    _, values = module.block_shapes(record)
    keys = 96
    for lanes, vectors in values:
        columns = vectors * record.vector_width
        v = rng.standard_normal((keys, columns), dtype=np.float32).astype(ml_dtypes.bfloat16)
        p = draw_steps(rng, record, keys // 2, lanes + 3)
        steps = p[:, :lanes].copy()
        alpha = rng.random(lanes, dtype=np.float32)
        o = rng.standard_normal((lanes + 2, columns + 4), dtype=np.float32)
        expected = o.copy()
        inner = expected[1:-1, 2:-2]
        inner[:] = inner * alpha[:, None] if accumulate else 0
        product(record, np.ascontiguousarray(steps.T), join_keys(record, v), inner)
        pointers, panel = rows_of(v), np.full((keys // 2 + 1, columns + 16), 7.5, np.float32)
        function(record, "transpose_steps", 4)(at(p), p.strides[0], keys // 2, lanes)
        function(record, "interleave", 5)(at(pointers), keys, columns, at(panel), panel.strides[0])
        assert (panel[-1] == 7.5).all()
        assert (panel[:, columns:] == 7.5).all()
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
    dots, values = module.block_shapes(record)
    shapes = [(blocks.dot_name(*s), s) for s in dots] + [(blocks.value_name(*s), s) for s in values]
    for symbol, (rows, vectors) in shapes:
        loop = inner_loop(code, symbol)
        count = {
            word: sum(word in line for line in loop) for word in ("tdpbf16ps", "tileloadd", "tilestored", "tilecfg")
        }
        left, right = rows // ROWS, vectors
        assert count == {"tdpbf16ps": left * right, "tileloadd": left + right, "tilestored": 0, "tilecfg": 0}, symbol
    assert len(re.findall(r"\bldtilecfg\b", code)) == len(re.findall(r"\btilerelease\b", code)) == 2


def test_peak_loop_runs(record):
    yardstick = Yardstick("amx_bf16", threads=1)
    assert yardstick.take_peak() > 0
