"""The module that TensorBoard imports when it starts: if it failed, TensorBoard wouldn't start."""

from __future__ import annotations

import logging
from typing import Any

from tensorboard.plugins import base_plugin

logger = logging.getLogger(__name__)


class GpurunLoader(base_plugin.TBLoader):  # type: ignore[misc]
    """Makes the plugin, importing all that it needs only then.

    TensorBoard catches what fails in `load`, not what fails while it imports an entry point. Source:
    tensorboard/default.py, `get_dynamic_plugins`; backend/application.py, `TensorBoardWSGIApp`.
    """

    def load(self, context: Any) -> base_plugin.TBPlugin | None:
        """The plugin; `None`, and a line in TensorBoard's log, where it can't be had."""
        try:
            from gpurun.launcher.tensorboard_plugin.plugin import GpurunPlugin

            return GpurunPlugin(context)
        except (Exception, SystemExit) as error:
            logger.warning("no tab GPURUN: %s: %s", type(error).__name__, error)
            return None
