"""Public models, dense against sparse."""
