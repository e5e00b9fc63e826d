"""Python's cycle collector, in a process that holds much and must answer at once.

By default every object is looked at again whenever their number has grown by a quarter: with some
thousand sessions open that is a pause of a tenth of a second and more, now and then. Almost all garbage
here goes by reference counting, and what cycles there are die young.
"""

from __future__ import annotations

import gc

YOUNG, MIDDLE, OLD = 10_000, 20, 400  # allocations, then collections of the generation before


def calm_collector() -> None:
    """Leave alone what there is now, for good, and look at what becomes old much more seldom.

    For the coordinator's own process, once it has started: it changes the whole process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
