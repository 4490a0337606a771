"""Traces of traffic in the formats of other projects, for `what-if`, `replay --load` and the benchmarks."""
