"""Faults seen in the two systems that set the floor, and the tests that would fail on each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What can go wrong, what theirs does, and the tests: (file).(test), without `test_`."""

    what: str
    theirs: str
    shown: str

    @property
    def tests(self) -> tuple[str, ...]:
        """References to tests (see `proofs.py`)."""
        return tuple(map(_reference, self.shown.split()))


def _reference(shown: str) -> str:
    file, *path = shown.split(".")
    return "::".join([f"test_{file}.py", *(p if p[0].isupper() else f"test_{p}" for p in path)])


FAULTS: tuple[Fault, ...] = (
    Fault("`dot` of 0, 1, 255, 256, 257 and 10^6 elements", "wrong beyond 256",
          "floor_faults.dot_of_every_length ops.op"),
    Fault("one row by a depth K with K % 4 = 1", "K % 4 is not checked",
          "floor_faults.one_row_by_a_depth_that_no_vector_divides"),
    Fault("more than 65 535 output columns, or groups",
          "N is not checked against the limit of a grid's side",
          "floor_faults.more_columns_than_a_grid_has_groups "
          "ops.more_groups_than_one_side_of_a_grid "
          "ops.thin_products_of_more_groups_than_one_side_of_a_grid"),
    Fault("edges of tiles, at Whisper's 1500 positions",
          "stores of a tensor-core tile pass the end of the row",
          "floor_faults.edges_of_tiles_at_1500 ops.op"),
    Fault("head size 192", "decode knows heads to 128; larger ones are cut without a word",
          "floor_faults.heads_wider_than_128 ops.op"),
    Fault("a weight above the largest binding", "dropped, with a line on stderr",
          "floor_faults.a_weight_above_the_largest_binding windows.a_weight "
          "matmul_cache.a_weight_larger_than_the_device_allows"),
    Fault("a layer without a bias", "a null pointer",
          "floor_faults.a_bias_that_is_not_there blocks.encoder_block"),
    Fault("one `PipelineCache` on two devices", "programs are looked up by an address",
          "floor_faults.one_cache_on_two_devices"),
    Fault("two kernels of the same content, one of another", "programs are looked up by an address",
          "contracts.keys_are_content"),
    Fault("threads that need one kernel at the same time", "compiled anew for each batch",
          "contracts.each_program_is_compiled_once_whatever_the_threads "
          "contracts.a_cache_compiles_once_for_threads_that_ask_together"),
    Fault("a row alone, and the same row among others",
          "m = 1 computes another product than larger m",
          "ops.one_row_equals_the_first_of_many"),
    Fault("f32 in, f32 arithmetic", "multiplied in f16 without a word",
          "floor_faults.f32_is_never_multiplied_as_f16 ops.op"),
    Fault("copies ordered with kernels", "a copy on another stream than the kernel",
          "floor_faults.copies_are_ordered_with_kernels "
          "batch.freed_memory_is_not_written_while_recorded_work_reads_it"),
    Fault("shapes that do not fit a fused op", "not checked",
          "floor_faults.shapes_are_checked_in_fused_ops ops.mistakes"),
    Fault("errors that the driver's validation finds", "surface nowhere",
          "errors.source_that_a_driver_refuses batch.a_failed_submission_loses_the_device "
          "tensor.TestWgpuBuffers.what_cannot_be_imported"),
    Fault("programs compiled over many lengths",
          "a kernel for each full shape: hundreds of compiles",
          "floor_faults.no_length_compiles_anything "
          "matmul_cache.other_lengths_of_one_kind_compile_nothing "
          "ops.every_length_runs_the_same_launches"),
    Fault("streams made for an op", "one created and destroyed by each",
          "cuda.TestStreamsOfCuda.no_stream_is_made_for_an_op "
          "floor_faults.no_stream_is_made_for_an_op"),
    Fault("pages that claim what the code does not do", "they do",
          "architecture.every_sentence_has_a_test lang_trace.every_sentence_has_a_test "
          "features_page.a_row_is_proved from_trueno.the_page_is_what_the_script_makes"),
    Fault("tests that only look whether there is a result", "not empty is enough",
          "floor_faults.every_test_compares_something"),
    Fault("how many kernels ran", "the counter always reads 1",
          "seed_surface.name"),
    Fault("the length of a KV cache", "nobody advances it",
          "seed_surface.name blocks.a_decoder_block_step_by_step"),
    Fault("launches of attention, and its scores in memory", "9 launches, scores stored 3 times",
          "seed_surface.name"),
)  # fmt: skip  # a table
