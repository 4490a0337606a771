"""The error for a schema that cannot be enforced exactly."""


class UnsupportedSchemaError(ValueError):
    """A keyword, or a value of it, cannot be enforced: what was expected, what was found, what to do."""
