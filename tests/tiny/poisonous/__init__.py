"""A family that some prompts kill: a decoder-only language model whose node is not sound.

For tests of what becomes of a worker's other requests. Nothing that is served knows it; `tests.tiny.poison`
puts it where a package of another project would be.
"""
