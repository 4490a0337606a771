"""The paged KV cache: blocks, memory pages, the prefix cache, transfer between ranks."""
