"""The GPU of a rank, by the name of its device in the configuration. Pure."""


def gpu_index(device: str, rank: int, gpus: int) -> int | None:
    """Return the number of the GPU that `rank` computes on, or None for the CPU.

    `auto` gives each rank a GPU in turn; `gpus` is how many this machine has.
    """
    if device == "auto":
        return rank % gpus if gpus else None
    kind, _, index = device.partition(":")
    return int(index or 0) if kind == "cuda" else None
