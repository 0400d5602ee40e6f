"""Training runs: config, loop, checkpoints, and the folder that holds them."""
