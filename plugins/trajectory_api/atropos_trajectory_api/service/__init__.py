"""The state of `atropos serve`, without HTTP: hub, draws, workers, the trainer's session, the old protocol's registrations."""
