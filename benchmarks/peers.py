"""Measure other libraries on the same problems, in the same process: ``python benchmarks/peers.py prefill``.

Each peer takes the inputs of a case of ``run.py`` in the layout that suits it best, made beforehand, and is
measured in turn with this package. Its result must agree with this package's, which is checked against the
reference: for every token and head the difference is at most a fraction of the row's length. Where probabilities
and outputs are rounded to bfloat16 that is 1/64, where scores are too, before they are exponents, 1/16. The peers'
log-sum-exp is not looked at. Peers that are not installed are named. How many times as fast this package is asked
to be stands beside how many times it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from time import sleep
from typing import NamedTuple

import numpy as np
import peer_torch
import peer_vllm
from case import FLOATS, Case, is_right
from cases import add_selection, select
from measure import QUIET_S, Peaks, print_row, report, row_of, summary, take_turns

import numba_mla
from numba_mla.machine import Yardstick
from numba_mla.parallel import num_threads

# What a difference of rows may be, of their length.
OUTPUT_ROUNDED, SCORES_ROUNDED = 1 / 64, 1 / 16


class Peer(NamedTuple):
    """A way to compute an operation: ``prepare(problem)`` returns the call to measure, which returns tensors."""

    name: str
    module: str
    tolerance: float
    prepare: Callable[[dict], Callable]
    # How many times as fast this package is to be, of a case's problem.
    asked: Callable[[dict], float | None] = lambda problem: None
    dtypes: tuple[str, ...] = FLOATS

    @property
    def is_installed(self) -> bool:
        """Whether its module is there."""
        return importlib.util.find_spec(self.module) is not None


def always(times: float) -> Callable[[dict], float]:
    """The same speed asked of every case."""
    return lambda problem: times


def asked_of_extend(problem: dict) -> float:
    """More where few new tokens follow a prefix: vLLM's kernel packs all keys anew for each head."""
    return 2.0 if problem["seq_lens"].sum() > 2 * len(problem["q"]) else 1.1


HALF = ("bfloat16",)
PEERS = {
    "decode": [
        Peer("torch matmul + softmax", "torch", SCORES_ROUNDED, peer_torch.torch_decode),
        Peer("vLLM mla_decode_kvcache", "vllm", OUTPUT_ROUNDED, peer_vllm.mla_decode, always(2.0)),
        Peer("vLLM decode_attention_cpu", "vllm", OUTPUT_ROUNDED, peer_vllm.decode_attention, always(2.0), HALF),
    ],
    "extend": [
        Peer("vLLM extend_attention_cpu", "vllm", OUTPUT_ROUNDED, peer_vllm.extend_attention, asked_of_extend, HALF),
    ],
    "prefill": [
        Peer("zentorch SDPA", "zentorch", OUTPUT_ROUNDED, peer_torch.zentorch_sdpa, always(1.3)),
        Peer("torch SDPA", "torch", OUTPUT_ROUNDED, peer_torch.torch_sdpa),
        Peer("torch matmul + softmax", "torch", SCORES_ROUNDED, peer_torch.torch_prefill),
        Peer("vLLM CPU_SDPA", "vllm", OUTPUT_ROUNDED, peer_vllm.cpu_sdpa, always(5.0)),
    ],
    "bmm": [
        Peer("torch bmm", "torch", OUTPUT_ROUNDED, peer_torch.torch_bmm),
        Peer("vLLM bmm_cpu", "vllm", OUTPUT_ROUNDED, peer_vllm.bmm, dtypes=HALF),
    ],
}


def rows_of(result, width: int) -> np.ndarray:
    """A peer's result as float32 rows in the order of ours: a tensor, or one (1, H, S, D) for each request."""
    if not isinstance(result, list):
        return result.float().numpy()
    return np.concatenate([x[0, :, :, :width].transpose(0, 1).float().numpy() for x in result])


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The longest difference of two rows over the length of ours."""
    ours = ours.astype(np.float32)
    return float((np.linalg.norm(theirs - ours, axis=-1) / np.linalg.norm(ours, axis=-1)).max())


def run_peers(case: Case, peers: list[Peer], yardstick: Yardstick, rounds: int) -> dict:
    """Check and measure this package and its peers in turn."""
    verdict = case.check()
    if not is_right(verdict):
        return {"case": case.name, "wrong": True, **verdict}
    peers = [peer for peer in peers if case.name.split()[-1] in peer.dtypes]
    calls = [peer.prepare(case.problem) for peer in peers]
    out = case.outputs[0]
    differences = [difference(out, rows_of(call(), out.shape[-1])) for call in calls]
    sleep(QUIET_S)
    ours, *others = take_turns([case.call, *calls], rounds, yardstick)
    found = [
        {"peer": peer.name, "difference": apart, "tolerance": peer.tolerance, **summary(times),
         "gflops": case.flops / times.median * 1e-9, "speed": times.median / ours.median,
         "asked": peer.asked(case.problem)}
        for peer, apart, times in zip(peers, differences, others, strict=True)
    ]  # fmt: skip
    return row_of(case, verdict, ours, yardstick) | {"peers": found}


def agrees(peer: dict) -> bool:
    """Whether a peer's rows are as near to ours as its roundings allow."""
    return peer["difference"] <= peer["tolerance"]


def print_peer(peer: dict) -> None:
    """One line below this package's."""
    if not agrees(peer):
        print(
            f"  {peer['peer']:36} DISAGREES: rows differ by {peer['difference']:.3g}, allowed {peer['tolerance']:.3g}"
        )
        return
    asked = peer["asked"]
    verdict = "" if asked is None else f", {asked} asked{'' if peer['speed'] >= asked else ': MISSED'}"
    print(
        f"  {peer['peer']:36}            {peer['median_us']:9.1f} us  best {peer['best_us']:9.1f}  "
        f"{peer['gflops']:6.1f} GF/s  numba_mla is {peer['speed']:.2f} x as fast{verdict}  "
        f"(rows differ by {peer['difference']:.1g})",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, print; 1 if a result was wrong or disagreed, 2 if there is no case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=sorted(PEERS))
    add_selection(parser, default_formats=("bfloat16",))
    options = parser.parse_args(arguments)
    peers = [peer for peer in PEERS[options.op] if peer.is_installed]
    absent = [peer.name for peer in PEERS[options.op] if not peer.is_installed]
    rows: list[dict] = []
    with numba_mla.threads(options.threads or num_threads()):
        if importlib.util.find_spec("torch"):
            import torch

            torch.set_num_threads(num_threads())
        peaks = Peaks()
        for case in select(options.op, options):
            rows.append(run_peers(case, peers, peaks[case.isa], options.rounds))
            if not options.json:
                print_row(rows[-1])
                for peer in rows[-1].get("peers", []):
                    print_peer(peer)
        if not rows:
            parser.error(f"no case of {options.op} has these options")
        if not options.json:
            print(f"absent: {', '.join(absent) or 'none'}")
        report({"op": options.op, "cases": rows, "absent": absent}, peaks, options.json)
    return int(any(row.get("wrong") or not all(map(agrees, row["peers"])) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
