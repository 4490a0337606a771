"""The choice whether a node's layers are computed by the fused GPU kernels.

Otherwise transformers' modules compute the layers. The equivalent for CPUs is
`workers.cpu_kernels.decoder.use_cpu_kernels`.
"""

from workers.kv_engine.attention.kernels import default_kernel
from workers.kv_engine.node import KVNode


def use_gpu_kernels(node: KVNode) -> KVNode:
    """Return the node with its layers fused, or the node itself if the device or the kernels cannot do it.

    On a GPU the kernels are checked first (`workers.kv_engine.gpu.kernel_checks`). Call it before
    `workers.kv_engine.selfcheck.check_node`, which then checks the fused layers.

    Raises:
        KernelCheckError: a kernel is wrong on this GPU.
    """
    if default_kernel(node.device.type) is None:
        return node
    from workers.kv_engine.gpu.decoder import fuse  # noqa: PLC0415 - needs Triton
    from workers.kv_engine.gpu.kernel_checks import check_kernels  # noqa: PLC0415 - needs Triton

    if node.device.type == "cuda":
        check_kernels(node.device)
    return fuse(node)
