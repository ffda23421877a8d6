"""Where tile instructions must kill the process, and how the emulator comes and goes.

On a processor with AMX the deadly cases run on the hardware.
"""

import ctypes
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import tile_programs
from tile_programs import FULL, instructions, run, run_in_thread

from numba_mla.testing.amx import IllegalInstruction, ProtectionFault, Tiles, emulate, tile_config
from numba_mla.testing.amx.handler import build_handler, new_memory

pytestmark = tile_programs.MARKS


def misconfigured(change):
    config = FULL.copy()
    change(config)
    return config


def set_bytes(**places):
    def change(config):
        for place, value in places.items():
            config[int(place.removeprefix("at"))] = value

    return change


def configured(shapes, *names):
    """Load a configuration, then execute instructions on a page of memory."""
    memory = np.zeros(4096, np.uint8)

    def act():
        run("ldtilecfg", tile_config(shapes))
        for name in names:
            run(name, memory, 64) if name.startswith(("tileload", "tilestore")) else run(name)

    return act


def hold_tiles_in_many_threads():
    """One more thread with configured tiles than the emulator has room for."""
    threading.stack_size(256 * 1024)
    stay = threading.Event()

    def work():
        run("ldtilecfg", FULL)
        stay.wait()

    for _ in range(513):
        threading.Thread(target=work, daemon=True).start()
    stay.wait(20)


def leave_the_block():
    with emulate():
        pass
    run("tilerelease")


def illegal_under_faulthandler():
    faulthandler.enable()
    with emulate():
        run("ldtilecfg", FULL)
        run("ud2")


def new_thread_after_an_unreleased_one():
    run_in_thread("ldtilecfg")
    run_in_thread("tilezero_0")


WHOLE = [(16, 64)] * 8
PROTECTION = {
    "palette 2": set_bytes(at0=2),
    "palette 255": set_bytes(at0=255),
    "reserved byte 2": set_bytes(at2=1),
    "reserved byte 9": set_bytes(at9=0x80),
    "reserved byte 15": set_bytes(at15=1),
    "reserved byte 32": set_bytes(at32=1),
    "reserved byte 47": set_bytes(at47=0x80),
    "reserved byte 56": set_bytes(at56=1),
    "reserved byte 63": set_bytes(at63=0x80),
    "17 rows": set_bytes(at50=17),
    "colsb 65": set_bytes(at18=65),
    "colsb 320": set_bytes(at31=1),
    "rows 0 with colsb 64": set_bytes(at55=0),
    "colsb 0 with rows 16": set_bytes(at16=0),
}
ILLEGAL = {
    "ud2": lambda: run("ud2"),
    "no SIB byte": lambda: (run("ldtilecfg", FULL), run("no_sib", np.zeros(4096, np.uint8))),
    "tilezero unconfigured": lambda: run("tilezero_0"),
    "tileloadd unconfigured": lambda: run("tileloadd_0", FULL, 0),
    "tilestored unconfigured": lambda: run("tilestored_0", FULL, 0),
    "tdpbf16ps unconfigured": lambda: run("tdpbf16ps_0_1_2"),
    "tilezero after release": configured(WHOLE, "tilerelease", "tilezero_0"),
    "tilezero of a tile without a shape": configured([(16, 64)], "tilezero_1"),
    "tileloadd of a tile without a shape": configured([(16, 64)], "tileloadd_1"),
    "tileloadd with colsb 6": configured([(16, 6)], "tileloadd_0"),
    "tilestored with colsb 6": configured([(16, 6)], "tilestored_0"),
    "target and left the same": configured(WHOLE, "tdpbf16ps_0_0_1"),
    "target and right the same": configured(WHOLE, "tdpbf16ps_0_1_0"),
    "left and right the same": configured(WHOLE, "tdpbf16ps_1_0_0"),
    "rows disagree": configured([(16, 64), (15, 64), (16, 64)], "tdpbf16ps_0_1_2"),
    "columns disagree": configured([(16, 60), (16, 64), (16, 64)], "tdpbf16ps_0_1_2"),
    "depths disagree": configured([(16, 64), (16, 64), (15, 64)], "tdpbf16ps_0_1_2"),
    "product with colsb 6": configured([(1, 4), (1, 6), (1, 4)], "tdpbf16ps_0_1_2"),
    "start row past the rows": lambda: (
        run("ldtilecfg", tile_config([(4, 64)], start_row=4)),
        run("tileloadd_0", np.zeros(4096, np.uint8), 64),
    ),
    "a thread after one that left its tiles": new_thread_after_an_unreleased_one,
    "signal sent by hand": lambda: os.kill(os.getpid(), signal.SIGILL),
    "faulthandler inside and a block in it": illegal_under_faulthandler,
}
# These die only where the instructions are emulated.
EMULATOR_ONLY = {
    "tdpbssd": lambda: (run("ldtilecfg", FULL), run("tdpbssd")),
    "too many threads": hold_tiles_in_many_threads,
    "after the block": leave_the_block,
}


def deadly_cases():
    loads = {name: lambda change=change: run("ldtilecfg", misconfigured(change)) for name, change in PROTECTION.items()}
    loads["unmapped memory"] = lambda: (run("ldtilecfg", FULL), run("tileloadd_0", 4096, 64))
    return loads | ILLEGAL | EMULATOR_ONLY


def how_it_ends(act, is_inside):
    """Run in a child process; its exit (negative: the signal that killed it) and what it wrote to stderr."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        signal.alarm(20)
        if is_inside:
            with emulate():
                act()
        else:
            act()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def die_of_everything():
    """Run all deadly cases, each in a child of its own; as JSON on stdout."""
    import resource  # not on Windows, where the module is skipped

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    instructions()
    with emulate() as how:
        pass
    ends = {name: how_it_ends(act, name != "after the block") for name, act in deadly_cases().items()}
    print(json.dumps({"how": how, "ends": ends}))


@pytest.fixture(scope="module")
def deaths():
    """How each deadly case ended."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [*PROTECTION, "unmapped memory"])
def test_protection_fault_kills_with_sigsegv(deaths, name):
    assert deaths["ends"][name][0] == -signal.SIGSEGV


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_instruction_kills_with_sigill(deaths, name):
    assert deaths["ends"][name][0] == -signal.SIGILL


def test_more_living_threads_than_places_say_so(deaths):
    if deaths["how"] == "hardware":
        pytest.skip("the hardware has no table")
    code, text = deaths["ends"]["too many threads"]
    assert code == -signal.SIGILL
    assert text == "numba_mla.testing.amx: more than 512 threads hold configured tiles at once\n"


@pytest.mark.parametrize("name", ["after the block", "tdpbssd"])
def test_what_is_not_emulated_kills_with_sigill(deaths, name):
    if deaths["how"] == "hardware":
        pytest.skip("the hardware goes on")
    assert deaths["ends"][name][0] == -signal.SIGILL


def test_faulthandler_below_still_reports(deaths):
    assert "Fatal Python error: Illegal instruction" in deaths["ends"]["faulthandler inside and a block in it"][1]


@pytest.mark.parametrize("name", PROTECTION)
def test_the_model_refuses_the_same_configurations(name):
    with pytest.raises(ProtectionFault):
        Tiles().load_config(misconfigured(PROTECTION[name]))


@pytest.mark.parametrize(
    ("shapes", "triple"),
    [
        (WHOLE, (0, 0, 1)),
        (WHOLE, (1, 0, 0)),
        ([(16, 64), (15, 64), (16, 64)], (0, 1, 2)),
        ([(16, 60), (16, 64), (16, 64)], (0, 1, 2)),
        ([(16, 64), (16, 64), (15, 64)], (0, 1, 2)),
        ([(1, 4), (1, 6), (1, 4)], (0, 1, 2)),
        ([(1, 4), (1, 4)], (0, 1, 2)),
    ],
)
def test_the_model_refuses_the_same_products(shapes, triple):
    model = Tiles()
    with pytest.raises(IllegalInstruction):
        model.dot_bf16(*triple)
    model.load_config(tile_config(shapes))
    with pytest.raises(IllegalInstruction):
        model.dot_bf16(*triple)


def illegal_action():
    """Address of SIGILL's handler."""
    action = (ctypes.c_uint64 * 32)()
    assert ctypes.CDLL(None).sigaction(signal.SIGILL, None, action) == 0
    return action[0]


@pytest.fixture
def emulated():
    """Skip where the hardware runs the instructions: no handler is put anywhere."""
    with emulate() as how:
        if how == "hardware":
            pytest.skip("nothing is emulated here")


@pytest.mark.usefixtures("emulated")
def test_blocks_nest_and_put_back_what_was_there():
    before = illegal_action()
    with emulate() as how:
        ours = illegal_action()
        assert how == "emulator"
        assert ours != before
        with emulate():
            assert illegal_action() == ours
            run("ldtilecfg", FULL)
        assert illegal_action() == ours
        run("tilezero_0")
        run("tilerelease")
    assert illegal_action() == before


@pytest.mark.usefixtures("emulated")
def test_block_wins_over_a_handler_set_inside_another_and_returns_it():
    before = signal.getsignal(signal.SIGILL)
    try:
        with emulate():
            ours = illegal_action()
            signal.signal(signal.SIGILL, lambda *_: None)
            others = illegal_action()
            assert others != ours
            with emulate():
                assert illegal_action() == ours
                run("tilerelease")
            assert illegal_action() == others
    finally:
        signal.signal(signal.SIGILL, before)


@pytest.mark.usefixtures("emulated")
def test_blocks_of_two_threads_that_overlap():
    before = illegal_action()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with emulate():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with emulate():
        ours = illegal_action()
        thread.start()
        entered.wait()
    assert illegal_action() == ours
    run("tilerelease")
    leave.set()
    thread.join()
    assert illegal_action() == before


def test_the_handler_allocates_nothing():
    text = build_handler(new_memory()).inspect_llvm()
    assert "define" in text
    assert re.findall(r"NRT_(?:Allocate|MemInfo)\w*|@malloc", text) == []


def test_elsewhere_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="expected Linux on x86-64, got darwin"), emulate():
        pass


if __name__ == "__main__":
    die_of_everything()
