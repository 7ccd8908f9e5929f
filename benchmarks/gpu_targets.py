"""Descriptions of GPUs that are not there, for the CUDA compiler: public datasheet numbers."""

from __future__ import annotations

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_bytes} clock_rate_ghz: 1.98
  device_memory_size: {memory_bytes} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} minor: 0 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" name: "{name}" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
"""

TARGETS: dict[str, str] = {
    "H200": _TARGET.format(
        major=9,
        cores=132,
        memory_bytes=141 * 2**30,
        l2_bytes=50 * 2**20,
        bandwidth=4_800_000_000_000,
        name="NVIDIA H200",
    ),
    "B200": _TARGET.format(
        major=10,
        cores=148,
        memory_bytes=178 * 2**30,
        l2_bytes=132_644_864,
        bandwidth=8_000_000_000_000,
        name="NVIDIA B200",
    ),
}
