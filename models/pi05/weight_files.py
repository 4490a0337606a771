"""The weights that the nodes of the family load. No torch."""

from models.robot_policy.weight_files import weight_files

__all__ = ["weight_files"]
