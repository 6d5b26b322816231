"""The client of the trajectory API, for workers, trainers and runs."""
