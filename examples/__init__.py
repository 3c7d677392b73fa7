"""Programs that use jaxsoftmax."""
