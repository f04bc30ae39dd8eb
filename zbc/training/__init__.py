"""Training around the runtime: data, models, checkpoints, launchers, watchdogs."""
