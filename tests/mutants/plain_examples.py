"""A pytest plugin for runs on mutants: a test that fails does not look for its smallest example, nor keep it."""

from hypothesis import Phase, settings

settings.register_profile(
    "mutants", phases=[Phase.explicit, Phase.generate], database=None, derandomize=True, deadline=None
)
settings.load_profile("mutants")
