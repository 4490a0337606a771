"""Our GPU kernels, if the device can run them: their choice for a node's layers, and checks before their use.

Without them transformers' modules compute the layers. The equivalent for CPUs is
`workers.cpu_kernels.decoder.use_cpu_kernels`.
"""

from workers.kv_engine.attention.kernels import default_kernel
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.node import KVNode, fill
from workers.kv_engine.quantisation.wanted import AS_STORED, Quantisation, refuse


def use_gpu_kernels(node: KVNode, quantisation: Quantisation = AS_STORED) -> KVNode:
    """Return the node with its layers fused, or the node itself if the device or the kernels cannot do it.

    Call it before `workers.kv_engine.selfcheck.check_node`, which then checks the fused layers.

    Raises:
        UnsupportedArchitectureError: weights shall be quantised, and the device or the kernels cannot do it.
    """
    if default_kernel(node.device.type) is None:
        refuse(quantisation, f"our kernels cannot run on {node.device} (see above)")
        fill(node)
        return node
    from workers.kv_engine.gpu.decoder import fuse  # noqa: PLC0415 - needs Triton

    return fuse(node, quantisation)


def prepare_kernels(pool: PagedPool, block_size: int) -> None:
    """Check our GPU kernels on the device, and choose how attention over the pool runs.

    Call it before `workers.kv_engine.selfcheck.check_node`, which then checks what was chosen.

    Raises:
        KernelCheckError: a kernel is wrong.
    """
    device = pool.keys[0].device
    if device.type != "cuda" or default_kernel("cuda") is None:
        return
    from workers.kv_engine.gpu.kernel_checks import check_kernels  # noqa: PLC0415 - needs Triton
    from workers.kv_engine.gpu.stages import choose_stages  # noqa: PLC0415 - the same

    check_kernels(device)
    if pool.kernel is default_kernel("cuda"):
        choose_stages(pool, block_size)
