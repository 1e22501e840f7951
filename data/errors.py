"""The one exception for bad input to the data tools: its message is a sentence a user can act on."""


class InputError(ValueError):
    """Bad input that names the file or key and the mend; commands print it and exit with code 2."""
