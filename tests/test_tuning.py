"""The search for a tiling: what it finds, what it never times, when it ends."""

import itertools
from collections import Counter
from dataclasses import replace
from time import perf_counter

import pytest

import numba_mla
from numba_mla import Tiling
from numba_mla.lab import Workload, search, timing
from numba_mla.lab.search import difference
from numba_mla.lab.workload import Check

DEFAULT = numba_mla.default_tiling("decode", "generic")


class Pretended(Workload):
    """A workload whose calls take the time that ``cost`` says, on its own clock, and whose ``wrong`` results are so."""

    def __post_init__(self):
        super().__post_init__()
        self.__dict__.update(timed=Counter(), now=0.0, cost=lambda tiling: 0.5e-3, wrong=lambda tiling: False)

    def run(self, tiling=None):
        self.timed[tiling] += 1
        self.__dict__["now"] += self.cost(tiling)

    def check(self, tiling=None):
        return Check(0.5, not (tiling is not None and self.wrong(tiling)))


@pytest.fixture
def pretended(monkeypatch):
    def make(**behaviour):
        made = Pretended("decode", isa="generic")
        made.__dict__.update(behaviour)
        for module in (search, timing):
            monkeypatch.setattr(module, "perf_counter", lambda: made.now)
        return made

    return make


def found(workload, **options):
    return search.search(workload, **{"budget_s": 30.0, "progress": lambda done, note: None} | options)


def test_the_fastest_is_found_and_only_what_differs_is_named(pretended):
    """Two fields that help, one after the other."""

    def cost(tiling):
        return 2e-3 - 0.7e-3 * (tiling.score_block == (4, 1)) - 0.7e-3 * (tiling.prefetch_rows == 4)

    tuned = found(pretended(cost=cost))
    assert tuned.tiling == Tiling(score_block=(4, 1), prefetch_rows=4)
    assert tuned.speed == pytest.approx(2e-3 / 0.6e-3)
    assert tuned.num_tried > 40
    assert not tuned.interrupted


@pytest.mark.parametrize("cost", [0.8e-3, 0.4955e-3])
def test_what_is_not_faster_by_1_percent_is_not_taken(pretended, cost):
    made = pretended(cost=lambda tiling: 0.5e-3 if tiling == DEFAULT else cost)
    tuned = found(made)
    assert tuned.tiling == Tiling()
    assert tuned.speed == 1
    assert made.now < 30


def test_a_lucky_time_is_not_believed(pretended):
    """One that was fast when its field was measured, and is not when it is compared with the default."""
    made = pretended()
    made.__dict__["cost"] = lambda tiling: 0.1e-3 if tiling.prefetch_rows == 4 and made.timed[tiling] < 60 else 0.5e-3
    assert found(made).tiling == Tiling()
    assert any(tiling.prefetch_rows == 4 for tiling in made.timed)


@pytest.mark.parametrize("cost", [0.3, 3.0])
def test_slow_calls_keep_to_the_budget(pretended, cost):
    """Passes that time ends are gone on with; what is under way at the end is a check and a comparison."""
    made = pretended(cost=lambda tiling: cost * (1 - 0.5 * (tiling.lane_group == 16)))
    tuned = found(made)
    assert made.now < 30 + 3 * cost
    assert tuned.num_tried == len(made.timed) - 1 >= 1
    assert tuned.tiling.lane_group == 16


def test_a_wrong_result_is_never_timed(pretended):
    made = pretended(wrong=lambda tiling: tiling.prefetch_rows == 4, cost=lambda tiling: 1e-4)
    with pytest.warns(RuntimeWarning, match="prefetch_rows=4.* gave a wrong result and was left out"):
        found(made)
    assert made.timed
    assert not any(made.wrong(tiling) for tiling in made.timed)


def test_a_wrong_default_is_an_error(pretended, monkeypatch):
    monkeypatch.setattr(Pretended, "check", lambda self, tiling=None: Check(1.5, True))
    with pytest.raises(RuntimeError, match="default tiling's result is not within its tolerance"):
        found(pretended())


@pytest.mark.parametrize("change_bits", [False, True])
def test_bits_change_only_if_that_is_asked_for(pretended, change_bits):
    made = pretended(cost=lambda tiling: 1e-3 if tiling.kv_split == 1024 else 0.5e-3)
    tuned = found(made, change_bits=change_bits)
    assert tuned.tiling.changes_bits == change_bits
    assert any(difference(tiling, DEFAULT).changes_bits for tiling in made.timed) == change_bits


def test_ctrl_c_returns_what_was_found(pretended):
    calls = itertools.count()

    def tell(done, note):
        if note.startswith("score_unroll") and next(calls) > 1:
            raise KeyboardInterrupt

    tuned = found(pretended(cost=lambda tiling: 1e-3 if tiling.lane_group != 16 else 0.5e-3), progress=tell)
    assert tuned.interrupted
    assert tuned.tiling.lane_group == 16
    assert tuned.speed > 1.5


def test_ctrl_c_before_anything_was_measured_is_one(pretended, monkeypatch):
    def interrupt(self, tiling=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(Pretended, "check", interrupt)
    with pytest.raises(KeyboardInterrupt):
        found(pretended())


def test_the_budget_is_kept():
    made = Workload("decode", num_heads=16, seq_len=64, isa="generic")
    made.check()
    for budget_s in (0.01, 0.3):
        start = perf_counter()
        tuned = found(made, budget_s=budget_s)
        # A tiling's compilation and one comparison may be under way at the end.
        assert perf_counter() - start < budget_s + 1.5
        assert tuned.default.median > 0


def test_progress_goes_from_0_on_with_what_is_under_way():
    told = []
    tiling = numba_mla.tune("extend", num_heads=3, seq_len=20, isa="generic", budget_s=0.5,
                            progress=lambda done, note: told.append((done, note)))  # fmt: skip
    assert isinstance(tiling, Tiling)
    assert told[0] == (0.0, "the reference")
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert any(note.startswith("lane_group") for _, note in told)


@pytest.mark.parametrize("op", ["decode", "extend", "prefill"])
def test_there_is_something_to_choose_on_every_instruction_set(isa, op):
    made, default = Workload(op, num_heads=2, seq_len=20), numba_mla.default_tiling(op)
    for name in ("lane_group", "least_lanes", "score_block", "value_block", "prefetch_rows", "item_order"):
        values = [value for value in search._VALUES[name] if fits(made, replace(default, **{name: value}))]
        assert len(values) > 2


def fits(workload, tiling):
    try:
        workload.candidate(tiling)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lane_group": 64}, Tiling(lane_group=64, least_lanes=16)),
        ({"least_lanes": 4}, Tiling(least_lanes=4)),
        ({"value_block": (4, 1), "key_tile": 128}, Tiling(value_block=(4, 1), key_tile=128)),
        ({}, Tiling()),
    ],
    ids=repr,
)
def test_a_difference_laid_over_the_default_is_the_tiling(changes, named):
    default = Tiling(lane_group=128, least_lanes=16, value_block=(8, 2), key_tile=256)
    tiling = replace(default, **changes)
    assert difference(tiling, default) == named
    assert named.over(default) == tiling
