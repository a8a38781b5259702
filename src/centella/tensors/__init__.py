"""What users hold: tensors, States, functions, batches, captured functions, kernels."""
