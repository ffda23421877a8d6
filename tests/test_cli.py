"""The command line: it does the main job, and says in one line what is wrong with its input."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import numba_mla
from numba_mla import cli, trial
from numba_mla.checkpoint import Checkpoint, save_checkpoint, save_random_checkpoint

HIDDEN_SIZE = 48
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN_SIZE,
    "num_attention_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
SMALL = ["--batch", "3", "--prompt-len", "9", "--tokens", "2"]


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    save_random_checkpoint(folder, CONFIG, num_layers=2)
    return folder


@pytest.fixture
def folder(good_folder, tmp_path):
    """A checkpoint that a test may break."""
    return shutil.copytree(good_folder, tmp_path / "checkpoint")


@pytest.fixture
def refused(run_cli):
    """Run the command line on bad input; return the one line it prints."""

    def run(*arguments):
        exit_code, out, err = run_cli(*arguments)
        assert exit_code == 2
        assert out == ""
        assert err.startswith("numba-mla: ")
        assert err.count("\n") == 1
        return err

    return run


# ---- What it does ---------------------------------------------------------------------------------------------


def test_run_prints_a_table(run_cli, good_folder):
    exit_code, out, _ = run_cli("run", "--checkpoint", good_folder, "--layer", 1, *SMALL)
    assert exit_code == 0
    for word in (
        numba_mla.show_config()["isa"],
        "bfloat16",
        "tokens/s",
        "GFLOP/s",
        "bytes",
        "attention",
        "within tolerance",
    ):
        assert word in out


def test_run_prints_json(run_cli, good_folder):
    exit_code, out, _ = run_cli("run", "--checkpoint", good_folder, "--threads", 1, *SMALL, "--json")
    report = json.loads(out)
    assert exit_code == 0
    assert report["within_tolerance"] is True
    assert report["threads"] == 1
    assert report["decode"]["num_tokens"] == 6
    assert report["decode"]["tokens_per_s"] > 0
    assert set(report["errors"]) == {
        "queries",
        "cached latents",
        "absorbed queries",
        "attention",
        "values",
        "outputs",
    }
    # Three requests of at most 64 tokens: a page each.
    assert report["cache_bytes"] == 3 * 64 * (32 + 8) * 2
    assert report["materialised_bytes"] == 3 * 64 * 3 * (16 + 8 + 12) * 2


def test_run_without_a_checkpoint_makes_one_and_removes_it(run_cli, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    small = ["--batch", 1, "--prompt-len", 2, "--tokens", 1]
    exit_code, out, _ = run_cli("run", *small, "--json")
    assert exit_code == 0
    assert json.loads(out)["materialised_bytes"] == 64 * 16 * (192 + 128) * 2  # DeepSeek-V2-Lite's sizes
    assert list(tmp_path.glob("numba-mla-*")) == []


@pytest.mark.parametrize("block_size", [[16, 16], [10, 7], None], ids=["blocks", "straddling", "one scale"])
def test_a_checkpoint_in_fp8_runs_and_is_checked(run_cli, good_folder, tmp_path, block_size):
    """The layer keeps the fp8 weights; the checks start from the numbers that they stand for."""
    source = Checkpoint(good_folder)
    tensors = {name: np.array(source.tensor(name)) for name in source.names}
    rng = np.random.default_rng(0)
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2]:
        n, k = tensors[name].shape
        blocks = (1,) if block_size is None else (-(-n // block_size[0]), -(-k // block_size[1]))
        tensors[f"{name}_scale_inv"] = rng.uniform(0.5, 2.0, blocks).astype(np.float32)
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    quantization = {"quant_method": "fp8"} | ({} if block_size is None else {"weight_block_size": block_size})
    save_checkpoint(tmp_path, source.config | {"quantization_config": quantization}, tensors)
    exit_code, out, _ = run_cli("run", "--checkpoint", tmp_path, "--layer", 1, *SMALL, "--json")
    report = json.loads(out)
    assert exit_code == 0
    assert report["within_tolerance"] is True
    assert report["dtype"] == "bfloat16"
    plain = json.loads(run_cli("run", "--checkpoint", good_folder, *SMALL, "--json")[1])
    assert report["prefill"]["flops"] == plain["prefill"]["flops"]


def test_an_error_beyond_its_tolerance_is_exit_code_1(run_cli, monkeypatch, good_folder):
    def wrong_outputs(layer, hidden_states, cache, batch):
        return -numba_mla.MLALayer.__call__(layer, hidden_states, cache, batch)

    class WrongLayer(numba_mla.MLALayer):
        __call__ = wrong_outputs

    monkeypatch.setattr(cli, "MLALayer", WrongLayer)
    exit_code, out, _ = run_cli("run", "--checkpoint", good_folder, *SMALL, "--json")
    report = json.loads(out)
    assert exit_code == 1
    assert report["within_tolerance"] is False
    assert [name for name, error in report["errors"].items() if error["of_tolerance"] > 1] == ["outputs"]


def test_results_that_are_not_numbers_are_still_json(run_cli, monkeypatch, good_folder):
    class NanLayer(numba_mla.MLALayer):
        def __call__(self, hidden_states, cache, batch):
            return np.full_like(super().__call__(hidden_states, cache, batch), np.nan)

    monkeypatch.setattr(cli, "MLALayer", NanLayer)
    exit_code, out, _ = run_cli("run", "--checkpoint", good_folder, *SMALL, "--json")
    assert exit_code == 1
    assert json.loads(out)["errors"]["outputs"] == {"largest_error": None, "of_tolerance": None}


def test_npz_comes_back_with_the_same_results(run_cli, good_folder, tmp_path):
    first, second = tmp_path / "first.npz", tmp_path / "second"
    assert run_cli("run", "--checkpoint", good_folder, *SMALL, "--npz-out", first)[0] == 0
    assert run_cli("run", "--checkpoint", good_folder, "--npz", first, "--npz-out", second)[0] == 0
    with np.load(first) as one, np.load(second) as other:
        assert set(one.files) == set(other.files)
        assert one["tokens_out"].shape == (2, 3, HIDDEN_SIZE)
        for name in one.files:
            np.testing.assert_array_equal(one[name], other[name])


def test_npz_outputs_are_the_layers_own(run_cli, good_folder, tmp_path):
    """One call over the whole of request 0 gives what prefill, continuation and decodes gave."""
    out = tmp_path / "out.npz"
    run_cli("run", "--checkpoint", good_folder, *SMALL, "--npz-out", out)
    with np.load(out) as arrays:
        end = arrays["query_start_loc"][1]
        parts = [
            (arrays[f"prompts{suffix}"][:end], arrays[f"continuation{suffix}"], arrays[f"tokens{suffix}"][:, 0])
            for suffix in ("", "_out")
        ]
    rows, expected = (np.concatenate(part).astype(ml_dtypes.bfloat16) for part in parts)
    layer = numba_mla.MLALayer.from_pretrained(good_folder)
    cache = numba_mla.PagedLatentCache(layer.config, num_blocks=4)
    cache.add("request")
    np.testing.assert_array_equal(layer(rows, cache, cache.append({"request": len(rows)})), expected)


def test_npz_needs_prompts_alone(run_cli, good_folder, tmp_path):
    np.savez(
        tmp_path / "in.npz",
        prompts=np.ones((3, HIDDEN_SIZE), ml_dtypes.bfloat16),
        query_start_loc=np.array([0, 1, 3]),
    )
    exit_code, out, _ = run_cli("run", "--checkpoint", good_folder, "--npz", tmp_path / "in.npz", "--json")
    assert exit_code == 0
    assert json.loads(out)["prefill"]["num_tokens"] == 3
    assert json.loads(out)["decode"]["tokens_per_s"] == 0


def test_flops_of_one_call(good_folder):
    """Two new tokens at positions 0 and 1: every weight twice, three visible keys."""
    layer = numba_mla.MLALayer.from_pretrained(good_folder)
    weights = cli.load_layer(good_folder, 0, good_folder, 0)[1]
    cache = numba_mla.PagedLatentCache(layer.config, num_blocks=1)
    cache.add(0)
    num_weights = 24 * 48 + 3 * 24 * 24 + 40 * 48 + 3 * 28 * 32 + 48 * 3 * 12
    flops = trial.count_flops(layer.config, weights, cache.append({0: 2}))
    assert flops == 2 * (2 * num_weights + 3 * 3 * (32 + 8 + 32))


def test_info_is_show_config(run_cli):
    exit_code, out, _ = run_cli("info", "--json")
    found = json.loads(out)
    assert exit_code == 0
    assert set(found) == set(numba_mla.show_config())
    assert found["isa"] == numba_mla.show_config()["isa"]
    assert run_cli("info")[1].count(found["numba"]) == 1


def test_version_and_help(run_cli):
    assert run_cli("--version")[:2] == (0, numba_mla.__version__ + "\n")
    assert "info" in run_cli()[1]
    assert "--npz-out" in run_cli("run", "--help")[1]


# ---- What it refuses ------------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Apply a change to the checkpoint's tensors by name."""
    source = Checkpoint(folder)
    tensors = {name: np.array(source.tensor(name)) for name in source.names}
    change(tensors)
    save_checkpoint(folder, source.config, tensors, overwrite=True)


O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def test_a_missing_tensor_is_refused(refused, folder):
    rewrite(folder, lambda tensors: tensors.pop(O_PROJ))
    assert O_PROJ in refused("run", "--checkpoint", folder)


def test_a_wrong_shape_is_refused(refused, folder):
    rewrite(folder, lambda tensors: tensors.update({O_PROJ: tensors[O_PROJ].T}))
    message = refused("run", "--checkpoint", folder)
    assert O_PROJ in message
    assert "(48, 36)" in message
    assert "(36, 48)" in message


@pytest.mark.parametrize("num_bytes", [0, 5, 300, -1])
def test_a_truncated_file_is_refused(refused, folder, num_bytes):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert "model.safetensors" in refused("run", "--checkpoint", folder)


def test_an_unknown_model_type_is_refused(refused, folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))
    assert "gpt2" in refused("run", "--checkpoint", folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "deepseek_v3"}'])
def test_a_broken_config_is_refused(refused, folder, text):
    (folder / "config.json").write_text(text)
    refused("run", "--checkpoint", folder)


def test_a_missing_folder_or_file_is_refused(refused, folder):
    assert "nowhere" in refused("run", "--checkpoint", folder / "nowhere")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refused("run", "--checkpoint", folder)
    (folder / "config.json").unlink()
    assert "config.json" in refused("run", "--checkpoint", folder)


def test_a_file_in_place_of_a_checkpoint_folder_is_refused(refused, folder):
    path = folder / "model.safetensors"
    assert f"{path} is a file; expected the checkpoint folder" in refused("run", "--checkpoint", path)


def test_a_layer_that_is_not_there_is_refused(refused, folder):
    message = refused("run", "--checkpoint", folder, "--layer", 2)
    assert "layer: 2 is not in" in message
    assert message.endswith("attention layers there: 0, 1\n")
    assert "--layer" in refused("run", "--layer", 2)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--batch", 0], "--batch"),
        (["--batch", "many"], "--batch"),
        (["--prompt-len", 0], "--prompt-len"),
        (["--tokens", -1], "--tokens"),
        (["--seed", -1], "--seed"),
        (["--threads", 0], "--threads"),
        (["--layer", -1], "--layer"),
        (["--frobnicate"], "--frobnicate"),
        (["surplus"], "surplus"),
    ],
)
def test_bad_options_are_refused(refused, arguments, word):
    assert word in refused("run", *arguments)


def test_an_unknown_command_is_refused(refused):
    assert "walk" in refused("walk")


def test_an_unknown_instruction_set_is_refused(refused, monkeypatch, good_folder):
    monkeypatch.setenv("NUMBA_MLA_ISA", "z80")
    assert "z80" in refused("info")
    assert "z80" in refused("run", "--checkpoint", good_folder, *SMALL)


def good_arrays():
    return {
        "prompts": np.ones((3, HIDDEN_SIZE), np.float32),
        "query_start_loc": np.array([0, 1, 3]),
        "continuation": np.ones((2, HIDDEN_SIZE), np.float32),
        "tokens": np.ones((4, 2, HIDDEN_SIZE), np.float32),
    }


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("prompts", None),
        ("prompts", np.ones((3, HIDDEN_SIZE + 1), np.float32)),
        ("prompts", np.ones((3, HIDDEN_SIZE), np.int64)),
        ("prompts", np.full((3, HIDDEN_SIZE), np.nan, np.float32)),
        ("prompts", np.full((3, HIDDEN_SIZE), 1e300)),
        ("prompts", np.array(1.0)),
        ("prompts", np.array([[None] * HIDDEN_SIZE])),
        ("query_start_loc", None),
        ("query_start_loc", np.array([0, 1, 4])),
        ("query_start_loc", np.array([1, 2, 3])),
        ("query_start_loc", np.array([0, 3, 3])),
        ("query_start_loc", np.array([0])),
        ("query_start_loc", np.array([0.0, 3.0])),
        ("query_start_loc", np.array([[0, 3]])),
        ("continuation", np.ones(HIDDEN_SIZE, np.float32)),
        ("tokens", np.ones((4, 3, HIDDEN_SIZE), np.float32)),
    ],
)
def test_bad_arrays_are_refused(refused, good_folder, tmp_path, name, array):
    path = tmp_path / "in.npz"
    arrays = good_arrays() | {name: array}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    message = refused("run", "--checkpoint", good_folder, "--npz", path)
    assert "in.npz" in message


def test_arrays_that_would_be_left_out_are_refused(refused, good_folder, tmp_path):
    np.savez(tmp_path / "in.npz", **good_arrays(), continuations=np.ones(3), note=np.ones(3))
    message = refused("run", "--checkpoint", good_folder, "--npz", tmp_path / "in.npz")
    assert "unknown arrays continuations, note; expected prompts, query_start_loc, continuation, tokens" in message


def test_an_empty_prompt_is_refused(refused, good_folder, tmp_path):
    np.savez(tmp_path / "in.npz", **good_arrays() | {"query_start_loc": np.array([0, 3, 3])})
    message = refused("run", "--checkpoint", good_folder, "--npz", tmp_path / "in.npz")
    assert "query_start_loc: each request needs at least one token, got none for [1]" in message


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_npz_is_refused(refused, good_folder, tmp_path, content):
    path = tmp_path / "in.npz"
    path.write_bytes(content)
    assert "in.npz" in refused("run", "--checkpoint", good_folder, "--npz", path)


def test_a_truncated_npz_and_an_npy_are_refused(refused, good_folder, tmp_path):
    path = tmp_path / "in.npz"
    np.savez(path, **good_arrays())
    path.write_bytes(path.read_bytes()[:-100])
    assert "in.npz" in refused("run", "--checkpoint", good_folder, "--npz", path)
    np.save(tmp_path / "in.npy", np.ones(3))
    message = refused("run", "--checkpoint", good_folder, "--npz", tmp_path / "in.npy")
    assert "in.npy: not a readable .npz file (it is a single array, as of np.save; use np.savez" in message


def test_missing_places_for_npz_are_refused(refused, good_folder, tmp_path):
    nowhere = tmp_path / "nowhere" / "x.npz"
    assert "nowhere" in refused("run", "--checkpoint", good_folder, "--npz", nowhere)
    assert "nowhere" in refused("run", "--checkpoint", good_folder, "--npz-out", nowhere)
    assert str(tmp_path) in refused("run", "--checkpoint", good_folder, "--npz-out", tmp_path)


def test_a_request_for_more_memory_than_there_is_is_refused(refused, good_folder):
    assert refused("run", "--checkpoint", good_folder, "--batch", 10**15)


# ---- As a process ---------------------------------------------------------------------------------------------


def test_the_installed_command_refuses_in_one_line(tmp_path):
    command = [sys.executable, "-c", "from numba_mla.cli import main; main()", "run", "--checkpoint", tmp_path]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"numba-mla: {tmp_path}/config.json does not exist\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C to whole consoles")
def test_ctrl_c_leaves_nothing_behind(tmp_path):
    # The handler is set anew, since background jobs inherit an ignored SIGINT.
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from numba_mla.cli import main
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", "--tokens", "500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("numba-mla-*/model.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "")
    assert list(tmp_path.glob("numba-mla-*")) == []


@pytest.mark.parametrize("harm", ["a later step fails", "none"])
def test_an_interrupt_that_a_callback_loses_is_still_one(run_cli, monkeypatch, good_folder, harm):
    """As when it lands in a callback of the compiler: Python drops it there and goes on."""

    class InterruptedLayer(numba_mla.MLALayer):
        def __call__(self, hidden_states, cache, batch):
            ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
            if harm != "none":
                raise RuntimeError("the callback has not done its work")
            return hidden_states

    monkeypatch.setattr(cli, "MLALayer", InterruptedLayer)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run_cli("run", "--checkpoint", good_folder) == (130, "", "")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_report_is_a_value(good_folder):
    """The main job is a library call: nothing printed, a frozen result."""
    layer, weights = cli.load_layer(good_folder, 0, good_folder, 0)
    inputs = trial.random_hidden_states(HIDDEN_SIZE, layer.dtype, num_requests=2, prompt_len=5, num_tokens=1, seed=3)
    told = []
    report = trial.run_trial(layer, weights, inputs, on_tokens=told.append)
    assert report.within_tolerance
    assert sum(told) == sum(inputs.seq_lens)
    assert not replace(report, errors=(replace(report.errors[0], of_tolerance=1.1),)).within_tolerance
