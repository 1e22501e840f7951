"""The one exception for bad input to a model: its message is a sentence a user can act on."""


class InputError(ValueError):
    """Bad input that names the value and the mend; commands print it and exit with code 2."""
