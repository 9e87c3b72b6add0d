"""Profiles of Hypothesis: no example has a time limit, since tests share a machine; build servers try the same examples
on every day, and others with a seed."""

from hypothesis import settings

settings.register_profile("seeded", settings.get_profile("ci"), derandomize=False)
settings.register_profile("unhurried", deadline=None)
if settings.get_current_profile_name() == "default":
    settings.load_profile("unhurried")
