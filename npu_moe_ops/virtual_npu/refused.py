"""The one error of the virtual NPU."""


class Refused(RuntimeError):
    """The virtual NPU does not do this, or a device would not: a message instead of a wrong number."""
