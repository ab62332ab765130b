"""What reading torch's sources found that would go wrong on GPUs: each finding's tests, by number.

None of this has run on a GPU; `pytest -m gpu` is what runs there.

A test that relies on torch's Python or C++ says on which file of torch 2.13 it does.
"""

import re
from pathlib import Path

HERE = Path(__file__).parent

FINDINGS = {
    "1: the fork hook destroys events in the child": ["test_no_event_is_destroyed_in_a_forked_process"],
    "2: a CUDA graph's capture, and errors of the recorder in the program": [
        "test_steps_in_a_graph_capture_are_no_steps",
        "test_a_marked_step_that_captures_a_graph_is_none",
        "test_nothing_of_the_recorder_raises_into_the_program",
    ],
    "3: torch's build and the driver are never compared": [
        "test_torchs_build_and_the_driver_are_compared",
        "test_gpus_that_torch_cannot_use_are_refused_before_anything_starts",
    ],
    "4: one GPU that can't be opened hides all": [
        "test_a_gpu_that_cannot_be_opened_hides_no_other",
        "test_a_gpu_that_fell_off_the_bus_hides_no_other",
    ],
    "5: MIG": ["test_parts_of_one_gpu_communicate_by_gloo", "test_dp_on_several_mig_instances_is_refused"],
    "6: torch's two ways of asking for TF32 contradict each other": ["test_all_readers_of_tf32_agree"],
    "7: programs without set_device are timed on GPU 0": [
        "test_a_program_without_set_device_is_timed_on_its_own_gpu",
        "test_without_an_optimizer_the_gpu_that_holds_memory_is_timed",
        "test_a_program_on_the_cpu_makes_no_context_on_a_gpu",
    ],
    "8: peak memory and throttling of dp's first GPU only": [
        "test_peaks_and_heat_are_those_of_every_gpu_of_the_rank",
        "test_each_gpu_of_dp_has_its_own_figures",
    ],
    "9: energy includes drawing inputs": [
        "test_energy_is_that_of_the_timed_part_alone",
        "test_inputs_of_a_gpu_are_a_pool_and_a_block_is_never_interrupted",
        "test_a_block_on_a_gpu_lasts_a_second",
    ],
    "10: throttling is asked once, after the block": [
        "test_peaks_and_heat_are_those_of_every_gpu_of_the_rank",
        "test_heat_that_lasts_a_moment_is_not_reported",
        "test_sensors_are_those_of_the_ranks_own_gpus",
        "test_a_part_of_a_gpu_asks_the_whole_one_for_its_clock_and_has_no_energy",
    ],
    "11: global_batch: max ignores what dp gathers, and dies of other errors": [
        "test_for_dp_all_gpus_are_tried_in_one_process",
        "test_a_batch_that_fails_otherwise_is_an_upper_bound",
    ],
    "12: allocator retries go unseen": [
        "test_allocations_that_had_to_wait_are_counted",
        "test_each_gpu_of_dp_has_its_own_figures",
        "test_inputs_of_a_gpu_are_a_pool_and_a_block_is_never_interrupted",
    ],
    "13: traced steps run in another mode than timed ones": ["test_traced_steps_synchronize_once_at_the_end"],
    "14: NCCL's flight recorder is never asked": [
        "test_a_rank_that_nccl_waits_for_is_found",
        "test_both_recorders_are_asked",
    ],
    "15: balanced on dp lacks a device guard": [
        "test_a_replica_is_timed_with_its_device_as_the_current_one",
        "test_a_replica_whose_copy_does_not_fit_takes_for_ever",
    ],
    "16: NCCL's limit of a collective is fixed": [
        "test_torch_gives_a_collective_up_after_the_command_has",
        "test_a_group_of_gpus_connects_at_once_and_waits_as_long_as_the_job",
    ],
    "17: memory that runs out in a collective hangs": [
        "test_memory_that_runs_out_while_others_wait_in_a_collective_ends_the_rank"
    ],
    "18: auto drops GPUs by their utilisation": [
        "test_utilisation_alone_makes_no_gpu_busy",
        "test_where_processes_are_not_listed_utilisation_is_looked_at_twice",
    ],
    "19: ordinals on mixed machines": ["test_on_unlike_gpus_the_order_is_noted"],
    "20: the tab shows ranks next to the wrong GPUs": ["test_the_tab_calls_a_gpu_as_the_run_does"],
    "21: ROCm": ["test_amd_gpus_are_not_passed_over_in_silence"],
    "22: TF32 before Ampere, dp's advice, cuDNN's search, DDP's options": [
        "test_tf32_is_refused_on_gpus_before_ampere",
        "test_dp_on_unlike_gpus_prints_no_advice",
        "test_cudnn_searches_only_where_the_job_says_so",
        "test_ddps_options_are_torchs_unless_the_job_says_otherwise",
    ],
}


def test_every_finding_has_its_tests() -> None:
    there = {
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    missing = {name for tests in FINDINGS.values() for name in tests} - there
    assert not missing
    assert [int(title.partition(":")[0]) for title in FINDINGS] == list(range(1, 23))
