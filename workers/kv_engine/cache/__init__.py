"""The KV pool's blocks, the prefix cache over them, and the prefault of their memory pages."""
