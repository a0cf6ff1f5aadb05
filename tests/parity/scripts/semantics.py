"""A step's Python besides computing a loss: side effects, counters, host values, hooks, mode changes, odd results.

A compiled step runs its Python once, so each of these is where it could silently differ from stock. The cases are in the files
beside this one, by topic; one process runs them all.
"""

import semantics_batches  # noqa: F401
import semantics_counters  # noqa: F401
import semantics_data  # noqa: F401
import semantics_effects  # noqa: F401
import semantics_hooks  # noqa: F401
import semantics_kept  # noqa: F401
import semantics_views  # noqa: F401
from recording import main

if __name__ == "__main__":
    main()
