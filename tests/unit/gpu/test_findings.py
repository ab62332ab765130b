"""What reading torch's sources found that would go wrong on GPUs: each finding's tests, by number.

None of this has run on a GPU; `pytest -m gpu` is what runs there.

A test that relies on torch's Python or C++ says on which file of torch 2.13 it does, and on which line. Its
wheel has no `.cpp`: the line is that of an error of 2.13, or of torch's main shortly before 2.13.
"""

import importlib.util
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
        "test_the_meter_is_that_of_the_ranks_own_gpus",
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
        "test_utilisation_alone_makes_no_gpu_busy_unless_processes_are_not_listed",
    ],
    "19: ordinals on mixed machines": ["test_on_unlike_gpus_the_order_is_noted"],
    "20: the tab shows ranks next to the wrong GPUs": ["test_the_tab_calls_a_gpu_as_the_run_does"],
    "21: ROCm": ["test_a_torch_that_cannot_use_them_does_not_pass_them_over_in_silence"],
    "22: TF32 before Ampere, dp's advice, cuDNN's search, DDP's options": [
        "test_tf32_is_refused_on_gpus_before_ampere",
        "test_dp_on_unlike_gpus_prints_no_advice",
        "test_cudnn_searches_only_where_the_job_says_so",
        "test_ddps_options_are_torchs_unless_the_job_says_otherwise",
    ],
    # A second reading, when all of these were mended.
    "23: torch's build may lack the kernels of a GPU": [
        "test_kernels_run_on_the_gpus_that_torch_says",
        "test_the_hint_names_a_build_for_driver_and_gpu",
        "test_a_gpu_that_torch_has_no_kernels_for_is_refused_before_the_first_one_fails",
        "test_auto_leaves_out_gpus_that_torch_has_no_kernels_for",
    ],
    "24: a failed system call of NCCL counts as a lost peer; a full /dev/shm has no remedy": [
        "test_a_rank_whose_own_system_call_failed_is_the_cause",
        "test_nccls_full_shared_memory_has_its_remedy",
    ],
    "25: resetting a peak before CUDA is used raises": ["test_no_peak_is_reset_before_cuda_is_initialized"],
    "26: memory that runs out in a step without communication hangs the others": [
        "test_a_step_without_synchronization_issues_no_collective"
    ],
    "27: dp on GPUs refuses outputs that dp on CPUs takes": [
        "test_dp_on_gpus_gathers_whatever_dp_on_cpus_does"
    ],
    "28: pinned slices keep their gaps": ["test_a_slice_is_pinned_without_its_gaps"],
    "29: energy includes the untimed step": ["test_the_untimed_step_is_done_before_energy_is_counted"],
    "30: a dataset's batches are cast after they are pinned": [
        "test_a_dataset_is_arranged_before_it_is_pinned"
    ],
    "31: micro-benchmarks call GPUs by the process's numbers, and see no throttling but their own": [
        "test_a_micro_benchmark_says_whose_clock_was_throttled",
    ],
    "32: a rank that waits for NCCL in .item() seems to work": [
        "test_a_rank_that_reads_a_value_while_nccl_waits_is_no_busy_one"
    ],
    "33: NCCL's threads count as computing": ["test_threads_of_nccl_are_known_by_their_names"],
    "34: the least informative reason of throttling is given": ["test_the_reason_that_says_most_is_given"],
    # A third one, of what the second reader hadn't written.
    "35: the end of a trace makes a context on the first GPU": [
        "test_a_trace_ends_on_a_gpu_of_the_program",
        "test_a_program_on_the_cpu_is_traced_without_cuda",
    ],
    "36: cuDNN 9 has other words for memory that runs out": ["test_words_of_cudnn_9_mean_out_of_memory"],
    "37: the largest batch leaves no room for NCCL": ["test_the_largest_batch_leaves_room_for_nccl"],
    "38: a loader's processes may collect what uses CUDA": [
        "test_garbage_is_collected_before_loader_processes_are_forked"
    ],
    "39: a collective that no GPU completes seems to be no wait": [
        "test_a_collective_that_no_gpu_completes_is_named"
    ],
    "40: tests of GPUs pass where the driver doesn't answer": [
        "test_gpu_tests_fail_where_torch_cannot_use_what_the_driver_shows"
    ],
    "41: a step that runs out of memory in the optimizer breaks the next one": [
        "test_a_step_that_runs_out_of_memory_leaves_no_half_made_state"
    ],
    # A fourth one, by a reader who had written none of the code.
    "42: asking for the health of GPUs fails with the driver": [
        "test_a_driver_that_counts_no_gpus_says_nothing_of_their_health"
    ],
    "43: a driver before 510 ends the command": ["test_a_driver_without_the_newest_functions_is_still_asked"],
    "44: a GPU that CUDA_VISIBLE_DEVICES names twice": ["test_a_gpu_that_is_named_twice_hides_all"],
    "45: going back to a state holds the optimizer's twice on the device": [
        "test_a_restored_optimizer_never_holds_its_state_twice"
    ],
    "46: memory that can't be repaired counts as well": [
        "test_a_gpu_whose_memory_has_no_spare_rows_left_is_not_well"
    ],
    "47: waiting by `torch.accelerator` counts as computing": [
        "test_a_rank_that_waits_for_any_accelerator_waits_for_its_gpu"
    ],
    "48: computing inside of FSDP counts as waiting": ["test_a_model_inside_of_fsdp_computes"],
    "49: with MIG an import before the fork may begin to use CUDA": [
        "test_no_import_before_the_fork_asks_cuda_about_parts_of_gpus"
    ],
    "50: tests of GPUs fail on divided ones": ["test_gpu_tests_use_one_instance_of_a_divided_gpu"],
    # A sixth one, once more by a reader who had written none of the code.
    "51: before torch 2.9 the flight recorder goes by another name": [
        "test_every_torch_remembers_collectives"
    ],
    "52: late in a long block times are rounded to µs": [
        "test_a_time_late_in_a_long_block_is_as_exact_as_an_early_one"
    ],
    "53: a program with an allocator of its own isn't recorded": [
        "test_a_program_with_its_own_allocator_is_timed_without_a_peak",
        "test_what_no_allocator_counts_is_not_known",
    ],
    "54: collectives that NCCL runs as one never seem to be completed": [
        "test_collectives_that_run_as_one_are_completed_with_it"
    ],
    # A seventh one, of torch's C++ that none had been about, and of NCCL's.
    "55: an algorithm that can't do every collective fails in the first one": [
        "test_an_algorithm_is_for_the_collectives_that_it_can_do",
        "test_what_nccl_cannot_do_is_refused",
    ],
    "56: a trace fails with an allocator that keeps no history": [
        "test_an_allocator_without_a_history_costs_no_trace"
    ],
    "57: a rank that waits for others to connect seems to be the cause": [
        "test_a_rank_whose_peers_never_connected_is_no_cause"
    ],
    # An eighth one, of C++ that none had opened: of torch's profiler and of Kineto, among others.
    "58: the bytes of tensors in 8 bits and without a sign aren't known": [
        "test_every_type_that_is_sent_has_a_size"
    ],
    "59: a wait on one GPU is taken for one on another": ["test_a_wait_is_for_a_stream_of_its_own_gpu"],
    "60: messages that NCCL runs as one never seem to be stuck": [
        "test_messages_that_run_as_one_after_a_collective_may_be_stuck"
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
    assert [int(title.partition(":")[0]) for title in FINDINGS] == list(range(1, len(FINDINGS) + 1))


def test_what_tests_rely_on_is_in_the_lines_of_torch_that_they_name() -> None:
    named = re.compile(r"((?:torch|c10)/[\w/]+\.(?:py|hpp|h)):(\d+)[,:]\s+`([\w.~]+)(?:\(\))?`")
    found = [reference for path in HERE.glob("*.py") for reference in named.findall(path.read_text())]
    moved = [
        reference for reference in found if reference[2].split(".")[-1] not in torch_line(*reference[:2])
    ]
    assert len(found) > 15
    assert not moved


def test_no_test_names_a_file_of_torch_without_its_line() -> None:
    without = re.compile(r"(?:torch|c10)/[\w/]+\.(?:py|cpp|hpp|h)[,:]\s+`[\w.~]+")
    assert not [name for path in HERE.glob("*.py") for name in without.findall(path.read_text())]


def torch_line(file: str, number: str) -> str:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    path = installed.parent / file if file.endswith(".py") else installed / "include" / file
    return path.read_text().splitlines()[int(number) - 1]
