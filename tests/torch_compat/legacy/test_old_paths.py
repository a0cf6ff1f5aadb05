"""Import paths of every era, as scripts use them; in a process of its own, since they are aliases."""

from __future__ import annotations

import os

from tests import warm

SCRIPT = """
import torch_compat
torch_compat.install()
import lightning.pytorch, lightning.fabric.strategies, pytorch_lightning as pl
from pytorch_lightning.plugins.training_type import TrainingTypePlugin, DDPPlugin
from pytorch_lightning.plugins.training_type.ddp import DDPPlugin as by_file
from pytorch_lightning.plugins.training_type.training_type_plugin import TrainingTypePlugin as base
from pytorch_lightning.plugins import DDPShardedPlugin, NativeMixedPrecisionPlugin, PrecisionPlugin, SingleDevicePlugin
from pytorch_lightning.plugins import TrainingTypePlugin as from_plugins
from pytorch_lightning.plugins.precision.precision_plugin import PrecisionPlugin as precision
from pytorch_lightning.plugins.environments import ClusterEnvironment, LightningEnvironment
from pytorch_lightning.plugins.io import CheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies import DDPSpawnStrategy, DDPStrategy
from pytorch_lightning.strategies.ddp_spawn import DDPSpawnStrategy as spawn_by_file
from pytorch_lightning.accelerators import Accelerator, CPUAccelerator, GPUAccelerator, TPUAccelerator
from pytorch_lightning.accelerators.accelerator import Accelerator as accelerator_by_file
from pytorch_lightning.accelerators.gpu import CUDAAccelerator
from pytorch_lightning.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from pytorch_lightning.core.lightning import LightningModule
from pytorch_lightning.core import LightningModule as from_core, LightningDataModule
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from pytorch_lightning.callbacks.base import Callback as callback_by_file
from pytorch_lightning.callbacks.early_stopping import EarlyStopping as early
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.fabric.strategies import Strategy as FabricStrategy, DDPStrategy as FabricDDP, ParallelStrategy as FabricParallel
from lightning.fabric.strategies.ddp import DDPStrategy as ddp_by_file
from lightning.fabric.strategies.fsdp import FSDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy as parallel_by_file
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy as of_the_trainer
from pytorch_lightning.utilities.distributed import rank_zero_only, rank_zero_warn
assert FabricDDP is ddp_by_file and FabricParallel is parallel_by_file and issubclass(FabricDDP, FabricParallel)
assert rank_zero_only is pl.utilities.rank_zero_only
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as of_fabric
from lightning.fabric.plugins.environments import ClusterEnvironment as environment_of_fabric
from lightning.pytorch.plugins.precision.amp import MixedPrecision
from lightning.fabric.accelerators import CPUAccelerator as cpu_of_fabric
assert of_fabric is CheckpointIO and environment_of_fabric is ClusterEnvironment and cpu_of_fabric is CPUAccelerator

assert TrainingTypePlugin is base is from_plugins and DDPPlugin is by_file and precision is PrecisionPlugin
assert DDPSpawnStrategy is spawn_by_file and "ddp_spawn" in StrategyRegistry and Accelerator is accelerator_by_file
assert pl.LightningModule is LightningModule is from_core and issubclass(LightningModule, lightning.pytorch.LightningModule)
assert issubclass(LightningModule, ModelHooks) and pl.Callback is Callback is callback_by_file
assert issubclass(Callback, lightning.pytorch.Callback) and EarlyStopping is early is lightning.pytorch.callbacks.EarlyStopping
assert pl.Trainer is lightning.pytorch.Trainer and FabricStrategy is not Strategy and GPUAccelerator is CUDAAccelerator

for path, reason in {
    "lightning.pytorch.plugins.training_type": "is not offered",
    "lightning.pytorch.core.lightning": "is not offered",
}.items():
    try:
        __import__(path)
    except ImportError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(path)
for path, name in (
    ("pytorch_lightning.plugins", "DataParallelPlugin"),
    ("pytorch_lightning.plugins.training_type.ddp_spawn", "DDPSpawnPlugin"),
    ("pytorch_lightning.plugins.training_type.horovod", "HorovodPlugin"),
    ("lightning.pytorch.strategies", "DeepSpeedStrategy"),
):
    refused = getattr(__import__(path, fromlist=[name]), name)  # an import does not fail
    try:
        refused()
    except Exception as error:
        assert "is not offered on an XLA mesh: " in str(error), error
    else:
        raise AssertionError(name)
"""


def test_old_and_new_paths_give_one_set_of_classes() -> None:
    done = warm.run(warm.OURS, ["-c", SCRIPT], env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr
