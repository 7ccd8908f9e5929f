"""Benchmarks, apart from the tests; each is one command that writes JSON.

    python -m benchmarks.end_to_end     prefill, decode, start and memory, beside other libraries
    python -m benchmarks.chat_reuse     what a conversation's next turn costs
    python -m benchmarks.kv_eviction    memory and time with sliding layers that drop rows
    python -m benchmarks.gated_delta    the recurrence: chunks, decode, checkpoints
    python -m benchmarks.loading        time and peak memory of loading
    python -m benchmarks.gpu_static     registers, spills and instructions of the GPU kernels, without a GPU
    python benchmarks/gpu_device.py     the GPU kernels on a GPU: right or wrong, then times
    python -m benchmarks.tables         the tables of README.md and docs/performance.md, from the results

The other modules time single operations and print their JSON.
"""
