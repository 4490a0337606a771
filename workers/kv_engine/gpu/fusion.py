"""The choice whether a node's layers are computed by the fused GPU kernels.

Otherwise transformers' modules compute the layers. The equivalent for CPUs is
`workers.cpu_kernels.decoder.use_cpu_kernels`.
"""

from workers.kv_engine.attention.kernels import default_kernel
from workers.kv_engine.node import KVNode


def use_gpu_kernels(node: KVNode) -> KVNode:
    """Return the node with its layers fused, or the node itself if the device or the kernels cannot do it.

    Call it before `workers.kv_engine.selfcheck.check_node`, which then checks the fused layers.
    """
    if default_kernel(node.device.type) is None:
        return node
    from workers.kv_engine.gpu.decoder import fuse  # noqa: PLC0415 - needs Triton

    return fuse(node)
