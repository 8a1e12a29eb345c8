"""What is wrong with an environment's code, as exceptions that need neither grpc nor numpy.

They are raised inside the environment or where it is defined. A session turns those that happen while an
episode is played into the client's one exception tree (`opentinkerapi.runtime.errors`).
"""


class EnvironmentDefinitionError(TypeError):
    """The class is no environment that can be played; the message says what to change."""


class InvalidOptions(ValueError):
    """The environment does not take these options; the message names them."""


class InvalidReward(ValueError):
    """A reward that is not a finite number, or contradicts itself. Never replaced by 0."""


class InvalidEpisodeData(ValueError):
    """An observation, info, task or message that cannot be shown to a model or sent."""
