"""``barnraise worker``: a verifier or the learner of a coordinator that runs on another machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from barnraise.tui.console import examples

EXAMPLES = examples("worker verifier --gpu 1", "worker learner --cache /fast/barnraise")


def worker(
    kind: str = typer.Argument(..., metavar="verifier|learner", help="Added by the coordinator."),
    cache: Path = typer.Option(
        Path("~/.cache/barnraise/worker"),
        "--cache",
        metavar="DIR",
        help="Where weights are kept that the coordinator sends; may be deleted while no worker runs.",
    ),
    threads: int = typer.Option(
        0,
        "--threads",
        metavar="N",
        min=0,
        max=1024,
        help="Threads. [default: this machine's cores]",
        show_default=False,
    ),
    gpu: str = typer.Option("", "--gpu", metavar="0", help="The GPU (or 0,1) to use. [default: all]"),
) -> None:
    """Work for a coordinator on another machine.

    Over standard input and output. The coordinator starts this there, with --verifier-at 'ssh gpu-box
    barnraise worker --gpu 1' or --learner-at, and adds the last word; it is not for the keyboard.
    """
    from barnraise.coordinator.remote import release
    from barnraise.coordinator.remote_files import CACHES, FileHost

    if kind not in CACHES:
        raise typer.BadParameter(f"one of {', '.join(CACHES)}", param_hint="verifier|learner")
    if sys.stdin.isatty():
        raise typer.BadParameter(
            "a coordinator speaks to it, not a person: give this command to 'barnraise coordinator run "
            f"--{kind}-at'"
        )
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    host = FileHost(cache.expanduser().absolute(), kind, release())
    threads = (
        threads or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if kind == "verifier":
        from barnraise.coordinator.verifier_child import main

        main(host, threads)
    else:
        from barnraise.coordinator.learner_child import main as learn

        learn(host, threads)
