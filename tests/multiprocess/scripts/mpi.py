"""A run whose processes learn of each other from MPI alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.torch_compat.strategies.small import Net, loader, trainer, weights
from torch_compat.plugins.environments import MPIEnvironment

environment = MPIEnvironment()
one = trainer(plugins=[environment], devices=2, num_nodes=2)
one.fit(net := Net(), loader(batch_size=4))
ranks = [environment.global_rank(), environment.local_rank(), environment.node_rank(), one.world_size]
found = {"ranks": ranks, "detected": MPIEnvironment.detect(), "weights": weights(net).tolist()}
Path(sys.argv[1], f"{environment.global_rank()}.json").write_text(json.dumps(found))
