"""A pytest plugin: Hypothesis does not look for the smallest example of a fault, because that takes minutes."""

from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk")
