"""The command line: ``numba-mla run``, ``numba-mla tune`` and ``numba-mla info``."""

from __future__ import annotations

import json
import math
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import numba_mla

from .checkpoint import Checkpoint, read_attention, save_random_checkpoint
from .config import MLAConfig
from .isa import Tiling
from .lab.progress import shown
from .lab.search import Tuned, search
from .lab.timing import Peaks, Times
from .lab.workload import Workload
from .layer import MLALayer
from .quant import BlockScaled, dequantise
from .trial import (
    HiddenStates,
    Phase,
    TrialReport,
    load_hidden_states,
    random_hidden_states,
    run_trial,
    save_trial,
)

BAD_INPUT = 2
INTERRUPTED = 130
# What typer raises for any wrong option; it exports only this subclass of it.
UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class BadInputError(Exception):
    """Something that the user can put right; the message says what."""


def main() -> None:
    """Run the command line; what the user can put right is one line on stderr and exit code 2."""
    with remembering_interrupts() as interrupted:
        try:
            exit_code = app(standalone_mode=False, obj=interrupted)
        except (KeyboardInterrupt, typer.Abort):
            exit_code = INTERRUPTED
        except Exception as error:
            if interrupted.is_set():
                exit_code = INTERRUPTED
            elif isinstance(error, BadInputError | UsageError):
                message = error.format_message() if isinstance(error, UsageError) else str(error)
                print(f"numba-mla: {' '.join(message.split())}", file=sys.stderr)
                exit_code = BAD_INPUT
            else:
                raise
    sys.exit(exit_code)


@contextmanager
def remembering_interrupts() -> Iterator[Event]:
    """Let Ctrl-C raise KeyboardInterrupt as ever, and tell whether it did.

    One that lands in a callback from LLVM is lost there: Python prints it as unraisable and goes on, and a later
    step may fail because the callback has not done its work.
    """
    interrupted = Event()
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook

    def interrupt(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        sys.unraisablehook = lambda lost: None
        raise KeyboardInterrupt

    if before[0] is signal.default_int_handler:  # a background job ignores it
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before[0])
        sys.unraisablehook = before[1]


@app.callback(invoke_without_command=True)
def commands(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Multi-head Latent Attention on the CPU."""
    if version:
        print(numba_mla.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what was found on this machine: instruction set, threads, versions, folders."""
    with user_can_put_right():
        found = numba_mla.show_config()
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        Console().print(_table("", [(name, _text(value)) for name, value in found.items()]))


@app.command()
def run(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face checkpoint folder; a random one of DeepSeek-V2-Lite's shape if not given."),
    ] = None,
    layer: Annotated[int, typer.Option(min=0, help="Which attention layer of the checkpoint.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Requests. Unused with --npz.")] = 4,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt. Unused with --npz.")] = 256,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to decode per request. Unused with --npz.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use; all if not given.")] = None,
    npz: Annotated[
        Path | None,
        typer.Option(
            help="Hidden states to use: prompts (T, hidden_size), query_start_loc (B+1,) from 0 to T, and if "
            "wanted continuation (C, hidden_size) of request 0, tokens (N, B, hidden_size) to decode."
        ),
    ] = None,
    npz_out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the inputs, as --npz reads them, and prompts_out, continuation_out and tokens_out."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run one attention layer on a paged cache and check every result against the reference.

    Prefills a ragged batch of prompts, continues one of them, decodes for all. The exit code is 0 if every
    result is within its tolerance, 1 if not, 2 if the input cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="numba-mla-") as scratch:
        with user_can_put_right():
            if npz_out is not None:
                check_new_file("--npz-out", npz_out)
            attention, weights = load_layer(checkpoint, layer, Path(scratch), seed)
            inputs = make_inputs(npz, attention, batch, prompt_len, tokens, seed)
            thread_limit = nullcontext() if threads is None else numba_mla.threads(threads)
        with thread_limit:
            report = run_with_progress(attention, weights, inputs, context.obj)
            machine = numba_mla.show_config()
    if npz_out is not None:
        with user_can_put_right():
            save_trial(npz_out, inputs, report.outputs)
    if as_json:
        print(json.dumps(summary(report, attention, machine), indent=2))
    else:
        print_report(report, attention, machine)
    raise typer.Exit(0 if report.within_tolerance else 1)


@app.command()
def tune(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="decode, extend or prefill.", show_default=False)],
    num_requests: Annotated[int, typer.Option(min=1, help="Requests.")] = 1,
    num_heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 128,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of each request, the new ones included.")] = 4096,
    num_new: Annotated[
        int | None, typer.Option(min=1, help="New tokens of each request, of extend; 64 if not given.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Rows of a page. Unused in prefill.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of queries and cache: float32, float16 or bfloat16.")] = "bfloat16",
    isa: Annotated[str | None, typer.Option(help="Instruction set; the best if not given.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use; all if not given.")] = None,
    budget: Annotated[float, typer.Option(min=0.01, help="Seconds to search.")] = 30.0,
    change_bits: Annotated[
        bool, typer.Option("--change-bits", help="Vary key_tile and kv_split too, which change bits of results.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(help="Where to write the tiling found, as numba_mla.Tiling.load reads it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Search for the tiling that is fastest on one shape; each is checked before it is timed.

    Nothing is applied: hand the tiling to the operation. Ctrl-C ends the search: what was found so far is printed
    and saved. The exit code is 0, or 130 after Ctrl-C, or 2 if the input cannot be used.
    """
    with user_can_put_right():
        if save is not None:
            check_new_file("--save", save)
        workload = Workload(op, num_requests=num_requests, num_heads=num_heads, seq_len=seq_len, num_new=num_new,
                            block_size=block_size, dtype=dtype, isa=isa)  # fmt: skip
        thread_limit = nullcontext() if threads is None else numba_mla.threads(threads)
        with thread_limit:
            found = search_with_progress(workload, budget, change_bits, context.obj)
            peak = Peaks().gflops(str(workload.isa))
            machine = numba_mla.show_config()
        if save is not None:
            found.tiling.save(save)
    report = summary_of_search(found, workload, peak, machine)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_search(report, found.tiling, save)
    raise typer.Exit(INTERRUPTED if found.interrupted else 0)


@contextmanager
def user_can_put_right() -> Iterator[None]:
    """Report errors of the code within as the user's: it reads files, options and the machine's settings."""
    try:
        yield
    except (ValueError, TypeError, OSError, MemoryError) as error:
        raise BadInputError(str(error) or type(error).__name__) from error


def check_new_file(option: str, path: Path) -> None:
    """Refuse, before any work, a place where no file can be."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{option}: expected a file in a folder that exists, got {path}")


def load_layer(folder: Path | None, layer: int, scratch: Path, seed: int) -> tuple[MLALayer, dict[str, np.ndarray]]:
    """Return a layer and what its weights mean: a checkpoint's, or without a folder random ones.

    The layer keeps fp8 weights as they are; the check of its results starts from the numbers they stand for.
    """
    if folder is None:
        if layer != 0:
            raise ValueError(f"--layer: a random checkpoint has layer 0 alone, got {layer}")
        folder = scratch
        save_random_checkpoint(folder, seed=seed)
    source = Checkpoint(folder)
    config = MLAConfig.from_dict(source.config)
    weights = read_attention(source, config, layer)
    dequantised = {name: dequantise(w) if isinstance(w, BlockScaled) else w for name, w in weights.items()}
    return MLALayer(config, weights), dequantised


def make_inputs(npz: Path | None, layer: MLALayer, batch: int, prompt_len: int, tokens: int, seed: int) -> HiddenStates:
    """Read the hidden states, or draw them."""
    if npz is not None:
        return load_hidden_states(npz, layer.config.hidden_size, layer.dtype)
    return random_hidden_states(
        layer.config.hidden_size,
        layer.dtype,
        num_requests=batch,
        prompt_len=prompt_len,
        num_tokens=tokens,
        seed=seed,
    )


def run_with_progress(
    layer: MLALayer, weights: Mapping[str, np.ndarray], inputs: HiddenStates, interrupted: Event
) -> TrialReport:
    """Run the trial under a progress bar on stderr, which leaves stdout to the result."""

    def advance(num_tokens: int) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt  # again: the first one was lost
        progress.advance(bar, num_tokens)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("tokens", total=sum(inputs.seq_lens))
        return run_trial(layer, weights, inputs, on_tokens=advance)


def summary(report: TrialReport, layer: MLALayer, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a report, ready for JSON."""

    def speed(phase: Phase) -> dict[str, float]:
        return asdict(phase) | {"tokens_per_s": phase.tokens_per_s, "gflops": phase.gflops}

    return {
        "version": numba_mla.__version__,
        "isa": machine["isa"],
        "threads": machine["threads"],
        "threading_layer": machine["threading_layer"],
        "dtype": str(layer.dtype),
        "warm_up_s": report.warm_up_s,
        "prefill": speed(report.prefill),
        "decode": speed(report.decode),
        "cache_bytes": report.cache_bytes,
        "materialised_bytes": report.materialised_bytes,
        # JSON has no infinity: null is an error without a bound.
        "errors": {
            error.stage: {
                "largest_error": error.largest_error if math.isfinite(error.largest_error) else None,
                "of_tolerance": error.of_tolerance if math.isfinite(error.of_tolerance) else None,
            }
            for error in report.errors
        },
        "within_tolerance": report.within_tolerance,
    }


def print_report(report: TrialReport, layer: MLALayer, machine: Mapping[str, Any]) -> None:
    """Print a report as two tables: the run, and each stage's error."""
    less = report.materialised_bytes / report.cache_bytes
    rows = [
        ("instruction set", machine["isa"]),
        ("threads", f"{machine['threads']} ({machine['threading_layer']})"),
        ("dtype", str(layer.dtype)),
        ("first run, compiling included", f"{report.warm_up_s:.2f} s"),
        *((name, _speed(phase)) for name, phase in (("prefill", report.prefill), ("decode", report.decode))),
        ("latent cache", f"{report.cache_bytes:,} bytes"),
        ("keys and values per head", f"{report.materialised_bytes:,} bytes ({less:.1f} times as many)"),
    ]
    console = Console()
    console.print(_table("one layer", rows))
    errors = Table("stage", title="against the float64 reference", title_justify="left")
    errors.add_column("largest error", justify="right")
    errors.add_column("of its tolerance", justify="right")
    for error in report.errors:
        errors.add_row(error.stage, f"{error.largest_error:.2e}", f"{error.of_tolerance:.2g}")
    console.print(errors)
    worst = max(report.errors, key=lambda error: error.of_tolerance)
    verdict = "within tolerance" if report.within_tolerance else "NOT within tolerance"
    console.print(f"{verdict}: the largest error is {worst.of_tolerance:.2g} of its tolerance ({worst.stage})")


def search_with_progress(workload: Workload, budget_s: float, change_bits: bool, interrupted: Event) -> Tuned:
    """Search under a progress bar on stderr."""

    def advance(done: float, note: str) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt  # again: the first one was lost
        tell(done, note)

    with shown(None) as tell:
        return search(workload, budget_s=budget_s, change_bits=change_bits, progress=advance)


def summary_of_search(found: Tuned, workload: Workload, peak: float, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found, ready for JSON."""

    def speed(times: Times) -> dict[str, float]:
        gflops = workload.flops / times.median * 1e-9
        return {"median_us": times.median * 1e6, "gflops": gflops, "fraction": gflops / peak}

    return {
        "version": numba_mla.__version__,
        "workload": asdict(workload) | {"threads": machine["threads"]},
        "peak_gflops": peak,
        "default": speed(found.default),
        "best": speed(found.best),
        "speed": found.speed,
        "tiling": {name: value for name, value in asdict(found.tiling).items() if value is not None},
        "num_tried": found.num_tried,
        "interrupted": found.interrupted,
    }


def print_search(report: Mapping[str, Any], tiling: Tiling, saved: Path | None) -> None:
    """Print what was found, and how it is used."""
    workload = dict(report["workload"])
    op = workload.pop("op")
    table = Table("tiling")
    for heading in ("time of a call", "of the peak", "speed"):
        table.add_column(heading, justify="right")
    for name, speed in (("default", 1.0), ("best", report["speed"])):
        row = report[name]
        table.add_row(name, f"{row['median_us']:,.1f} us", f"{row['fraction']:.3f}", f"{speed:.3f}")
    console = Console()
    console.print(f"{op}: {', '.join(f'{name} {value}' for name, value in workload.items())}", highlight=False)
    console.print(table)
    ended = ", ended by Ctrl-C" if report["interrupted"] else ""
    console.print(f"{report['num_tried']} tilings tried{ended}")
    if tiling == Tiling():
        console.print("none is faster than the default by more than 1 %")
    else:
        print(f"{tiling!r}")
        given = "TILING" if saved is None else f"numba_mla.Tiling.load({str(saved)!r})"
        print(f"use it: numba_mla.{op}(..., tiling={given})")


def _speed(phase: Phase) -> str:
    if not phase.num_tokens:
        return "no tokens"
    return f"{phase.num_tokens} tokens, {phase.tokens_per_s:,.0f} tokens/s, {phase.gflops:.1f} GFLOP/s"


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title or None, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{name} {_text(item)}" for name, item in value.items())
    return str(value)
