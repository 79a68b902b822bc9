"""Every error noisescale raises on purpose.

    NoiseScaleError
    ├── InvalidInputError (ValueError)   a number or name that cannot be right
    │   └── ContradictionError           two given fields that disagree
    ├── NotMeasuredError                 a run that has not measured a step yet
    ├── SchemaVersionError (ValueError)  a report from a newer version than this one
    ├── AttachError                      the monitor cannot measure this model
    │   ├── CommHookTakenError           the model already has a comm hook
    │   ├── OptimizerNotFoundError       no optimizer was given or seen
    │   ├── BatchCountError              the batch size cannot be read from the inputs
    │   └── UnsupportedModelError        this kind of model or mode is not measured
    └── StateError                       a saved monitor state that cannot be loaded

Each says what was given, what was expected and what to do, and keeps its data as attributes.
The client and the server derive their own errors from NoiseScaleError.
"""

from collections.abc import Sequence


class NoiseScaleError(Exception):
    """Base of every error noisescale raises on purpose."""


class InvalidInputError(NoiseScaleError, ValueError):
    """A value that cannot be right.

    Attributes:
        field: Name of the offending field or argument.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class ContradictionError(InvalidInputError):
    """Two fields that were both given and disagree.

    Attributes:
        fields: The names of the two fields.
    """

    def __init__(self, message: str, *, fields: Sequence[str]) -> None:
        super().__init__(message, field=fields[0])
        self.fields = tuple(fields)


class NotMeasuredError(NoiseScaleError):
    """A run that has not measured a single step yet, so nothing can be said of it."""


class SchemaVersionError(NoiseScaleError, ValueError):
    """A report whose schema is newer than this version understands.

    Attributes:
        given: The schema version of the report.
        supported: The newest schema version understood here.
    """

    def __init__(self, *, given: int, supported: int) -> None:
        super().__init__(
            f"schema_version {given} was given, but this version of noisescale understands up to "
            f"{supported}; upgrade the server, or use a client of the server's version"
        )
        self.given = given
        self.supported = supported


class AttachError(NoiseScaleError):
    """The monitor cannot measure this model as it was given."""


class CommHookTakenError(AttachError):
    """The model already has a communication hook."""


class OptimizerNotFoundError(AttachError):
    """No optimizer was given, and none can be seen from the model."""


class BatchCountError(AttachError):
    """The number of examples or tokens cannot be read from the model's inputs."""


class UnsupportedModelError(AttachError):
    """This kind of model, or this mode of running it, is not measured."""


class StateError(NoiseScaleError):
    """A saved monitor state that cannot be loaded here."""
