"""LoRA on shards: the keys of files, adapters, and their merging into weights or running beside them."""
