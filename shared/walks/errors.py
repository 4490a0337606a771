"""The error for an invalid walk."""


class WalkError(ValueError):
    """A walk, or a call of a running walk, is invalid. The message names the place and a remedy."""
