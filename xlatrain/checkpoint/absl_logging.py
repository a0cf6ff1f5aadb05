"""Importing this leaves ``logging``'s root logger to the application.

Orbax logs with absl while it is imported and with every save, and absl gives the root logger a handler before its first record
(``logging.basicConfig()``): an application's own ``basicConfig`` would do nothing afterwards, and records of libraries that have
a handler of their own would come twice. Here absl's records go where the application sends them, like any other library's;
``absl.app`` and ``absl.logging.use_absl_handler`` work as before.
"""

from __future__ import annotations

from typing import Any

from absl import logging as absl_logging
from absl.logging import converter


@absl_logging.skip_log_prefix
def log(level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
    """``absl.logging.log`` that configures nothing."""
    absl_logging.get_absl_logger().log(converter.absl_to_standard(level), msg, *args, **kwargs)


absl_logging.log = log
