"""Property tests are not timed: the first call of a decomposition loads libraries."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
