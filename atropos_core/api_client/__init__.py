"""The trajectory API seen from workers, trainers and runs: the client's half."""
