"""What is raised for a walk that is wrong."""


class WalkError(ValueError):
    """A walk that cannot be built, or run, as asked; says where, and what would be right."""
