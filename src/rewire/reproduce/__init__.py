"""The paper's experiments: recipes that return configs, and sweeps that run them."""
