"""All questions: ``questions.py OUT [NAME…]`` under stock Lightning, or under ``python -m torch_compat``."""

import about_bars  # noqa: F401
import about_callbacks  # noqa: F401
import about_cli  # noqa: F401
import about_fabric  # noqa: F401
import about_loggers  # noqa: F401
import about_messages  # noqa: F401
import about_model_utilities  # noqa: F401
import about_modules  # noqa: F401
import about_pruning  # noqa: F401
import about_runs  # noqa: F401
import about_stand_ins  # noqa: F401
import about_trainer  # noqa: F401
import about_utilities  # noqa: F401
from answering import main

if __name__ == "__main__":
    main()
