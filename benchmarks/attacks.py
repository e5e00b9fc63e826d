"""Every attack of ``tests/attacks``, performed many times: how soon each is caught, and what passes.

    python -m benchmarks.attacks [--json] [--model demo|smollm2] [--tries 20] [--only NAME ...]

Real engines, real proofs, the real verifier; one thread, CPU. Per attack: ``caught`` of
``of`` single submissions under the thresholds that ``run init`` writes, ``median``
submissions until caught (null: never), the checks that found it, ``credit`` that an
attempt earned on average (millions of useful operations); the same as ``exact_...``
under thresholds for engines that all compute in float32, where the first missed any (demo model).
``honest`` rows must show 0 caught.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from attacks import suite
from attacks.registry import ATTACKS, Attack

PATIENCE = 100
# On a CPU a submission of SmolLM2 takes ten seconds: the attacks that its size makes a difference to.
ON_SMOLLM2 = (
    "bfloat16-engine",
    "smaller-model",
    "smaller-model-proven",
    "int8-weights",
    "int8-weights-proven",
    "int8-weights-in-bfloat16",
    "int8-weights-in-bfloat16-proven",
    "int4-weights",
    "int4-weights-proven",
    "int4-weights-in-bfloat16-proven",
    "half-precision",
    "half-precision-proven",
    "previous-version",
    "previous-version-proven",
    "fine-tuned-copy",
    "fine-tuned-copy-proven",
    "other-temperature",
    "temperature-slightly-lower",
    "other-top-p",
    "greedy-tokens",
    "own-noise",
    "one-token-edited",
    "guessed-constant",
    "tokens-copied-and-proven",
)


def attacks(
    model: str = "demo",
    tries: int = 20,
    only: Sequence[str] = (),
    patience: int = PATIENCE,
    rows: dict[str, dict[str, Any]] | None = None,
    save: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Perform them and return one row per attack, by name; see the module's description.

    ``rows``: where to put them; attacks in it already are left out. ``save`` is called after each.
    """
    names = only or (list(ATTACKS) if model == "demo" else ON_SMOLLM2)
    rows = {} if rows is None else rows
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        stages = suite.Stages(Path(folder), model)
        for name in names:
            if name not in rows:
                rows[name] = _row(stages, ATTACKS[name], tries, patience, model == "demo")
                save()
    return rows


def _row(stages: suite.Stages, attack: Attack, tries: int, patience: int, exact_too: bool) -> dict[str, Any]:
    stage = stages[attack.precision]
    stage.patience = patience
    tries = 1 if "patient" in attack.name else tries
    began = time.perf_counter()
    row = {"what": attack.what, "honest": attack.honest, **suite.perform(stage, attack, tries)}
    if exact_too and row["caught"] < tries and attack.precision == "float32" and not attack.honest:
        exact = suite.perform(stages["exact"], attack, tries)
        row |= {f"exact_{key}": exact[key] for key in ("caught", "of", "median")}
    row["limits"] = attack.limits if row["caught"] < tries else ""
    print(
        f"{attack.name:40s} {row['caught']:3d} of {row['of']:3d}  exact {row.get('exact_caught', '-')!s:3s} "
        f"{row['checks']}  {time.perf_counter() - began:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    return row


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", choices=("demo", "smollm2"), default="demo")
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument(
        "--patience", type=int, default=PATIENCE, help="honest submissions of a patient cheat"
    )
    parser.add_argument("--only", nargs="*", default=(), choices=sorted(ATTACKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = attacks(options.model, options.tries, options.only, options.patience)
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
