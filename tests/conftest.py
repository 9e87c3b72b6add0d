"""The profile of Hypothesis for build servers, whose own one tries the same examples on every day."""

from hypothesis import settings

settings.register_profile("seeded", settings.get_profile("ci"), derandomize=False)
