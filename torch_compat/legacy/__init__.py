"""Names and semantics of Lightning's eras 1.3 to 1.6, over today's strategies.

Importing any part of this package registers it (:mod:`torch_compat.run.eras`).
"""

from torch_compat.legacy import callback, era_hooks, module, strategy, training_type_plugin
from torch_compat.run import eras

eras.register(
    eras.Era(
        bases=(callback.Callback, module.LightningModule),
        module=module.LightningModule,
        training_type=training_type_plugin.TrainingTypePlugin,
        strategy=strategy.PluginStrategy,
        strategy_of=strategy.strategy_of_plugins,
        hooks=era_hooks.era_hooks,
        init_hooks=era_hooks.init_hooks,
    )
)
