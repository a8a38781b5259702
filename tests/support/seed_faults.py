"""Faults seen in the two systems that set the floor, and the tests that would fail on each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What can go wrong, what theirs does, and references to tests (see `proofs.py`)."""

    what: str
    theirs: str
    tests: tuple[str, ...]


FAULTS: tuple[Fault, ...] = (
    Fault(
        "`dot` of 0, 1, 255, 256, 257 and 10^6 elements",
        "wrong beyond 256",
        ("test_floor_faults.py::test_dot_of_every_length", "test_ops.py::test_op"),
    ),
    Fault(
        "one row by a depth K with K % 4 = 1",
        "K % 4 is not checked",
        ("test_floor_faults.py::test_one_row_by_a_depth_that_no_vector_divides",),
    ),
    Fault(
        "more than 65 535 output columns, or groups",
        "N is not checked against the limit of a grid's side",
        (
            "test_floor_faults.py::test_more_columns_than_a_grid_has_groups",
            "test_ops.py::test_more_groups_than_one_side_of_a_grid",
            "test_ops.py::test_thin_products_of_more_groups_than_one_side_of_a_grid",
        ),
    ),
    Fault(
        "edges of tiles, at Whisper's 1500 positions",
        "stores of a tensor-core tile pass the end of the row",
        ("test_floor_faults.py::test_edges_of_tiles_at_1500", "test_ops.py::test_op"),
    ),
    Fault(
        "head size 192",
        "decode knows heads to 128; larger ones are cut without a word",
        ("test_floor_faults.py::test_heads_wider_than_128", "test_ops.py::test_op"),
    ),
    Fault(
        "a weight above the largest binding",
        "dropped, with a line on stderr",
        (
            "test_floor_faults.py::test_a_weight_above_the_largest_binding",
            "test_windows.py::test_a_weight",
            "test_matmul_cache.py::test_a_weight_larger_than_the_device_allows",
        ),
    ),
    Fault(
        "a layer without a bias",
        "a null pointer",
        (
            "test_floor_faults.py::test_a_bias_that_is_not_there",
            "test_blocks.py::test_encoder_block",
        ),
    ),
    Fault(
        "one `PipelineCache` on two devices",
        "programs are looked up by an address",
        ("test_floor_faults.py::test_one_cache_on_two_devices",),
    ),
    Fault(
        "two kernels of the same content, one of another",
        "programs are looked up by an address",
        ("test_contracts.py::test_keys_are_content",),
    ),
    Fault(
        "threads that need one kernel at the same time",
        "compiled anew for each batch",
        (
            "test_contracts.py::test_each_program_is_compiled_once_whatever_the_threads",
            "test_contracts.py::test_a_cache_compiles_once_for_threads_that_ask_together",
        ),
    ),
    Fault(
        "a row alone, and the same row among others",
        "m = 1 computes another product than larger m",
        ("test_ops.py::test_one_row_equals_the_first_of_many",),
    ),
    Fault(
        "f32 in, f32 arithmetic",
        "multiplied in f16 without a word",
        ("test_floor_faults.py::test_f32_is_never_multiplied_as_f16", "test_ops.py::test_op"),
    ),
    Fault(
        "copies ordered with kernels",
        "a copy on another stream than the kernel",
        (
            "test_floor_faults.py::test_copies_are_ordered_with_kernels",
            "test_batch.py::test_freed_memory_is_not_written_while_recorded_work_reads_it",
        ),
    ),
    Fault(
        "shapes that do not fit a fused op",
        "not checked",
        (
            "test_floor_faults.py::test_shapes_are_checked_in_fused_ops",
            "test_ops.py::test_mistakes",
        ),
    ),
    Fault(
        "errors that the driver's validation finds",
        "surface nowhere",
        (
            "test_errors.py::test_source_that_a_driver_refuses",
            "test_batch.py::test_a_failed_submission_loses_the_device",
            "test_tensor.py::TestWgpuBuffers::test_what_cannot_be_imported",
        ),
    ),
    Fault(
        "programs compiled over many lengths",
        "a kernel for each full shape: hundreds of compiles",
        (
            "test_floor_faults.py::test_no_length_compiles_anything",
            "test_matmul_cache.py::test_other_lengths_of_one_kind_compile_nothing",
            "test_attention.py::test_every_length_runs_the_same_launches",
        ),
    ),
    Fault(
        "streams made for an op",
        "one created and destroyed by each",
        (
            "test_cuda.py::TestStreamsOfCuda::test_no_stream_is_made_for_an_op",
            "test_floor_faults.py::test_no_stream_is_made_for_an_op",
        ),
    ),
    Fault(
        "pages that claim what the code does not do",
        "they do",
        (
            "test_architecture.py::test_every_sentence_has_a_test",
            "test_lang_trace.py::test_every_sentence_has_a_test",
            "test_features_page.py::test_a_row_is_proved",
            "test_from_trueno.py::test_the_page_is_what_the_script_makes",
        ),
    ),
    Fault(
        "tests that only look whether there is a result",
        "not empty is enough",
        ("test_floor_faults.py::test_every_test_compares_something",),
    ),
    Fault(
        "how many kernels ran",
        "the counter always reads 1",
        ("test_seed_surface.py::test_name",),
    ),
    Fault(
        "the length of a KV cache",
        "nobody advances it",
        ("test_seed_surface.py::test_name", "test_blocks.py::test_a_decoder_block_step_by_step"),
    ),
    Fault(
        "launches of attention, and its scores in memory",
        "9 launches, scores stored 3 times",
        ("test_seed_surface.py::test_name",),
    ),
)
