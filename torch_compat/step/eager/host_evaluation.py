"""Steps of evaluation that cannot be compiled, run on the host as hooks are, while training is compiled."""

from __future__ import annotations

from torch_compat.run.report import ExecutorLog
from torch_compat.run.states import TrainerFn
from torch_compat.step.eager.device import eager_device
from torch_compat.step.eager.eager import EagerSteps
from torch_compat.step.eager.fallback import executor_choice
from torch_compat.step.run_context import RunContext
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.bridge.errors import BridgeError
from xlatrain.cluster.distributed import world


class HostEvaluation:
    """The steps of evaluation that run on the host, with the values on the mesh.

    Args:
        run: the run.

    Attributes:
        steps: the runner of each, by the name of the method.
    """

    def __init__(self, run: RunContext) -> None:
        self.steps: dict[str, EagerSteps] = {}
        self._run = run

    def takes(self, name: str, error: Exception, log: ExecutorLog) -> bool:
        """Whether the step of this name runs on the host from now on. Nothing of it has happened yet.

        Args:
            name: of the method.
            error: why it cannot be compiled, if it is that.
            log: of the compiled steps, which is told.
        """
        run = self._run
        if not isinstance(error, BridgeError) or not error.recoverable or executor_choice() != "auto":
            return False
        if run.state.fn != TrainerFn.FITTING or world().process_count > 1 or eager_device(run.strategy.mesh).type != "cpu":
            return False
        if (model := run.strategy.placed) is None or not model.fits_host():
            return False
        rank_zero_warn(
            f"{name} runs eagerly on the host, with the weights of the mesh; training_step does not, as long as it can be "
            f"compiled. {error}"
        )
        self.steps[name] = EagerSteps(run.precision_plugin, str(error))
        log.on_host[name] = str(error)
        return True
