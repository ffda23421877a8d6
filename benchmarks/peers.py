"""Measure other libraries on the same problems, in the same process: ``python benchmarks/peers.py prefill``.

Each peer takes the inputs of a case of ``run.py`` in the layout that suits it best, made beforehand, and is
measured in turn with this package. Its result must agree with this package's, which is checked against the
reference: for every token and head the difference is at most a fraction of the row's length. Where probabilities
and outputs are rounded to bfloat16 that is 1/64, where scores are too, before they are exponents, 1/16. The peers'
log-sum-exp is not looked at. Peers that are not installed are named.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from itertools import cycle, pairwise
from time import sleep
from typing import NamedTuple

import ml_dtypes
import numpy as np
from case import Case, is_right
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

    @property
    def is_installed(self) -> bool:
        """Whether its module is there."""
        return importlib.util.find_spec(self.module) is not None


def to_torch(x: np.ndarray):
    """A tensor with an array's memory; torch takes no bfloat16 from numpy."""
    import torch

    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _requests(problem: dict) -> list[tuple]:
    """Tensors q, k, v of each prefill request, (1, H, S, D), with V padded to K's width as SDPA kernels need it."""
    missing = problem["k"].shape[2] - problem["v"].shape[2]
    padded = problem | {"v": np.pad(problem["v"], ((0, 0), (0, 0), (0, missing)))}
    whole = [to_torch(padded[name]).transpose(0, 1)[None] for name in "qkv"]
    starts = problem["query_start_loc"].tolist()
    return [tuple(x[:, :, first:stop].contiguous() for x in whole) for first, stop in pairwise(starts)]


def _torch_sdpa(problem: dict) -> Callable:
    import torch

    requests, scale = _requests(problem), problem["scale"]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: [attend(q, k, v, is_causal=True, scale=scale) for q, k, v in requests]


def _torch_prefill(problem: dict) -> Callable:
    import torch

    width, scale = problem["v"].shape[2], problem["scale"]
    requests = [(q, k.transpose(2, 3), v[..., :width].contiguous()) for q, k, v in _requests(problem)]
    longest = max(q.shape[2] for q, _, _ in requests)
    unseen = torch.ones(longest, longest, dtype=torch.bool).triu(1)

    def attend(q, k, v):
        hidden = unseen[: q.shape[2], : q.shape[2]]
        return torch.softmax((q @ k * scale).masked_fill_(hidden, -torch.inf), dim=-1) @ v

    return lambda: [attend(*request) for request in requests]


def _zentorch_sdpa(problem: dict) -> Callable:
    import torch
    import zentorch  # noqa: F401 # registers the operation

    requests, scale = _requests(problem), problem["scale"]
    attend = torch.ops.zentorch.zentorch_sdpa
    return lambda: [attend(q, k, v, 0.0, True, scale=scale)[0] for q, k, v in requests]


def _torch_decode(problem: dict) -> Callable:
    import torch

    kv_c, k_pe, starts = numba_mla.gather_cache(problem["kv_cache"], problem["block_table"], problem["seq_lens"])
    rows = to_torch(np.concatenate([kv_c, k_pe], axis=1).reshape(len(starts) - 1, -1, problem["q"].shape[2]))
    keys, values = rows.transpose(1, 2), rows[..., : kv_c.shape[1]]
    q, scale = to_torch(problem["q"]), problem["scale"]
    return lambda: torch.softmax(q @ keys * scale, dim=-1) @ values


def _torch_bmm(problem: dict) -> Callable:
    import torch

    a, w = to_torch(problem["a"]), to_torch(problem["w"]).transpose(1, 2)
    turn = cycle([w, *(w.clone() for _ in range(problem["num_copies"] - 1))])
    return lambda: torch.bmm(a, next(turn))


PEERS = {
    "decode": [Peer("torch matmul + softmax", "torch", SCORES_ROUNDED, _torch_decode)],
    "prefill": [
        Peer("zentorch SDPA", "zentorch", OUTPUT_ROUNDED, _zentorch_sdpa),
        Peer("torch SDPA", "torch", OUTPUT_ROUNDED, _torch_sdpa),
        Peer("torch matmul + softmax", "torch", SCORES_ROUNDED, _torch_prefill),
    ],
    "bmm": [Peer("torch bmm", "torch", OUTPUT_ROUNDED, _torch_bmm)],
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
    calls = [peer.prepare(case.problem) for peer in peers]
    out = case.outputs[0]
    differences = [difference(out, rows_of(call(), out.shape[-1])) for call in calls]
    sleep(QUIET_S)
    ours, *others = take_turns([case.call, *calls], rounds, yardstick)
    found = [
        {"peer": peer.name, "difference": apart, "tolerance": peer.tolerance, **summary(times),
         "gflops": case.flops / times.median * 1e-9, "speed": times.median / ours.median}
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
    print(
        f"  {peer['peer']:36}            {peer['median_us']:9.1f} us  best {peer['best_us']:9.1f}  "
        f"{peer['gflops']:6.1f} GF/s  numba_mla is {peer['speed']:.2f} x as fast  "
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
