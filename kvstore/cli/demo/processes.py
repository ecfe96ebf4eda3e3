"""Two engine processes, one after the other, over the daemon of a node: the second finds what the
first has stored, although that has ended meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

import kvstore
from kvstore.cli.demo.parameters import BLOCK_TOKENS
from kvstore.cli.demo.runs import STORE_EMPTY, UserSide, make_model, make_text
from kvstore.cli.node import running_daemon
from kvstore.connectors.transformers import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from kvstore.cli.demo.parameters import Parameters

PROCESSES = 2


class ProcessRun(NamedTuple):
    """One engine process: it made its model, answered the prompt once, and ended."""

    pid: int
    ttft_seconds: float
    loaded_tokens: int
    prompt_tokens: int
    tokens: list[int]


def measure_processes(parameters: Parameters, expected: list[int]) -> dict[str, Any]:
    """What each process saw, and `findings` where a token is not the engine's own, `expected`."""
    context = multiprocessing.get_context("spawn")  # each loads and makes everything itself
    runs: list[ProcessRun] = []
    with running_daemon(parameters.capacity_bytes) as node:
        for number in range(PROCESSES):
            ours, theirs = context.Pipe()
            options = (theirs, node.socket_path, parameters, torch.get_num_threads())
            process = context.Process(target=_run_engine, args=options)
            process.start()
            theirs.close()
            try:
                runs.append(ours.recv())
            except EOFError:
                return {"runs": [], "findings": [f"process {number + 1} ended without an answer"]}
            finally:
                process.join()
    findings = [
        f"a token of process {number} differs"
        for number, run in enumerate(runs, 1)
        if run.tokens != expected
    ]
    if not runs[-1].loaded_tokens and runs[-1].prompt_tokens > BLOCK_TOKENS:
        findings.append("the second process found nothing of the first")
    return {
        "runs": [run._asdict() for run in runs],
        "speedup": runs[0].ttft_seconds / runs[-1].ttft_seconds,
        "findings": findings,
    }


def _run_engine(end: Connection, path: Path, parameters: Parameters, threads: int) -> None:
    """A process of its own: a model, a connection to the daemon, one answer."""
    be_quiet: Callable[[], None] = transformers.logging.set_verbosity_error
    be_quiet()
    torch.set_num_threads(threads)
    model, text = make_model(parameters), make_text(parameters)
    model.generate(text[:, :32], do_sample=False, max_new_tokens=2)
    with kvstore.connect(path, name="demo") as store:
        cache = PrefixCache(model, store, block_tokens=BLOCK_TOKENS)
        user = UserSide(model, cache, parameters.new_tokens, lambda *_: None)
        first = text[:, : parameters.prompt_tokens]
        run = user.run(1, STORE_EMPTY, first)
    found = (run.ttft_seconds, run.loaded_tokens, run.prompt_tokens, run.tokens)
    end.send(ProcessRun(os.getpid(), *found))
