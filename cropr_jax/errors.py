"""Errors that are the user's to mend, told in one line without a traceback."""


class ConfigError(ValueError):
    """A config field, file or command that cannot work.

    The message names the field or file, what was found, what was expected and what to do.
    `run.py` and the other commands print it as one line and exit with status 2.
    """


class ExampleError(ConfigError):
    """An example of a data set that cannot be read; the message names its file."""


class WorkerError(ConfigError):
    """A process that reads examples was killed from outside."""


class CheckpointError(ConfigError):
    """A checkpoint that does not belong to the model it is asked to fill, or cannot be read."""


class ScheduleError(ConfigError):
    """A schedule that a model or a method cannot meet; the message names block and limit."""
