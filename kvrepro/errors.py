"""The one exception for bad input."""


class InputError(ValueError):
    """Bad input, told in one line: what was asked, what stands in its way (both values), and the way out."""
