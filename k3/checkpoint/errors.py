"""The one error of checkpoint reading: the message names the file and the key. Imports nothing."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be trusted: says which file, which key, which rule, and what to do."""
