"""The same scripts under stock Lightning and under ``torch_compat``: losses, logged values, hooks, counters, files and weights.

Stock runs on one device at batch size 16; ``torch_compat`` on one device at 16, and on eight at 2 each
(docs/design/0006-processes-and-data.md) where anything that the script is about depends on how many there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import pytest

from tests.parity.harness import (
    EIGHT_DEVICES,
    FLOAT32,
    FULLY_SHARDED,
    ONE_DEVICE,
    PROCESS_LIMIT_S,
    STOCK,
    STOCK_ON_FOUR_DEVICES,
    STOCK_ON_ONE_DEVICE,
    TWO_PROCESSES,
    Backend,
    ScriptRuns,
    case_names,
    compare,
    differences,
    script_names,
    tolerance_of,
)

pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.timeout(3 * PROCESS_LIMIT_S)]

MESH_BACKENDS = [ONE_DEVICE, EIGHT_DEVICES]

# Scripts about what happens in Python around a step, the same on any mesh: on one device alone.
ABOUT_THE_HOST = ("calls_again", "cli", "draws", "plugins", "surroundings", "ways_of_a_step")

# Cases of the other scripts that are: what they are about is decided by Python, by dtypes as PyTorch captures them, or once the
# values of a step are there. Of what reaches the mesh (state that is placed, read, replaced or left to eager steps; rows that are
# padded; sums over rows) each script has other cases on eight devices.
CASES_ABOUT_THE_HOST = {
    "asked": [
        *("constants", "looks_with_functions", "a_step_raises", "an_assertion_of_torch_fails", "texts_of_tensors"),
        *("said_in_each_step", "compares_in_double_precision", "fractions_as_whole_numbers", "guesses_that_end_in_errors"),
        *("whole_numbers_of_more_than_32_bits", "asserted_by_torch_and_distributions", "arrays_and_numbers_of_numpy_are_kept"),
    ],
    "callbacks": [
        *("no_backbone", "spike_of_the_loss", "throughput_is_logged_at_the_same_steps", "steps_of_what_callbacks_log"),
        *("monitored_before_it_is_logged", "metrics_read_at_optimizer_steps_of_averaging"),
    ],
    "control": [
        *("stopped_by_should_stop", "epoch_ended_by_minus_one", "stopped_by_time", "hyperparameters", "wrong_result_of_a_step"),
        *("early_stopping_at_a_threshold", "early_stopping_not_before_min_epochs", "early_stopping_of_the_training_loss"),
        *("early_stopping_without_its_metric", "checkpoints_best_by_maximum", "checkpoints_of_every_epoch"),
        *("checkpoints_every_three_steps", "checkpoints_with_equal_names", "checkpoints_by_default"),
        *("checkpoint_without_its_metric", "counters_under_stocks_names", "counters_of_manual_optimization"),
        "steps_estimated_in_a_validation_step",
        *("accumulation_that_hooks_set", "metrics_of_an_interrupted_run"),
        *("scheduler_in_two_lists", "scheduler_config_in_a_list", "scheduler_in_a_dict", "scheduler_config_in_a_dict"),
        *("optimizer_in_a_list", "plateau_of_the_training_loss_by_step", "plateau_without_its_metric"),
        *("scheduler_every_second_epoch_with_accumulation", "step_scheduler_with_accumulation", "own_scheduler_step"),
        *("one_cycle_with_momentum", "groups_with_their_own_rates", "learning_rate_set_by_hand", "estimated_batches"),
        *("options_set_in_an_automatic_step", "scheduler_stepped_in_an_automatic_step", "what_hooks_read_without_batches"),
        *("what_is_warned_of", "helpers_of_deep_modules", "loaders_of_a_module_beside_a_data_module"),
        "early_stopping_on_a_nan",
    ],
    "evaluation": [
        *("order_of_hooks", "no_step_to_test", "no_best_checkpoint", "loaders_of_the_module", "predicted_without_a_method"),
        "metrics_read_in_a_sanity_check",
    ],
    "fallbacks": [  # eager from the first step; those that leave the mesh later are on eight devices as well
        *("inside_the_closure_of_an_optimizer_step", "inside_a_closure_while_gradients_accumulate"),
        *("raises_in_the_closure_of_an_optimizer_step", "a_size_of_the_batch_before_one_of_the_results"),
        *("entries_under_values_of_the_batch", "an_optimizer_that_nobody_has_returned", "counted_in_a_class_of_classes"),
        *("what_was_drawn_for_a_program_that_cannot_be_made", "writes_to_a_slice_whose_place_is_drawn"),
        *("uses_a_slice_whose_tensor_was_written_to", "makes_modules_and_parameters_in_the_step"),
        *("parameters_that_show_one_memory", "a_backward_pass_in_the_step_while_gradients_accumulate"),
        *("parameters_are_replaced_in_the_step", "tensors_of_a_class_of_their_own_in_the_batch"),
        "classes_of_tensors_are_asked_for",
    ],
    "manual": ["schedulers_by_hand", "scheduler_on_a_plateau", "rates_by_hand", "trained_in_turns"],
    "metrics": ["compositions", "wrappers", "collections_as_objects", "hooks_that_log_between"],
    "new_parameters": ["a_layer_is_replaced_by_hand", "optimizers_are_made_once_more"],
    "precision": [
        *("full_of_double_batches_as_they_are", "aliases", "autocast_left_by_the_user", "a_layer_in_another_dtype"),
        *("module_cast_by_the_user", "matmul_precision"),
    ],
    "queues": ["entries_counted_in_python", "changed_and_put_back", "tensors_that_change_places"],
    "inline_optimizers": ["closure_evaluated_twice", "two_halves_of_a_step_by_hand"],
    "semantics": [
        *("counters_in_arithmetic_and_branches", "counters_in_texts_and_indices", "schedules_in_lists"),
        *("a_schedule_that_ends_too_early", "annealed_every_step", "annealed_by_the_step", "attributes_changed_by_hooks"),
        *("attribute_of_a_callback_read", "none_now_and_then", "none_in_an_accumulation_window", "counted_in_python"),
        *(
            "containers_in_two_places",
            "one_new_object_in_two_places",
            "what_cached_functions_do_besides",
            "new_objects_that_hooks_change",
            "own_tensors_that_a_step_keeps",
            "views_and_arrays_of_weights_that_are_kept",
            "views_of_a_new_tensor",
            "views_of_a_batch_and_the_batch_itself",
            "one_tensor_twice_in_a_batch",
            "views_in_a_batch_that_a_step_writes_to",
            "views_of_buffers_and_weights",
            "a_view_of_a_buffer_read_after_the_buffer_is_written",
            "written_in_place_later",
            "an_attribute_that_is_none_or_not_there",
            "buffers_that_a_step_assigns",
            "numbers_that_come_and_go",
            "batches_that_come_again_as_they_were_left",
        ),
        *("containers_of_the_batch_that_a_step_changes", "numbers_counted_in_dicts_lists_and_objects"),
        "a_number_that_becomes_a_fraction",
        *("counters_kept", "random_numbers_of_python", "global_random_numbers_of_python", "hooks_wrapped_on_the_instance"),
        *("optimizer_step_with_warm_up", "optimizer_step_every_second_batch", "stopped_inside_an_epoch"),
        *("batches_with_texts", "texts_that_are_read", "texts_of_batch_objects", "empty_dataset", "lbfgs", "sparse_adam"),
        *("printed_and_sent_to_loggers", "values_formatted_and_computed_with", "own_zero_grad", "result_with_extras"),
        *("a_cached_property_is_dropped_in_a_hook", "numbers_for_lists_of_tensors", "tensors_kept_outside_of_the_module"),
    ],
    "tuning": [
        *("learning_rate_found_by_the_callback", "learning_rate_found_again_within_the_run"),
        *("learning_rate_found_with_accumulation", "learning_rate_without_an_attribute", "batch_size_without_an_attribute"),
        *("loggers_learn_that_a_search_is_over", "generators_and_hooks_of_searches", "batch_size_of_given_loaders"),
    ],
    "wild": [
        *("penalty_now_and_then", "lists_of_lists", "only_the_first_few", "window_of_losses", "callbacks_that_log"),
        *("layers_in_another_order_for_each_batch", "second_loader_that_begins_again", "second_loader_pulled_now_and_then"),
        *("second_loader_begun_in_each_step", "pulled_from_what_the_step_fills", "sparse_gradients_of_an_embedding"),
        *("sparse_gradients_of_bags", "input_converted_by_a_plugin", "backward_passes_in_a_backward"),
        *("attributes_of_parameters_that_hooks_change", "functions_that_save_their_results", "options_set_in_validation"),
        *("validation_that_decodes_in_python", "arrays_drawn_by_numpy_that_tensors_share", "tensors_made_of_results"),
        *("setting_of_a_backend_that_the_step_reads", "batches_of_dataclasses_with_slots", "stored_by_the_first_step"),
        *("windows_of_losses", "windows_of_numbers", "initialized_by_the_first_step", "lists_of_results_given_to_numpy"),
        *("outputs_collected_by_name", "attention_by_kernels_that_are_named", "scripted_functions", "objects_made_by_steps"),
        *("parameters_whose_class_has_methods", "arrays_drawn_by_numpy", "lists_shuffled_and_rows_drawn"),
        *("functions_of_numpy_that_need_values", "rows_of_a_number_that_a_function_draws", "lists_that_beartype_checks"),
        *("tensors_of_a_module_that_the_step_walks", "a_module_of_a_library_ends_the_run_where_its_step_fails"),
        "calls_of_functions_that_keep_dicts",  # dropout, which eight devices draw otherwise
    ],
}

# Cases that are about an error under stock. Another one that ends so compares nothing but the error.
ENDS_IN_AN_ERROR = frozenset(
    (
        *("no_backbone", "spike_of_the_loss", "stochastic_averaging_of_a_stream_with_batch_norm"),
        *("checkpoint_without_its_metric", "detected_anomaly", "early_stopping_without_its_metric", "interrupted_by_an_error"),
        *("loaders_of_a_module_beside_a_data_module", "plateau_without_its_metric", "wrong_result_of_a_step"),
        *("no_best_checkpoint", "no_step_to_test", "predicted_without_a_method"),
        *("divided_by_no_rows", "full_of_double_batches_as_they_are", "a_schedule_that_ends_too_early"),
        *("batch_size_of_given_loaders", "batch_size_without_an_attribute", "learning_rate_without_an_attribute"),
    )
)

# Scripts with cases that cannot be compiled: each case is looked at by itself.
MIXED_SCRIPTS = ("semantics", "surroundings", "metrics", "wild", "fallbacks")

# What a process sees of a batch differs there by design (its own rows), so only what the whole world agrees on is compared.
TWO_PROCESS_CASES = {
    "basics": ["regression", "uneven_and_shuffled", "several_validation_loaders", "accumulated", "clipped_by_norm", "resumed"],
    "control": ["early_stopping", "checkpoints_best_two", "plateau_of_the_validation_loss", "resumed_with_everything"],
    "models": ["convolutions_and_batch_norm", "gpt", "made_in_configure_model"],
    "raw_loops": ["classifier", "classifier_compiled", "gpt", "gan_compiled", "made_in_init_module"],
    "asked": [
        *("branches_on_the_batch", "sizes_of_the_batch", "numbers_of_the_batch", "elements_of_the_batch", "buffers"),
        *("small_parameters", "optimized_by_hand", "in_a_compiled_loop"),
        *("branches_on_the_loss", "the_best_loss_is_kept", "batches_are_skipped_in_accumulation", "in_validation"),
        *("optimized_by_hand_where_gradients_are_small", "in_a_compiled_loop_with_a_branch_on_the_loss"),
    ],
    "metrics": [
        *("logged_as_objects", "collections", "states_that_are_lists", "several_loaders_and_containers", "in_callbacks"),
        *("branch_over_the_whole_batch", "used_in_the_loss", "branch_on_a_metric"),
    ],
}


def cases_of(script: str, backend: Backend) -> list[str]:
    """The cases that run so: on eight devices not what is about Python alone, nor what two processes of four devices each run."""
    if backend == ONE_DEVICE:
        return case_names(script)
    elsewhere = {*CASES_ABOUT_THE_HOST.get(script, ()), *TWO_PROCESS_CASES.get(script, ())}
    return [case for case in case_names(script) if case not in elsewhere]


SCRIPTS = [
    (script, one) for script in script_names() for one in MESH_BACKENDS if one == ONE_DEVICE or script not in ABOUT_THE_HOST
]
CASES = [(script, case, backend) for script, backend in SCRIPTS for case in cases_of(script, backend)]

RunsOf = Callable[[str], ScriptRuns]
RunsOn = Callable[[str, Backend], ScriptRuns]


@pytest.fixture(scope="session")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> RunsOf:
    """Script name → its runs, shared by all tests of the session."""
    made: dict[str, ScriptRuns] = {}

    def runs(script: str) -> ScriptRuns:
        if script not in made:
            made[script] = ScriptRuns(script, tmp_path_factory.mktemp(script))
        return made[script]

    return runs


@pytest.fixture(scope="session")
def runs_on(runs_of: RunsOf) -> RunsOn:
    """Script name and backend → its runs of the cases that run so."""

    @functools.cache
    def of(script: str, cases: tuple[str, ...]) -> ScriptRuns:
        return runs_of(script).of(list(cases))

    def runs(script: str, backend: Backend) -> ScriptRuns:
        cases = cases_of(script, backend)
        return runs_of(script) if cases == case_names(script) else of(script, tuple(cases))

    return runs


def _id(one: str | Backend) -> str:
    return one if isinstance(one, str) else one.name


@pytest.mark.parametrize(("script", "case", "backend"), CASES, ids=_id)
def test_same_as_stock(script: str, case: str, backend: Backend, runs_on: RunsOn) -> None:
    runs = runs_on(script, backend)
    expected = runs.outcome(STOCK, case)
    assert ("error" in expected.record) == (case in ENDS_IN_AN_ERROR), expected.record.get("traceback")
    found = compare(expected, runs.outcome(backend, case), tolerance_of(case))
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:20])


@pytest.mark.parametrize(("script", "case"), [("models", case) for case in case_names("models")])
def test_fully_sharded_same_as_stock(script: str, case: str, runs_of: RunsOf) -> None:
    runs = runs_of(script)
    found = compare(runs.outcome(STOCK, case), runs.outcome(FULLY_SHARDED, case), tolerance_of(case))
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:20])


# Stock's own Trainer with xlatrain.lightning.MeshStrategy: on how many devices, and which cases: what its own loops and callbacks
# decide by themselves is not ours; those of semantics and callbacks whose step takes another way there.
OWN_TRAINER = {
    "basics": (STOCK_ON_FOUR_DEVICES, case_names("basics")),
    "control": (
        STOCK_ON_ONE_DEVICE,
        [
            *(case for case in case_names("control") if case not in CASES_ABOUT_THE_HOST["control"]),
            *("checkpoints_by_default", "counters_of_manual_optimization", "scheduler_config_in_a_dict"),
            *("plateau_of_the_training_loss_by_step", "step_scheduler_with_accumulation", "own_scheduler_step"),
            *("stopped_by_should_stop", "wrong_result_of_a_step"),
        ],
    ),
    "evaluation": (STOCK_ON_FOUR_DEVICES, case_names("evaluation")),
    "manual": (STOCK_ON_FOUR_DEVICES, case_names("manual")),
    "precision": (STOCK_ON_ONE_DEVICE, ["double", "bf16_mixed", "bf16_true", "fp16_mixed", "full_of_double_batches"]),
    "metrics": (STOCK_ON_ONE_DEVICE, ["logged_as_objects", "collections", "branch_on_a_metric"]),
    "wild": (STOCK_ON_FOUR_DEVICES, ["second_loader_by_hand", "second_loader_pulled_now_and_then"]),
    "semantics": (STOCK_ON_FOUR_DEVICES, ["own_backward", "lbfgs", "moving_average_in_an_attribute", "counted_in_python"]),
    "callbacks": (
        STOCK_ON_FOUR_DEVICES,
        ["stochastic_averaging_with_batch_norm", "stochastic_averaging_with_accumulation", "averaged_resumed_and_tested"],
    ),
}
OWN_TRAINER_RAISES = {
    "a_step_that_returns_none": "RuntimeError",  # by stock's loop, on several devices
    "fp16_mixed": "MisconfigurationException",  # loss scaling
}


@pytest.fixture(scope="session")
def own_trainer(runs_of: RunsOf) -> RunsOf:
    """Script name → its runs of those cases."""
    return functools.cache(lambda script: runs_of(script).of(OWN_TRAINER[script][1]))


@pytest.mark.parametrize(("script", "case"), [(script, case) for script, (_, cases) in OWN_TRAINER.items() for case in cases])
def test_stocks_own_trainer_with_compiled_steps(script: str, case: str, own_trainer: RunsOf) -> None:
    runs, backend = own_trainer(script), OWN_TRAINER[script][0]
    outcome = runs.outcome(backend, case)
    if case in OWN_TRAINER_RAISES:
        assert outcome.record["error"] == OWN_TRAINER_RAISES[case]
        return
    found = compare(runs.outcome(STOCK, case), outcome, tolerance_of(case))
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:20])
    for entry in runs.entries(backend, case):
        eagerly = EAGER_CASES.get(case) or ("detect_anomaly=True" if case == "detected_anomaly" else None)
        eagerly = eagerly or ("the step raises " if case in RAISING_CASES else None)
        assert entry["mesh_size"] == backend.devices
        assert entry["executor"] in (("eager",) if eagerly else ("compiled", "none")), entry["fallback"]
        assert eagerly is None or eagerly in entry["fallback"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("script", list(TWO_PROCESS_CASES))
def test_two_processes_same_as_stock(script: str, runs_of: RunsOf) -> None:
    cases = TWO_PROCESS_CASES[script]
    runs = runs_of(script).of(cases)
    found = {case: compare(runs.outcome(STOCK, case), runs.outcome(TWO_PROCESSES, case), FLOAT32)[:5] for case in cases}
    assert {case: differing for case, differing in found.items() if differing} == {}
    for case in cases:
        for entry in runs.entries(TWO_PROCESSES, case):
            assert entry["mesh_size"] == EIGHT_DEVICES.devices
            assert entry["executor"] in (("eager",) if case in EAGER_CASES else ("compiled", "none")), entry["fallback"]


@pytest.mark.multiprocess
def test_eager_loops_on_two_processes_same_as_stock(runs_of: RunsOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    runs, eagerly = runs_of("raw_loops"), replace(TWO_PROCESSES, name="two processes eagerly")
    found = {case: compare(runs.outcome(STOCK, case), runs.outcome(eagerly, case), FLOAT32)[:5] for case in runs.cases}
    assert {case: differing for case, differing in found.items() if differing} == {}
    assert {run["executor"] for run in runs.report(eagerly)["runs"]} == {"eager"}


@pytest.mark.parametrize(("script", "backend"), [one for one in SCRIPTS if one[0] not in MIXED_SCRIPTS], ids=_id)
def test_everything_was_compiled_on_the_whole_mesh(script: str, backend: Backend, runs_on: RunsOn) -> None:
    runs = runs_on(script, backend)
    runs.run(STOCK)
    entries = runs.report(backend)["runs"]
    assert entries
    # "none": the run ended before a step was captured, by an exception of its own.
    eager = [run["fallback"] for run in entries if run["executor"] not in ("compiled", "none")]
    assert any(run["executor"] == "compiled" for run in entries)
    named = {**dict.fromkeys(RAISING_CASES, "the step raises "), **EAGER_CASES}
    told = [(named[case], run["fallback"]) for case in runs.cases if case in named for run in runs.entries(backend, case)]
    assert sorted(reason for reason in eager if not reason.startswith("detect_anomaly=True")) == sorted(
        found for _, found in told
    )
    assert [found for reason, found in told if reason not in found] == []
    assert {run["mesh_size"] for run in entries} == {backend.devices}


# A step that raises is run eagerly once more, for what it does before it raises: the run ends there, as under stock.
RAISING_CASES = (
    *("a_step_raises", "an_assertion_of_torch_fails", "divided_by_no_rows", "wrong_result_of_a_step"),
    "full_of_double_batches_as_they_are",  # of another dtype than the model
)

# Cases that cannot be compiled, and what the run report must say about them; all others must be compiled.
EAGER_CASES = {
    "predictions_of_own_classes": "the step returns, logs or keeps a",
    "an_attribute_of_a_tensor_of_the_batch_is_set": "the step sets `size_` of a Area",
    "a_step_gives_tensors_of_own_classes": "the step returns, logs or keeps a",
    "an_array_is_changed_after_it_is_a_tensor": "an array whose memory a tensor may have is changed in place",
    "an_array_is_changed_by_way_of_a_view_of_it": "rows = torch.from_numpy(order)",
    "a_tensor_beside_the_module_is_asked_and_written": "it writes in place to a tensor",
    "slopes_that_values_count": "torch draws for rrelu as many numbers as the values of its operands say",
    "fabric_loop_that_skips_batches_that_raise": "the step raises ValueError: a batch of another size",
    "fabric_loop_that_skips_batches_that_raise_compiled": "the step raises ValueError: a batch of another size",
    "a_call_that_cannot_be_compiled_after_one_that_can": "draws_in_loops.py",
    "a_backward_pass_that_cannot_be_lowered": "reads 64-bit values",
    "whole_numbers_that_need_64_bits": "do not fit int32",
    "distributions_that_values_count": "as many numbers as the values of its operands say",
    "lbfgs": "LBFGS",
    "states_shared_by_two_optimizers": "have one tensor",
    "shown_states_of_optimizers": "a view or an array",
    "a_backward_pass_in_the_step_while_gradients_accumulate": "accumulate_grad_batches=2",
    "sparse_adam": "SparseAdam",
    "branch_over_the_whole_batch": "metrics.py",
    "branch_on_a_metric": "metrics.py",
    "smoothed_in_a_namespace": "SPACE",
    "a_bar_of_the_users_own_that_a_step_moves": "uses a SemLock",
    "shown_by_an_array": "writes in place to a tensor",
    "views_in_a_batch_that_a_step_writes_to": "another one that it is given is a view",
    "a_view_of_a_buffer_read_after_the_buffer_is_written": "another one that it is given is a view",
    "takes_from_a_generator_in_vain": "surroundings.py",
    "writes_to_a_file": "surroundings.py",
    "changes_objects_that_are_kept_in_c": "of which a capture could not take back what a step changes",
    "looks_at_texts": "formats the value of a tensor into a text",
    "reads_the_metrics": "surroundings.py",
    "reads_the_gradients_of_the_step_before": "surroundings.py",
    "second_loader_pulled_now_and_then": "the step takes from self.source more or fewer values from batch to batch",
    "second_loader_begun_in_each_step": "it begins a pass over a DataLoader",
    "pulled_from_what_the_step_fills": "after it has changed what the iterator may look at",
    "sparse_gradients_of_an_embedding": "nn.Embedding with sparse=True",
    "a_buffer_becomes_double_between_hooks": "self.grown",
    "parameters_are_replaced_in_the_step": "the step makes self.sizes, or replaces it",
    "a_parameter_is_made_in_the_step": "the step makes self.scale, or replaces it",
    "a_buffer_grows_in_validation": "self.grown",
    "inside_the_closure_of_an_optimizer_step": "COUNTED",
    "inside_a_closure_while_gradients_accumulate": "COUNTED",
    "a_size_of_the_batch_before_one_of_the_results": "torch.unique",
    "entries_under_values_of_the_batch": "makes an entry of self.kept under a key that is a value of its own batch",
    "hooks_before_optimizer_steps_registered_late": "register_step_pre_hook",
    "what_was_drawn_for_a_program_that_cannot_be_made": "view.dtype",
    "an_optimizer_that_nobody_has_returned": "SGD) that configure_optimizers did not return",
    "raises_in_the_closure_of_an_optimizer_step": "the step raises ValueError",
    "a_schedule_that_ends_too_early": "the step raises IndexError",
    "a_module_of_a_library_ends_the_run_where_its_step_fails": "ends_the_run.py",
    "sparse_gradients_of_bags": "embedding_bag with sparse=True",
    "arrays_drawn_by_numpy_that_tensors_share": "drawn at random",
    "writes_to_a_slice_whose_place_is_drawn": "x[:, start : start + 2].mul_(2.0)",
    "what_cached_functions_do_besides": "keeps its results",
    "makes_modules_and_parameters_in_the_step": "in __init__ or configure_model",
    "parameters_that_show_one_memory": "first.weight and second.weight",
    "uses_a_slice_whose_tensor_was_written_to": "part = x[:, start : start + 2].T",
}

# These compile where the process has 64-bit types: whole numbers have all their bits there.
if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]  (`JAX_ENABLE_X64=1 make test`)
    for _case in ("a_backward_pass_that_cannot_be_lowered", "whole_numbers_that_need_64_bits"):
        del EAGER_CASES[_case]

# Cases whose training is compiled, with the steps that are not, and why.
ON_HOST_CASES = {
    "validation_that_decodes_in_python": {"validation_step": "wild_kinds.py"},
    "changes_a_hash_in_validation": {"validation_step": "of which a capture could not take back what a step changes"},
    "options_set_in_validation": {"validation_step": "optimizers[0].param_groups[0]['lr'] ="},
    "second_loader_that_begins_again": {"the first training_step": "self.source, from which the step takes, is at its end"},
    "layers_made_by_the_first_batch": {"the first training_step": "a Lazy module"},
    "initialized_by_the_first_step": {"the first training_step": "wild_stored.py"},
}


@pytest.mark.parametrize(("script", "case", "backend"), [one for one in CASES if one[0] in MIXED_SCRIPTS], ids=_id)
def test_compiled_or_the_reason_is_named(script: str, case: str, backend: Backend, runs_on: RunsOn) -> None:
    runs = runs_on(script, backend)
    runs.run(STOCK)
    entries = runs.entries(backend, case)
    assert entries
    for entry in entries:
        if case in EAGER_CASES:
            assert entry["executor"] == "eager"
            assert EAGER_CASES[case] in entry["fallback"]
        else:
            assert (entry["executor"], entry["fallback"], entry["mesh_size"]) == ("compiled", None, backend.devices)
            assert list(entry["on_host"]) == list(ON_HOST_CASES.get(case, {}))
            for name, reason in ON_HOST_CASES.get(case, {}).items():
                assert reason in entry["on_host"][name]


@pytest.mark.parametrize("backend", MESH_BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(("script", "case"), [("masked_rows", "losses_over_selected_rows"), ("masked_rows", "rows_that_go_back")])
def test_one_program_whatever_masks_select(script: str, case: str, backend: Backend, runs_of: RunsOf) -> None:
    assert [entry["captures"] for entry in runs_of(script).entries(backend, case)] == [1]


# What the first step stores makes a program for it and one for the others, with validation two more; a window one a length.
PROGRAMS = {
    ("asked", "said_in_each_step"): [1],
    ("masked_rows", "rows_for_as_many_places"): [2],
    ("wild", "stored_by_the_first_step"): [2, 4, 4, 2, 2],
    ("wild", "windows_of_losses"): [3, 3, 3],
    ("wild", "windows_of_numbers"): [5, 6],
    ("wild", "initialized_by_the_first_step"): [4, 3, 3],
    ("wild", "second_loaders_pulled_in_steps"): [2],
}


@pytest.mark.parametrize(("script", "case"), PROGRAMS)
def test_programs_of_a_run(script: str, case: str, runs_of: RunsOf) -> None:
    assert [entry["variants"] for entry in runs_of(script).entries(ONE_DEVICE, case)] == PROGRAMS[script, case]


def test_differences_are_found() -> None:
    assert list(differences({"a": [1.0, 2]}, {"a": [1.00001, 2]}, FLOAT32)) == []
    assert list(differences({"a": [1.0, 2]}, {"a": [1.1, 3]}, FLOAT32)) == [
        "['a'][0]: expected 1.0, found 1.1",
        "['a'][1]: expected 2, found 3",
    ]
    assert list(differences([1], [1, 2], FLOAT32)) == [": expected 1 entries, found 2"]
    assert list(differences({"a": 1}, {}, FLOAT32)) == ["['a']: missing: 1"]
    assert list(differences(float("nan"), float("nan"), FLOAT32)) == []
    assert list(differences(float("nan"), 1.0, FLOAT32)) == [": expected nan, found 1.0"]
