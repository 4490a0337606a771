"""The weights that the nodes of the family load. No torch."""

from models.robot_policy.weight_files import further_repositories, weight_files

__all__ = ["further_repositories", "weight_files"]
