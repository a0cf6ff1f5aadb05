"""Old import names of the facade's modules, which class paths in checkpoints have: for one release they give the new modules."""

from __future__ import annotations

from xlatrain.moved import below

_FACADE, _STEP = "torch_compat", "torch_compat.step"
_FUNCTIONAL, _EXECUTION = "torch_compat.functional", "torch_compat.trainer.execution"

MODULES: dict[str, str] = {
    _FUNCTIONAL: _STEP,
    **below(_FUNCTIONAL, f"{_STEP}.capture", "captured_step batch_texts loss module_call step_capture step_trace"),
    f"{_FUNCTIONAL}.step": f"{_STEP}.capture.user_steps",
    **below(_FUNCTIONAL, f"{_STEP}.effects", "effects recorded_object"),
    f"{_FUNCTIONAL}.effect_recorder": f"{_STEP}.effects.recorder",
    f"{_FUNCTIONAL}.recording": f"{_STEP}.effects.logged",
    f"{_FUNCTIONAL}.places": f"{_STEP}.host.slots",
    f"{_FUNCTIONAL}.reads": f"{_STEP}.guards",
    f"{_FUNCTIONAL}.reads.guards": f"{_STEP}.guards.attribute_guards",
    f"{_FUNCTIONAL}.reads.held_objects": f"{_STEP}.guards.identity_check",
    f"{_FUNCTIONAL}.reads.outside_view": f"{_STEP}.guards.namespace_snapshot",
    f"{_FUNCTIONAL}.reads.surroundings": f"{_STEP}.guards.global_guards",
    f"{_FUNCTIONAL}.reads.watched": f"{_STEP}.guards.fingerprints",
    **below(_FUNCTIONAL, f"{_STEP}.guards", "generators mocks"),
    f"{_FUNCTIONAL}.consumed": f"{_STEP}.guards.one_shot_objects",
    f"{_FUNCTIONAL}.host.deferred": f"{_STEP}.host.host_future",
    f"{_FUNCTIONAL}.host.pending": f"{_STEP}.host.callback_queue",
    f"{_FUNCTIONAL}.host.plan": f"{_STEP}.host.host_actions",
    f"{_FUNCTIONAL}.placing": f"{_STEP}.materialize",
    f"{_FUNCTIONAL}.one_world": "torch_compat.utilities.host_collectives",
    f"{_FUNCTIONAL}.averaged_weights": "torch_compat.callbacks.averaged_weights",
    f"{_FUNCTIONAL}.batches": "torch_compat.run.batches",
    f"{_FUNCTIONAL}.loss_scaling": "torch_compat.plugins.loss_scaling",
    f"{_FUNCTIONAL}.array_tensors": "torch_compat.checkpoint.array_tensors",
    f"{_FUNCTIONAL}.host_arrays": "torch_compat.utilities.host_arrays",
    _EXECUTION: _STEP,
    f"{_EXECUTION}.captures": f"{_STEP}.capture.session",
    f"{_EXECUTION}.compiled": f"{_STEP}.mesh_step_runner",
    f"{_EXECUTION}.executor": f"{_STEP}.dispatcher",
    f"{_EXECUTION}.variant": f"{_STEP}.cached_program",
    f"{_EXECUTION}.variants": f"{_STEP}.program_cache",
    **below(_EXECUTION, f"{_STEP}.update", "gradient_readers manual offload several_optimizers strategy_hooks user_step"),
    f"{_EXECUTION}.optimization": f"{_STEP}.update.automatic",
    f"{_EXECUTION}.compiled_optimization": f"{_STEP}.update.compiled",
    **below(_EXECUTION, f"{_STEP}.eager", "eager fallback whole_batch"),
    f"{_EXECUTION}.eager_device": f"{_STEP}.eager.device",
    f"{_EXECUTION}.on_device": "torch_compat.device_backends.dispatcher",
    **below(_FACADE, "torch_compat.checkpoint", "host_state stock_loops torch_load"),
    "torch_compat.checkpoint_formats": "torch_compat.cli.checkpoint_formats",
    "torch_compat.checkpointing": "torch_compat.checkpoint.checkpoint_dict",
    **below(_FACADE, "torch_compat.stock_names", "aliases namespace child_processes removed_arguments removed_names"),
    "torch_compat.refused": "torch_compat.utilities.refused",
    "torch_compat.legacy.signatures": "torch_compat.run.era_signatures",
    "torch_compat.loggers.hyperparameters": "torch_compat.utilities.hyperparameters",
    "torch_compat.strategies.collectives": "torch_compat.utilities.host_collectives",
    "torch_compat.trainer.call": "torch_compat.run.hook_calls",
    "torch_compat.trainer.schedulers": f"{_STEP}.update.schedulers",
    **below("torch_compat.trainer", "torch_compat.run", "profiling report states"),
    **below("torch_compat.utilities", "torch_compat.accelerators", "device_parser testing throughput"),
    **below("torch_compat.utilities", "torch_compat.trainer", "migration upgrade_checkpoint"),
}
"""Old module → new module, as :data:`xlatrain.moved.MODULES` has them."""
