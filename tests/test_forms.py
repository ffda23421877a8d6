"""A form of call that was checked before: what depends on more than the form is checked again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numba_mla
from numba_mla.ops import attention, forms
from numba_mla.testing.inputs import decode_problem, latent_problem, prefill_problem
from numba_mla.testing.tolerance import decode_bounds


@pytest.fixture
def problem(rng):
    """A decode whose form is known, with its outputs."""
    problem = decode_problem(rng, 2, [5, 9], 4, 16, 8, dtype=np.float32)
    out, lse = numba_mla.decode(**problem)
    problem |= {"out": out, "lse": lse}
    numba_mla.decode(**problem)
    known = len(attention._decodes._known)
    numba_mla.decode(**problem)
    assert len(attention._decodes._known) == known
    return problem


def refused(problem, error, match, **changes):
    """The changed call raises, and leaves the outputs as they are."""
    before = problem["out"].copy(), problem["lse"].copy()
    with pytest.raises(error, match=match):
        numba_mla.decode(**problem | changes)
    np.testing.assert_array_equal(problem["out"], before[0])
    np.testing.assert_array_equal(problem["lse"], before[1])


def test_other_arrays_of_a_known_form(problem, rng):
    """Shapes, types and settings as before, all else new: a right result, in its own memory."""
    other = decode_problem(rng, 2, [8, 1], 4, 16, 8, dtype=np.float32)
    other = other | {"kv_cache": np.resize(other["kv_cache"], problem["kv_cache"].shape)}
    table = np.arange(6).reshape(2, 3)
    other["block_table"] = table
    assert decode_bounds(**other, p_rounding=0.0).excess(*numba_mla.decode(**other)) <= 1


def test_metadata_are_checked_every_time(problem):
    table = problem["block_table"].copy()
    table[1, 2] = len(problem["kv_cache"])
    refused(problem, ValueError, "^block_table: expected used pages", block_table=table)
    refused(problem, ValueError, "^block_table: expected used pages", block_table=table - 2 * len(table) - 90)
    refused(problem, ValueError, "^seq_lens: expected 0 to", seq_lens=[5, 1000])
    refused(problem, ValueError, "^seq_lens: expected 0 to", seq_lens=np.array([-1, 9]))
    refused(problem, ValueError, "^seq_lens: expected shape", seq_lens=[5])


def test_settings_that_are_equal_and_yet_none(problem):
    """1.0 == 1 == True, and 16.0 == 16: a form holds their types."""
    numba_mla.decode(**problem | {"scale": 1.0})
    refused(problem, TypeError, "^scale: expected a real number", scale=True)
    refused(problem, TypeError, "^kv_lora_rank: expected an integer", kv_lora_rank=16.0)
    refused(problem, TypeError, "^isa: expected a name", isa=0)
    refused(problem, TypeError, "^q: expected a numpy array", q=1.0)
    refused(problem, ValueError, "^q: expected one array or the pair", q=(problem["q"],))
    refused(problem, TypeError, "^q: expected float32", q=problem["q"].astype(">f4"))


def test_outputs_that_meet_inputs(problem):
    """Memory is what a form says nothing of."""
    buffer = np.zeros(problem["q"].size + problem["out"].size, np.float32)
    q = buffer[: problem["q"].size].reshape(problem["q"].shape)
    q[:] = problem["q"]
    apart = buffer[q.size :].reshape(problem["out"].shape)
    out, _ = numba_mla.decode(**problem | {"q": q, "out": apart})
    np.testing.assert_array_equal(out, problem["out"])
    meeting = buffer[q.size - 1 : -1].reshape(problem["out"].shape)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from q's"):
        numba_mla.decode(**problem | {"q": q, "out": meeting})
    with pytest.raises(ValueError, match=r"^lse: expected memory apart from out's"):
        numba_mla.decode(**problem | {"out": apart, "lse": apart.ravel()[:4].reshape(2, 2)})
    read_only = problem["out"].view()
    read_only.flags.writeable = False
    refused(problem, ValueError, "^out: expected a writable array", out=read_only)


def test_outputs_between_the_rows_of_inputs(problem):
    """Spans of memory that meet, arrays that do not: right, as often as one likes."""
    heads, width, rank = *problem["q"].shape[1:], problem["out"].shape[2]
    rows = np.zeros((2, heads, width + rank), np.float32)
    rows[..., :width] = problem["q"]
    for _ in range(2):
        rows[..., width:] = np.nan
        numba_mla.decode(**problem | {"q": rows[..., :width], "out": rows[..., width:]})
        np.testing.assert_array_equal(rows[..., width:], problem["out"])


def test_a_form_holds_the_instruction_set_in_force(problem, monkeypatch):
    expected = {}
    for name in numba_mla.available_isas():
        expected[name] = numba_mla.decode(**problem | {"out": None, "isa": name})[0].tobytes()
    for name in numba_mla.available_isas():
        with numba_mla.use_isa(name):
            assert numba_mla.decode(**problem | {"out": None})[0].tobytes() == expected[name]
        monkeypatch.setenv("NUMBA_MLA_ISA", name)
        assert numba_mla.decode(**problem | {"out": None})[0].tobytes() == expected[name]
        monkeypatch.delenv("NUMBA_MLA_ISA")
    monkeypatch.setenv("NUMBA_MLA_ISA", "sse9")
    refused(problem, numba_mla.IsaUnavailableError, "^NUMBA_MLA_ISA, isa: expected one that this machine")
    monkeypatch.delenv("NUMBA_MLA_ISA")
    numba_mla.decode(**problem)


def test_known_extends_prefills_and_products(rng):
    problem = latent_problem(rng, 2, [5, 9], [2, 3], 4, 16, 8)
    for _ in range(2):
        numba_mla.extend(**problem)
        with pytest.raises(ValueError, match=r"^seq_lens: expected the new tokens to be counted"):
            numba_mla.extend(**problem | {"seq_lens": [1, 9]})
        with pytest.raises(ValueError, match=r"^query_start_loc: expected to run from 0 to 5"):
            numba_mla.extend(**problem | {"query_start_loc": [0, 2, 4]})
    problem = prefill_problem(rng, 2, [5], [5], 24, 16)
    for _ in range(2):
        numba_mla.prefill(**problem)
        with pytest.raises(ValueError, match=r"^query_start_loc: expected to run from 0 to 5"):
            numba_mla.prefill(**problem | {"query_start_loc": [0, 4]})
    packed = numba_mla.pack_weight(np.ones((1, 3, 4), np.float32))
    buffer = np.zeros(16, np.float32)
    a, out = buffer[:8].reshape(1, 2, 4), buffer[8:14].reshape(1, 2, 3)
    for _ in range(2):
        assert numba_mla.bmm(a, packed, out=out) is out
        with pytest.raises(ValueError, match=r"^out: expected memory apart from a's"):
            numba_mla.bmm(a, packed, out=buffer[7:13].reshape(1, 2, 3))


@pytest.fixture
def write(rng):
    """A write whose form is known: what it is given, and the cache."""
    call = {
        "kv_c": rng.standard_normal((5, 6), dtype=np.float32),
        "k_pe": rng.standard_normal((5, 1, 2), dtype=np.float32),
        "kv_cache": np.zeros((3, 4, 8), np.float32),
        "slot_mapping": np.array([7, -1, 0, 11, 3]),
    }
    numba_mla.write_cache(**call)
    return call


def written(call):
    """The cache after a write, row by row."""
    cache = np.zeros((12, 8), np.float32)
    for row, slot in enumerate(call["slot_mapping"]):
        if slot != -1:
            cache[slot] = np.concatenate([call["kv_c"][row], call["k_pe"][row].ravel()])
    return cache.reshape(3, 4, 8)


def test_known_writes(write, rng):
    """Slots of any integers, rotated keys with an axis of heads or without, in turns; all else new."""
    for _ in range(2):
        for kind in (np.int64, np.int32, ">i4", list):
            slots = rng.permutation(12)[:5]
            slots[rng.integers(5)] = -1
            now = write | {"slot_mapping": slots.tolist() if kind is list else slots.astype(kind)}
            for name in ("kv_c", "k_pe"):
                now[name] = rng.standard_normal(write[name].shape, dtype=np.float32)
            if kind is list:
                now["k_pe"] = now["k_pe"][:, 0]
            now["kv_cache"] = np.zeros_like(write["kv_cache"])
            numba_mla.write_cache(**now)
            np.testing.assert_array_equal(now["kv_cache"], written(now))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"slot_mapping": np.array([7, -1, 0, 12, 3])}, ValueError, "slot_mapping: expected 0 to 11 .* got 12 at 3"),
        ({"slot_mapping": np.array([7, -2, 0, 11, 3])}, ValueError, "slot_mapping: expected 0 to 11 .* got -2 at 1"),
        ({"slot_mapping": [7, 3, 0, 11, 3]}, ValueError, "slot_mapping: expected each slot once, got 3 more"),
        ({"slot_mapping": np.arange(6)}, ValueError, "slot_mapping: expected at most 5 slots"),
        ({"slot_mapping": np.arange(5.0)}, TypeError, "slot_mapping: expected int32 or int64"),
        ({"pad_slot_id": -1.0}, TypeError, "pad_slot_id: expected an integer"),
        ({"pad_slot_id": 0}, ValueError, "pad_slot_id: expected a negative number"),
        ({"cache_scale": 1.0}, ValueError, "cache_scale: expected None"),
        ({"validate": 1}, TypeError, "validate: expected"),
        ({"kv_c": np.zeros((5, 5), np.float32)}, ValueError, "k_pe: expected shape"),
        ({"k_pe": "text"}, TypeError, "k_pe: expected a numpy array"),
        ({"kv_cache": None}, TypeError, "kv_cache: expected a numpy array"),
    ],
)
def test_known_writes_are_checked_every_time(write, changes, error, match):
    for _ in range(2):
        before = write["kv_cache"].copy()
        with pytest.raises(error, match=f"^{match}"):
            numba_mla.write_cache(**write | changes)
        np.testing.assert_array_equal(write["kv_cache"], before)
        numba_mla.write_cache(**write)


def test_slots_that_are_not_checked(write):
    """The last of a slot's rows stays, where the caller says that slots are right."""
    slots = np.array([7, -1, 7, 0, 7])
    for _ in range(2):
        write["kv_cache"][:] = 0
        numba_mla.write_cache(**write | {"slot_mapping": slots, "validate": False})
        np.testing.assert_array_equal(write["kv_cache"], written(write | {"slot_mapping": slots}))


def test_sources_of_known_writes_that_meet_the_cache(write):
    """A view of it is refused; rows between its rows are not."""
    rows = np.zeros((3, 4, 8 + 6), np.float32)
    cache, between = rows[..., :8], rows.reshape(12, 14)[:5, 8:]
    for _ in range(2):
        cache[:], between[:] = 0, write["kv_c"]
        numba_mla.write_cache(**write | {"kv_cache": cache, "kv_c": between})
        np.testing.assert_array_equal(cache, written(write))
        with pytest.raises(ValueError, match=r"^kv_c: expected memory apart from kv_cache's"):
            numba_mla.write_cache(**write | {"kv_cache": cache, "kv_c": rows.reshape(12, 14)[:5, 7:13]})
        np.testing.assert_array_equal(cache, written(write))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_slots_that_appear_twice(data):
    """Of any number, in pages of any size: refused exactly if one does."""
    stride, most = data.draw(st.sampled_from([1, 2, 3, 16, 64, 256])), data.draw(st.sampled_from([4, 40, 300]))
    pages = data.draw(st.lists(st.integers(-1, most - 1), max_size=most))
    slots = np.array([-1 if page < 0 else page * stride for page in pages], np.int64)
    cache, rows = np.zeros((most, stride, 2), np.float32), np.ones((len(slots), 1), np.float32)
    used = slots[slots >= 0]
    if len(set(used.tolist())) < len(used):
        with pytest.raises(ValueError, match=r"^slot_mapping: expected each slot once"):
            numba_mla.write_cache(rows, rows, cache, slots)
        assert not cache.any()
    else:
        numba_mla.write_cache(rows, rows, cache, slots)
        assert cache.sum() == 2 * len(used)


def test_calls_are_forgotten_when_they_are_too_many():
    known, arrays = forms.Calls(), (np.zeros(3), None)
    for n in range(3 * forms._MOST):
        known.keep((n,), arrays, n)
        assert known.last((n,)) == known.find((n,), arrays) == n
        assert len(known._known) <= forms._MOST
        assert len(known._last) <= forms._MOST
    assert known.last(([1],)) is None


def test_what_is_no_array_is_not_looked_into():
    """Numbers, text and lists have no shape where an array has one."""
    known = forms.Calls()
    known.keep((), (np.zeros(3),), "call")
    for other in (1.0, "text", [np.zeros(3)], object(), np.float64(1)):
        assert known.find((), (other,)) is None
    assert known.find((), (np.ones(3),)) == "call"
    for other in (np.zeros(4), np.zeros((3, 1)), np.zeros(3, np.float32), np.zeros(6)[::2], np.zeros((1,) * 7), None):
        assert known.find((), (other,)) is None


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "seq_lens", "out", "lse"])
def test_each_array_is_held_to_its_form(problem, name):
    """After a call with these settings, anything else in an array's place is refused, or computed as what it is."""
    right = problem["out"].copy(), problem["lse"].copy()
    array = problem[name]
    for wrong in (1.5, "text", object(), array[..., None], array[:0], array.astype(np.complex64), array.byteswap()[0]):
        with pytest.raises((ValueError, TypeError), match=f"^({name}|q|seq_lens|block_table|kv_cache): expected"):
            numba_mla.decode(**problem | {name: wrong})
    strided = np.empty((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
    strided[...] = array
    if name != "kv_cache":
        out, lse = numba_mla.decode(**problem | {name: strided})
        np.testing.assert_array_equal(out, right[0])
        np.testing.assert_array_equal(lse, right[1])
    numba_mla.decode(**problem)
    np.testing.assert_array_equal(problem["out"], right[0])


def test_integers_of_any_kind(problem):
    """Metadata of 4 and 8 bytes, in any strides, lists and other integers, in turns."""
    right = problem["out"].copy()
    lengths, table = problem["seq_lens"], problem["block_table"]
    wide = np.repeat(np.asarray(table, np.int64), 2, axis=1)
    kinds = [np.int32, np.int64, np.uint8, np.int16, ">i8", list]
    for _ in range(2):
        for kind in kinds:
            other = np.asarray(lengths).tolist() if kind is list else np.asarray(lengths).astype(kind)
            pages = table.tolist() if kind is list else table.astype(kind)
            problem["out"][:] = np.nan
            numba_mla.decode(**problem | {"seq_lens": other, "block_table": pages})
            np.testing.assert_array_equal(problem["out"], right)
        problem["out"][:] = np.nan
        numba_mla.decode(**problem | {"block_table": wide[:, ::2]})
        np.testing.assert_array_equal(problem["out"], right)


def test_outputs_are_made_in_the_dtype_of_the_queries(problem):
    """Whatever the call before was given."""
    numba_mla.decode(**problem)
    half = {name: problem[name].astype(np.float16) for name in ("q", "kv_cache")} | {"out": None, "lse": None}
    for out in (None, np.empty(problem["out"].shape, np.float32), None):
        result, _ = numba_mla.decode(**problem | half | {"out": out})
        assert result.dtype == (np.float16 if out is None else np.float32)


def test_products_hold_their_arrays_to_their_forms():
    """A weight without elements of k, too."""
    for k in (4, 0):
        packed = numba_mla.pack_weight(np.ones((2, 3, k), np.float32))
        a, out = np.ones((2, 5, k), np.float32), np.empty((2, 5, 3), np.float32)
        for _ in range(2):
            assert (numba_mla.bmm(a, packed, out=out) == k).all()
            for wrong in (a[0], a[:1], a.astype(np.float64), a.tolist(), 1.0):
                with pytest.raises((ValueError, TypeError), match=r"^a: expected"):
                    numba_mla.bmm(wrong, packed, out=out)
            for wrong in (out[:, :4], out.astype(np.float16), "out"):
                with pytest.raises((ValueError, TypeError), match=r"^out: expected"):
                    numba_mla.bmm(a, packed, out=wrong)
            assert (numba_mla.bmm(a[:, :2], packed) == k).all()
