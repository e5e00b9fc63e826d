"""``barnraise run``: the verbs about a run, but for serving it."""

from __future__ import annotations

import typer

from barnraise.tui.amend import EXAMPLES as AMEND_EXAMPLES
from barnraise.tui.amend import amend
from barnraise.tui.console import examples
from barnraise.tui.export_model import CARD_EXAMPLES, export_model, run_card
from barnraise.tui.export_model import EXAMPLES as EXPORT_EXAMPLES
from barnraise.tui.export_rollouts import CHECK_EXAMPLES as CHECK_ROLLOUTS
from barnraise.tui.export_rollouts import EXAMPLES as ROLLOUT_EXAMPLES
from barnraise.tui.export_rollouts import check_rollouts, export_rollouts
from barnraise.tui.init_run import EXAMPLES as INIT_EXAMPLES
from barnraise.tui.init_run import init
from barnraise.tui.run_file import CHECK_EXAMPLES, TEMPLATE_EXAMPLES, check, template
from barnraise.tui.run_filter import EXAMPLES as FILTER_EXAMPLES
from barnraise.tui.run_filter import filter_tasks

app = typer.Typer(
    help="Make, check and amend runs.", epilog=examples("run init ./my-run"), no_args_is_help=True
)


@app.callback()
def group() -> None:
    """Make runs."""


app.command("template", short_help="Print a run file with every key.", epilog=TEMPLATE_EXAMPLES)(template)
app.command("check", short_help="Check a run file; estimate what the run needs.", epilog=CHECK_EXAMPLES)(
    check
)
app.command("filter", short_help="Keep tasks of use, as a swarm measured them.", epilog=FILTER_EXAMPLES)(
    filter_tasks
)
app.command(
    "export-model", short_help="Write a version as a model folder, adapters merged.", epilog=EXPORT_EXAMPLES
)(export_model)
app.command(
    "export-rollouts", short_help="Write what volunteers drew as a dataset.", epilog=ROLLOUT_EXAMPLES
)(export_rollouts)
app.command("check-rollouts", short_help="Hold such a dataset against the ledger.", epilog=CHECK_ROLLOUTS)(
    check_rollouts
)
app.command("card", short_help="Write the run's card: data, curves, credits.", epilog=CARD_EXAMPLES)(run_card)
app.command("amend", short_help="Change settings of a run under way.", epilog=AMEND_EXAMPLES)(amend)
app.command("init", short_help="Make a run folder: model, task and settings.", epilog=INIT_EXAMPLES)(init)
