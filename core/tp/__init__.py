"""Tensor parallelism on tensors and a process group: plans, shard layouts, sharded layers. Knows no files."""
